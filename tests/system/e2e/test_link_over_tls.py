"""An engine's link to a sidecar process over TCP: TLS, tokens, certificates, and their rotation."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine_shim.link.engine_link import EngineLink
from engine_shim.link.messages import SidecarState
from engine_shim.link.plan_follower import Source
from engine_shim.link.settings import LinkSettings
from tests.support.credentials import free_address, make_authority, token_line
from tests.support.eventually import eventually
from tests.support.link_messages import engine_spec
from tests.support.sidecar_process import sidecar_process


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pki")
    make_authority(folder, ["sidecar", "engine-7.example"])
    return folder


@contextmanager
def served(tmp_path: Path, pki: Path, *more: str) -> Iterator[str]:
    """The TCP address of a sidecar that knows "s-secret" and engine-7.example."""
    (tmp_path / "access").write_text(
        token_line("steer", "s-secret", "engine") + "steer cert:engine-7.example engine-7\n"
    )
    address = free_address()
    flags = (
        *("--tcp", address, "--access", str(tmp_path / "access")),
        *("--tls-certificate", str(pki / "sidecar.pem"), "--tls-key", str(pki / "sidecar.key")),
    )
    with sidecar_process(tmp_path, *flags, *more):
        yield address.replace("127.0.0.1", "localhost")


@contextmanager
def linked(**settings: str) -> Iterator[EngineLink]:
    link = EngineLink.start(engine_spec(), LinkSettings(**settings), startup_gamma=1)  # type: ignore[arg-type]
    try:
        yield link
    finally:
        link.close()


def steered(link: EngineLink) -> None:
    eventually(lambda: link.choose(4).source is Source.PLAN, description="steered by a plan")


def refused(link: EngineLink) -> str:
    def state() -> bool:
        link.choose(4)
        return link.status().sidecar is SidecarState.REFUSED

    eventually(state, description="refused")
    return link.status().sidecar_detail


def test_a_token_steers_over_tls_and_a_new_one_is_taken_up(tmp_path: Path, pki: Path):
    token = tmp_path / "token"
    token.write_text("guessed\n")
    with (
        served(tmp_path, pki) as address,
        linked(sidecar=address, ca=str(pki / "ca.pem"), token_file=str(token)) as link,
    ):
        assert "no token or client certificate" in refused(link)
        token.write_text("s-secret\n")
        steered(link)


def test_a_certificate_steers(tmp_path: Path, pki: Path):
    ours = {
        "client_certificate": str(pki / "engine-7.example.pem"),
        "client_key": str(pki / "engine-7.example.key"),
    }
    with (
        served(tmp_path, pki, "--tls-client-ca", str(pki / "ca.pem")) as address,
        linked(sidecar=address, ca=str(pki / "ca.pem"), **ours) as link,
    ):
        steered(link)


def test_a_file_that_is_missing_is_said_and_awaited(tmp_path: Path, pki: Path):
    token = tmp_path / "later"
    with (
        served(tmp_path, pki) as address,
        linked(sidecar=address, ca=str(pki / "ca.pem"), token_file=str(token)) as link,
    ):
        assert "later: No such file" in refused(link)
        assert link.choose(4).gamma == 1
        token.write_text("s-secret")
        steered(link)
