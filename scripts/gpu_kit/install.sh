#!/usr/bin/env bash
# On the GPU machine: keeps this folder's piece of the kit.  With the last piece, in whatever order they come, it
# unpacks the kit and writes $KIT/env.sh, which is to be sourced in the repository's root.  Idempotent, and offline.
#
#   KIT=/opt/speculation-kit   where the kit goes
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
KIT=${KIT:-/opt/speculation-kit}
say() { printf 'kit: %s\n' "$*"; }
die() { printf 'kit: %s\n' "$*" >&2; exit 1; }

unpack() {
  local began=$SECONDS
  [ "$(cat "$pieces"/? | sha256sum | cut -d' ' -f1)" = "$sum" ] ||
    die "the pieces do not have the checksum of the kit: carry them again ($pieces)"
  rm -rf "$KIT/installed" "$KIT/site"
  # Python can read it on machines that have no xz.
  cat "$pieces"/? | python3 -c '
import sys, tarfile
with tarfile.open(fileobj=sys.stdin.buffer, mode="r|xz") as kit:
    kit.extractall(sys.argv[1])' "$KIT"
  # Otherwise every process of every engine compiles what it imports.  Some files are for a newer Python.
  python3 -m compileall -q -j 0 "$KIT/site" >/dev/null 2>&1 || true
  echo "$sum" >"$KIT/installed"
  say "unpacked in $((SECONDS - began)) s"
}

# Fails unless the machine has what machine.txt names; other versions of triton or transformers are only noted.
check_machine() {
  python3 - "$KIT/machine.txt" <<'EOF'
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

missing, others = [], []
for line in Path(sys.argv[1]).read_text().splitlines():
    name, _, wanted = line.partition("==")
    if not name or name.startswith("#"):
        continue
    try:
        found = "{}.{}".format(*sys.version_info) if name == "python" else version(name)
    except PackageNotFoundError:
        missing.append(f"{name} is not installed")
        continue
    if wanted and found.split("+")[0].split(".")[:2] != wanted.split(".")[:2]:
        said = missing if name in ("python", "torch") else others
        said.append(f"{name} is {found}, and the kit is for {wanted}")
for text in others:
    print("kit: note:", text)
if missing:
    sys.exit("\n".join(f"kit: {text}" for text in missing))
EOF
}

# The folder of CUDA's compiler and libraries, or nothing.
find_cuda() {
  local folder nvcc
  nvcc=$(readlink -f "$(command -v nvcc || echo /none/bin/nvcc)")
  for folder in "${CUDA_HOME:-}" /usr/local/cuda /usr/local/cuda-13.0 /usr/local/cuda-13 "$(dirname "$(dirname "$nvcc")")"; do
    if [ -n "$folder" ] && [ -x "$folder/bin/nvcc" ] && compgen -G "$folder/lib64/libcudart.so*" >/dev/null; then
      echo "$folder"
      return
    fi
  done
}

read -r sum count <"$here/whole"
pieces=$KIT/pieces/$sum
mkdir -p "$pieces"
cp -f "$here/piece" "$pieces/$(basename "$here")"
have=$(find "$pieces" -type f | wc -l)
if [ "$have" -lt "$count" ]; then
  say "$have of $count pieces are there"
  exit 0
fi
[ "$(cat "$KIT/installed" 2>/dev/null)" = "$sum" ] || unpack
check_machine
for program in c++ ninja; do command -v "$program" >/dev/null || say "note: no $program: kernels cannot be compiled"; done
cuda=$(find_cuda)
cat >"$KIT/env.sh" <<EOF
export PYTHONPATH=$KIT/site:\$PWD:\$PWD/proto\${PYTHONPATH:+:\$PYTHONPATH}
${cuda:+export CUDA_HOME=$cuda}
# The kernel library is older than this SGLang asks for, and the Rust tree core is not in the kit.
export SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1 SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false TORCHDYNAMO_DISABLE=1
# A crashed engine ends at once instead of writing core dumps for a minute.
export SGLANG_CUDA_COREDUMP_BEFORE_CRASH=0 SGLANG_PYSPY_DUMP_BEFORE_CRASH=0
export PYTHONUNBUFFERED=1 SGLANG_JIT_CACHE_DIR=$KIT/jit TRITON_CACHE_DIR=$KIT/triton
EOF
say "ready: . $KIT/env.sh (CUDA_HOME is ${cuda:-unknown, so kernels cannot be compiled})"
