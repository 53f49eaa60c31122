#!/usr/bin/env bash
# usage: buf.sh BUF     lints the contract and checks that it is compatible with its last version
#
# The last version is that of HEAD if the contract has uncommitted changes, and otherwise the one
# before the commit that last changed it.
set -euo pipefail
cd "$(dirname "$0")/.."
buf=$1

"$buf" lint
echo "buf lint: ok"

earlier=
if git rev-parse --quiet --verify HEAD >/dev/null 2>&1; then
  if git diff --quiet HEAD -- 'proto/*.proto'; then
    changed=$(git log -1 --format=%H -- 'proto/*.proto')
    earlier=$(git rev-parse --quiet --verify "${changed:-none}^" || true)
  else
    earlier=HEAD
  fi
fi
if [ -z "$earlier" ] || [ -z "$(git ls-tree -r --name-only "$earlier" -- proto | grep '\.proto$')" ]; then
  echo "buf breaking: skipped, this clone holds no earlier version of the contract"
  exit 0
fi

against=build/proto/against
rm -rf "$against"
mkdir -p "$against"
git archive "$earlier" proto | tar -x -C "$against"
"$buf" breaking proto --against "$against/proto"
echo "buf breaking: ok against $(git rev-parse --short "$earlier")"
