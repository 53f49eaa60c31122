"""Every command as the image runs it: a user without a name or a home, a read-only file system."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from controller.util.exit_codes import Exit
from tests.support.service_harness import ENVIRONMENT
from tests.support.sidecar_process import PATIENCE_SECONDS, wait_until_serving

NAMELESS = 65532

# A mount namespace of its own, in which one directory can be written.  What python needs may lie
# where only root looks: the user may read everything, and gains no right to write.
INSIDE = f"""
mount --bind "$1" "$1" && mount -o remount,bind,ro / || exit 99
shift
exec setpriv --reuid {NAMELESS} --regid {NAMELESS} --clear-groups \\
    --inh-caps +dac_read_search --ambient-caps +dac_read_search "$@"
"""

# Command lines in, one JSON line with their exit codes and outputs out.
RUN_ALL = """
import json, os, pwd, sys
from typer.testing import CliRunner
from controller.cli import app
try:
    pwd.getpwuid(os.getuid())
    sys.exit("this user has a name")
except KeyError:
    pass
assert "HOME" not in os.environ
try:
    open("/read-only-file-system", "w")
    sys.exit("the file system can be written")
except OSError:
    pass
found = []
for words in json.load(sys.stdin):
    done = CliRunner().invoke(app, words)
    kind = "" if isinstance(done.exception, SystemExit | None) else repr(done.exception)
    found.append([done.exit_code, done.output, kind])
print(json.dumps(found))
"""

SET = "override set --allow-no-effect --fleet --off --reason why --id"
LINES: list[tuple[str, Exit]] = [
    ("--help", Exit.DONE),
    ("version", Exit.DONE),
    ("config", Exit.DONE),
    ("engines", Exit.DONE),
    ("explain nosuch", Exit.NOT_INTRODUCED),
    ("top --once", Exit.DONE),
    (f"{SET} a", Exit.DONE),
    (f"{SET} b --dry-run", Exit.DONE),
    ("override list", Exit.DONE),
    ("override clear a --reason why", Exit.DONE),
    ("override log", Exit.DONE),
    ("profile list", Exit.DONE),
    ("profile show 0123456789abcdef", Exit.NOT_FOUND),
    ("profile --wait-seconds 0 --engine-url http://127.0.0.1:1", Exit.NO_ENGINE),
    ("doctor --engine-url http://127.0.0.1:1", Exit.FAILED),
    ("convert none.json none.csv", Exit.USAGE),
    ("replay none", Exit.USAGE),
    ("report none --output none.html", Exit.USAGE),
    ("advise --pool A:8:6.76:2.44 --pool B:8:1:1", Exit.DONE),
]


def test_every_command_works_for_a_user_without_name_home_and_place_to_write(tmp_path: Path):
    namespaces = ["unshare", "--mount", "--propagation", "private"]
    if not shutil.which("setpriv") or os.getuid() != 0:
        pytest.skip("only root can be another user")
    if subprocess.run([*namespaces, "true"], check=False).returncode:
        pytest.skip("no mount namespace can be made here")
    os.chown(tmp_path, NAMELESS, NAMELESS)
    named = {"HOME", "USER", "LOGNAME", "LNAME", "USERNAME"}
    address = f"unix:{tmp_path}/controller.sock"
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in named}
    environment |= {"CONTROLLER_ADDRESS": address, "CONTROLLER_METRICS_PORT": "0"}
    here = [*namespaces, "sh", "-c", INSIDE, "sh", str(tmp_path), sys.executable]
    with subprocess.Popen(
        [*here, "-m", "controller.cli", "serve"],
        env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True,
    ) as serving:  # fmt: skip
        try:
            wait_until_serving(address, serving)
            done = subprocess.run(
                [*here, "-c", RUN_ALL],
                env=environment, cwd=tmp_path, capture_output=True, text=True, check=False,
                input=json.dumps([line.split() for line, _ in LINES]),
                timeout=PATIENCE_SECONDS * 5,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            serving.send_signal(signal.SIGTERM)
            assert serving.wait(PATIENCE_SECONDS) == Exit.DONE
        finally:
            serving.kill()
    outcomes = json.loads(done.stdout)
    for (line, code), (ended, output, exception) in zip(LINES, outcomes, strict=True):
        assert not exception, f"{line}: {exception}"
        assert ended == code, f"{line}: {output}"
    log = next(output for (line, _), (_, output, _) in zip(LINES, outcomes, strict=True)
               if line == "override log")  # fmt: skip
    assert f"uid {NAMELESS}" in log
