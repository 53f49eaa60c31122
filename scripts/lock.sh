#!/usr/bin/env bash
# usage: lock.sh [--upgrade]
#
# Writes requirements/constraints.txt, which pins everything in .venv, and requirements/lock, which
# pins what the images install, with the hash of every file:
#
#   sidecar.txt   what the sidecar needs
#   engine.txt    what the shim needs besides SGLang; the image installs what SGLang's image lacks,
#                 and the trainer needs nothing else
#   build.txt     what the wheels are built with; its versions change only with --upgrade
#
# One lock serves the oldest and the newest Python on both machines.  If they would need different
# packages, no lock is written.  `uv lock` and `uv export` do not fit: uv.lock names its index, and
# they take no versions from constraints.txt, which are those that the tests run with.
set -euo pipefail
cd "$(dirname "$0")/.."

constraints=requirements/constraints.txt
locks=requirements/lock
new=$(mktemp -d)
trap 'rm -rf "$new"' EXIT

{
  echo "# Everything in .venv, pinned: \`make lock\` writes it after a package was added or updated."
  # A local version (2.13.0+cpu) names a build, and another machine may have another one.
  .venv/bin/python -m pip --disable-pip-version-check freeze --exclude-editable |
    sed -e 's/+[a-z0-9.]*$//' | sort -f
} >"$new/constraints"
mv "$new/constraints" "$constraints"
echo "lock: $(grep -c == "$constraints") packages"

# compile NAME SOURCE [ARGUMENT...]: writes the lock to $new, or says why it cannot be made.
compile() {
  local name=$1 machine python
  while read -r machine python; do
    # uv keeps the versions that it finds in the output file, unless the constraints exclude them.
    cp "$locks/$name.txt" "$new/$name.$machine"
    .venv/bin/uv pip compile "${@:2}" --constraints "$constraints" --generate-hashes \
      --only-binary :all: --no-header --no-annotate --no-emit-index-url --no-config --quiet \
      --python-platform "$machine-manylinux_2_31" --python-version "$python" \
      --output-file "$new/$name.$machine" </dev/null
  done <<<$'x86_64 3.11.13\naarch64 3.13'
  diff -u "$new/$name.x86_64" "$new/$name.aarch64" || {
    echo "lock: $name.txt would differ between x86_64, Python 3.11 and aarch64, Python 3.13" >&2
    exit 1
  }
  {
    echo "# \`make lock\` writes it, and the images install it by its hashes."
    cat "$new/$name.x86_64"
  } >"$new/$name.txt"
}

.venv/bin/python - >"$new/build.in" <<'EOF'
import tomllib
from pathlib import Path

print(*tomllib.loads(Path("pyproject.toml").read_text())["build-system"]["requires"], sep="\n")
EOF
compile sidecar pyproject.toml
compile engine engine_shim/pyproject.toml
compile build "$new/build.in" "$@"
for name in sidecar engine build; do
  mv "$new/$name.txt" "$locks/$name.txt"
  echo "lock: $name.txt: $(grep -c == "$locks/$name.txt") packages"
done
