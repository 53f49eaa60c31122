#!/usr/bin/env bash
# usage: lock.sh      writes what .venv holds to requirements/constraints.txt
set -euo pipefail
cd "$(dirname "$0")/.."

lock=requirements/constraints.txt
{
  echo "# Everything in .venv, pinned: \`make lock\` writes it after a package was added or updated."
  # A local version (2.13.0+cpu) names a build, and another machine may have another one.
  .venv/bin/python -m pip --disable-pip-version-check freeze --exclude-editable |
    sed -e 's/+[a-z0-9.]*$//' | sort -f
} >"$lock.new"
mv "$lock.new" "$lock"
echo "lock: $(grep -c == "$lock") packages"
