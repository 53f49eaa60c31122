#!/usr/bin/env bash
# Makes .venv-core with the sidecar, the simulator, the shim and what their tests need: no torch, no
# engine, no Debian packages.  It does nothing if nothing that .venv-core is made from has changed.
#
#   PYTHON=python3.12      another interpreter (3.11 or newer)
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv-core
stamp=$venv/.made-from
log=build/setup-core.log
pinned=requirements/constraints.txt

say() { printf 'setup-core: %s\n' "$*"; }
die() { printf 'setup-core: %s\n' "$*" >&2; exit 1; }

python=
for candidate in "${PYTHON:-python3.11}" python3; do
  if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$(command -v "$candidate")
    break
  fi
done
[ -n "$python" ] || die "needs Python 3.11 or newer with its venv module, or PYTHON=..."

made_from=$("$python" --version && cat $pinned ./pyproject.toml ./*/pyproject.toml "$0" | sha256sum)
[ "$(cat "$stamp" 2>/dev/null)" = "$made_from" ] && exit 0

started=$SECONDS
mkdir -p "${log%/*}"
say "making $venv with $("$python" --version)"
"$python" -m venv --clear "$venv"
# Python compiles what is imported when it is imported first: a tenth of all the files.
"$venv/bin/python" -m pip --disable-pip-version-check install --no-compile -c $pinned \
  -e '.[test]' -e ./simulator -e ./engine_shim >"$log" 2>&1 || {
  tail -n 30 "$log" >&2
  die "pip failed, see above and $log"
}
printf '%s' "$made_from" >"$stamp"
say "$venv is ready ($((SECONDS - started)) s)"
