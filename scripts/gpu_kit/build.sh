#!/usr/bin/env bash
# Makes the kit with which SGLang and this project run on a GPU machine without a network: .kit/a, .kit/b, ...,
# each with a piece of one archive and install.sh.  Needs a package index, pip, unzip, strip (binutils) and xz; it
# downloads 0.7 GB.  What is in the kit: wheels.txt, overlay/.  What it is for: machine.txt, docs/gpu.md.
#
#   PYTHON=python3      an interpreter that has pip (3.11 or newer)
#   PIECE_MIB=24        largest size of a piece, in MiB
set -euo pipefail
die() { printf 'gpu-kit: %s\n' "$*" >&2; exit 1; }
here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../.." && pwd)
output=$repository/.kit
work=$repository/build/gpu-kit
site=$work/root/site
piece_mib=${PIECE_MIB:-24}
python=${PYTHON:-python3}
constraints=$repository/requirements/constraints.txt

version=$(sed -n 's/^python==//p' "$here/machine.txt")
tags=(--only-binary=:all: --python-version "$version" --implementation cp
  --abi "cp${version/./}" --abi abi3 --abi none)
for glibc in 34 31 28 27 26 24 17; do tags+=(--platform "manylinux_2_${glibc}_x86_64"); done
tags+=(--platform manylinux2014_x86_64 --platform any)

say() { printf 'gpu-kit: %s\n' "$*"; }

check_requirements() {
  local program
  [[ $piece_mib =~ ^[1-9][0-9]*$ ]] || die "PIECE_MIB=$piece_mib: give whole MiB, as in PIECE_MIB=24"
  for program in unzip strip xz sha256sum split; do
    command -v "$program" >/dev/null || die "$program is missing (Debian: apt-get install unzip binutils xz-utils)"
  done
  "$python" -m pip --version >/dev/null 2>&1 && "$python" -c 'import tomllib' 2>/dev/null ||
    die "$python needs pip and Python 3.11 or newer: name another one with PYTHON=..."
}

download() {
  local made_from
  made_from=$(cat "$here/wheels.txt" "$here/machine.txt" "$constraints" | sha256sum)
  [ "$(cat "$work/made-from" 2>/dev/null)" = "$made_from" ] && return
  say "downloading 0.7 GB of wheels, which takes minutes"
  rm -rf "$work/wheels"
  "$python" -m pip --disable-pip-version-check download -q --no-deps "${tags[@]}" -d "$work/wheels" \
    -c "$constraints" -r "$here/wheels.txt"
  echo "$made_from" >"$work/made-from"
}

# SGLang without its diffusion models and tests; without its Rust extensions, whose tree core misreads the tensors
# of torch 2.11; and of its kernel library the one compiled for Hopper.
unpack_sglang() {
  unzip -qo "$work"/wheels/sglang-[0-9]*.whl -d "$site" -x 'sglang/multimodal_gen/*' 'sglang/test/*' \
    'sglang/srt/rust_extensions/*.so' 'sglang/srt/mem_cache/rust_tree_core/*.so'
  unzip -qo "$work"/wheels/sglang_kernel-*.whl 'sgl_kernel/*.py' 'sgl_kernel/sm90/*' '*.dist-info/METADATA' -d "$site"
}

# This project's code is that of the clone.  Its names, versions and entry points are metadata, from which SGLang
# knows its plugins and results know the versions.
write_metadata() {
  "$python" - "$repository" "$site" <<'EOF'
import re
import sys
import tomllib
from pathlib import Path

repository, site = map(Path, sys.argv[1:])
for folder in (repository, repository / "engine_shim"):
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    name, source = project["project"]["name"], project["tool"]["hatch"]["version"]["path"]
    (version,) = re.findall(r'^__version__ = "(.+)"$', (folder / source).read_text(), re.MULTILINE)
    metadata = site / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = project["project"].get("entry-points", {})
    lines = [
        line
        for group, points in groups.items()
        for line in (f"[{group}]", *(f"{key} = {value}" for key, value in points.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join([*lines, ""]))
EOF
}

# What no run needs: programs, documents, types for checkers, symbols for debuggers.
trim() {
  rm -rf "${site:?}/bin" "$site/share"
  find "$site" -name __pycache__ -prune -exec rm -rf {} +
  find "$site" -name '*.pyi' -delete
  find "$site" -name '*.so*' -type f ! -path '*/sgl_kernel/*' -exec strip --strip-unneeded {} + 2>/dev/null || true
}

write_pieces() {
  local sum count=0 piece
  rm -f "$work"/piece.*
  tar -C "$work/root" --sort=name --owner=0 --group=0 --mtime=@0 -cf - . | xz -T1 -6 -c >"$work/kit.tar.xz"
  sum=$(sha256sum "$work/kit.tar.xz" | cut -d' ' -f1)
  rm -rf "$output"
  split -b "${piece_mib}M" -a 1 "$work/kit.tar.xz" "$work/piece."
  for piece in "$work"/piece.?; do
    mkdir -p "$output/${piece##*.}"
    mv "$piece" "$output/${piece##*.}/piece"
    count=$((count + 1))
  done
  for piece in "$output"/?; do
    echo "$sum $count" >"$piece/whole"
    cp "$here/install.sh" "$piece/"
  done
  rm "$work/kit.tar.xz"
}

check_requirements
mkdir -p "$work"
download
say "putting them together"
rm -rf "$work/root"
mkdir -p "$site"
shopt -s extglob
"$python" -m pip --disable-pip-version-check install -q --no-index --no-deps --no-compile --no-cache-dir "${tags[@]}" \
  --target "$site" "$work"/wheels/!(sglang*).whl
unpack_sglang
write_metadata
trim
cp -r "$here/overlay/." "$site/"
cp "$here/machine.txt" "$here/warm.py" "$here/job.sh" "$work/root/"
say "compressing $(du -sm "$work/root" | cut -f1) MiB"
write_pieces
say "done: $(du -sm "$output" | cut -f1) MiB in" "$output"/? "(what to do with them: docs/gpu.md, Without a network)"
