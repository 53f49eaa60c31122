#!/usr/bin/env bash
# job.sh SECONDS NAME COMMAND...: runs a command of the check in the kit's environment for at most SECONDS, with
# `--output` set to a folder of its own, and copies what it wrote to $OUT, however it ends:
# NAME.json, NAME.page.md, NAME.*.png, NAME.tgz (all of it, with the logs); the first two also every few seconds, for
# the case that this script itself is killed.  At the limit the command gets SIGTERM, and
# SIGKILL KIT_GRACE seconds later.  Whatever it started and left behind is killed, because an engine would keep the
# GPU's memory.  The exit code is the command's; 124 if the limit ended it, 137 if it had to be killed.
#
#   OUT=build/gpu-kit/results   KIT_GRACE=20   KIT_RESULTS=/tmp/check (where the command writes)
set -uo pipefail
[ $# -ge 3 ] || { echo "usage: job.sh SECONDS NAME COMMAND..." >&2; exit 2; }
limit=$1 name=$2
shift 2
KIT=$(cd "$(dirname "$0")" && pwd)
OUT=${OUT:-build/gpu-kit/results}
folder=${KIT_RESULTS:-/tmp/check}/$name
mark=KIT_JOB=$KIT

# shellcheck source=/dev/null  # install.sh writes it
. "$KIT/env.sh"

# Every process that a job of this kit started has its mark, also in a session of its own.
kill_what_is_left() {
  local processes
  mapfile -t processes < <(grep -lzxF "$mark" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3)
  [ ${#processes[@]} = 0 ] || kill -9 "${processes[@]}" 2>/dev/null
}

copy_findings() {
  cp -f "$folder/result.json" "$OUT/$name.json" 2>/dev/null
  cp -f "$folder/page.md" "$OUT/$name.page.md" 2>/dev/null
}

copy_results() {
  local file
  copy_findings
  for file in "$folder"/*.png; do [ ! -e "$file" ] || cp -f "$file" "$OUT/$name.${file##*/}"; done
  tar -C "${folder%/*}" -czf "$OUT/$name.tgz" "$name"
}

memory_in_use() { nvidia-smi --query-gpu=memory.used --format=csv,noheader 2>/dev/null | tr '\n' ' '; }

# Options after -- are the engines'.
command=() placed=
for word in "$@"; do
  if [ "$word" = -- ] && [ -z "$placed" ]; then command+=(--output "$folder") && placed=1; fi
  command+=("$word")
done
[ -n "$placed" ] || command+=(--output "$folder")

kill_what_is_left
rm -rf "$folder"
mkdir -p "$folder" "$OUT"
began=$SECONDS
echo "== $name: ${command[*]} (at most $limit s)"
# SPT_NOENV: a process that sets its title keeps its mark.  Not through a pipe: what is left would keep it open.
: >"$folder/output.txt"  # tail wants it to be there
env "$mark" SPT_NOENV=1 timeout --foreground -k "${KIT_GRACE:-20}" "$limit" "${command[@]}" >"$folder/output.txt" 2>&1 &
job=$!
tail -n +1 -s 0.2 --pid "$job" -f "$folder/output.txt" &
shown=$!
while sleep 5 && kill -0 "$job" 2>/dev/null; do copy_findings; done >/dev/null 2>&1 &
copying=$!
trap 'kill "$job" 2>/dev/null' TERM INT HUP
until wait "$job"; code=$?; ! kill -0 "$job" 2>/dev/null; do :; done
kill "$copying" 2>/dev/null
kill_what_is_left
wait "$shown"
echo "== $name: exit $code after $((SECONDS - began)) s; GPU memory in use: $(memory_in_use)"
if [ "$code" != 0 ]; then
  while read -r log; do
    echo "-- $log"
    grep -v server_args= "$log" | grep -nE 'Error|error|Traceback|OOM|out of memory' | tail -n 6 | cut -c1-300
  done < <(find "$folder" -name '*.log')
fi
copy_results
exit "$code"
