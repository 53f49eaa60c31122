"""Measuring through a sidecar on TCP: with TLS, and with a token that may measure and install."""

from pathlib import Path

import pytest

from controller.profiling import ProfilingError, ProfilingSettings
from controller.settings.settings import CLIENT_VARIABLES
from controller.util.exit_codes import Exit
from tests.support.clockwork_engine import ClockworkEngine
from tests.support.credentials import free_address, make_authority, token_line
from tests.unit.controller.profiling.harness import profile, run_alongside, socket_address

BRIEF = ProfilingSettings(batch_sizes=(1,), budget_seconds=1.0)


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch):
    for name in CLIENT_VARIABLES:
        monkeypatch.delenv(name, raising=False)


async def test_the_environment_names_what_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_authority(tmp_path, ["sidecar"])
    access, token, tcp = tmp_path / "access", tmp_path / "token", free_address()
    access.write_text(token_line("read,measure,install", "secret-of-ann", "ann"))
    tls = {"tls_certificate": tmp_path / "sidecar.pem", "tls_key": tmp_path / "sidecar.key"}
    engine = ClockworkEngine(socket_address(tmp_path))
    address = tcp.replace("127.0.0.1", "localhost")

    async def refused(text: str, code: Exit) -> None:
        with pytest.raises(ProfilingError, match=text) as error:
            await profile(tmp_path, engine, sidecar=address, wait_seconds=0.0)
        assert error.value.exit_code is code

    async with run_alongside(tmp_path, engine, tcp=tcp, access=access, **tls):
        await refused("If it uses TLS, name its authority in CONTROLLER_CA", Exit.NO_SIDECAR)
        monkeypatch.setenv("CONTROLLER_CA", str(tmp_path / "ca.pem"))
        await refused(f"the sidecar at {address} refuses: the call has no token", Exit.DENIED)
        monkeypatch.setenv("CONTROLLER_TOKEN_FILE", str(token))
        await refused(f"CONTROLLER_TOKEN_FILE: {token}: No such file", Exit.USAGE)
        token.write_text("secret-of-ann\n")
        outcome = await profile(tmp_path, engine, sidecar=address, settings=BRIEF)
    assert outcome.engine_ids == ("clockwork",)
    assert not outcome.reused
