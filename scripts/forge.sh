#!/usr/bin/env bash
# usage: forge.sh BIN
#
# Checks what the forge reads: workflows, issue forms, Dependabot's and pre-commit's configuration.
# BIN holds zizmor, check-jsonschema and pre-commit.  No check needs a network.
#
# The persona of zizmor is `pedantic`: it also asks for what makes a workflow safe to change later,
# such as a named job, a `concurrency` group, and a comment beside each permission.  `auditor` adds
# findings that need a person to judge each time.
set -euo pipefail
cd "$(dirname "$0")/.."

bin=$1
schema() {
  local output
  output=$("$bin/check-jsonschema" --builtin-schema "vendor.$1" "${@:2}" 2>&1) || {
    printf '%s\n' "$output" >&2
    return 1
  }
}

"$bin/zizmor" --offline --quiet --no-progress --persona pedantic .github
schema github-workflows .github/workflows/*.yml
schema dependabot .github/dependabot.yml
schema github-issue-config .github/ISSUE_TEMPLATE/config.yml
# shellcheck disable=SC2046  # several paths, none with a space
schema github-issue-forms $(printf '%s\n' .github/ISSUE_TEMPLATE/*.yml | grep -v /config.yml)
"$bin/pre-commit" validate-config .pre-commit-config.yaml
