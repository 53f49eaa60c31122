"""What the environment names for calling a sidecar, and what is refused before a call is made."""

from pathlib import Path

import pytest

from controller.client.channels import Credentials, CredentialsError, connection_failure_reason
from tests.support.addresses import ELSEWHERE, LOOPBACK
from tests.support.credentials import make_authority

VARIABLES = ("CA", "CLIENT_CERTIFICATE", "CLIENT_KEY", "TOKEN_FILE")


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pki")
    make_authority(folder, ["ann"])
    (folder / "token").write_text("secret-of-ann\n")
    return folder


@pytest.fixture
def name(pki: Path, monkeypatch: pytest.MonkeyPatch):
    """Has the environment name these, and nothing else."""

    def apply(*variables: str) -> None:
        files = dict(zip(VARIABLES, ("ca.pem", "ann.pem", "ann.key", "token"), strict=True))
        for variable in VARIABLES:
            monkeypatch.delenv(f"CONTROLLER_{variable}", raising=False)
        for variable in variables:
            monkeypatch.setenv(f"CONTROLLER_{variable}", str(pki / files[variable]))

    apply()
    return apply


def test_nothing_is_named(name):
    assert Credentials.for_address("pod:9466") == Credentials(None, "")
    assert Credentials().metadata() == ()


def test_a_unix_socket_needs_none_of_it(name, monkeypatch: pytest.MonkeyPatch):
    name(*VARIABLES)
    monkeypatch.setenv("CONTROLLER_CA", "/nowhere")
    assert Credentials.for_address("unix:/run/x.sock") == Credentials(None, "")


def test_an_authority_means_tls_and_the_token_goes_with_every_call(name):
    name("CA", "TOKEN_FILE")
    credentials = Credentials.for_address("pod:9466")
    assert credentials.tls is not None
    assert credentials.metadata() == (("authorization", "Bearer secret-of-ann"),)
    name(*VARIABLES)
    assert Credentials.for_address("pod:9466").tls is not None


@pytest.mark.parametrize("content", [b"two\nlines", b"\xff\xfe", b"a\0b", b"\x1b[31m"])
def test_a_file_that_holds_no_token_is_named(
    name, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "token"
    path.write_bytes(content)
    monkeypatch.setenv("CONTROLLER_TOKEN_FILE", str(path))
    with pytest.raises(CredentialsError, match=f"TOKEN_FILE: {path}: the token is not one line"):
        Credentials.for_address("localhost:9466")


@pytest.mark.parametrize("address", LOOPBACK)
def test_on_this_machine_a_token_may_go_over_an_open_line(name, address: str):
    name("TOKEN_FILE")
    assert Credentials.for_address(address) == Credentials(None, "secret-of-ann")


@pytest.mark.parametrize("address", ELSEWHERE)
def test_what_only_looks_like_this_machine_gets_no_token(name, address: str):
    name("TOKEN_FILE")
    with pytest.raises(CredentialsError, match="sent unencrypted"):
        Credentials.for_address(address)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        (("TOKEN_FILE",), "the token would be sent unencrypted"),
        (("CLIENT_CERTIFICATE", "CLIENT_KEY"), "a certificate needs TLS"),
        (("CA", "CLIENT_KEY"), "need each other"),
        (("CA", "CLIENT_CERTIFICATE"), "need each other"),
    ],
)
def test_what_would_be_less_safe_than_meant_is_refused(name, variables: tuple[str, ...], text: str):
    name(*variables)
    with pytest.raises(CredentialsError, match=text) as error:
        Credentials.for_address("pod:9466")
    assert "secret-of-ann" not in str(error.value)


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_file_that_cannot_be_read_is_named(name, variable: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(f"CONTROLLER_{variable}", "/nowhere")
    with pytest.raises(CredentialsError, match=f"CONTROLLER_{variable}: /nowhere: No such file"):
        Credentials.for_address("pod:9466")


def test_what_to_look_at_where_nobody_answers(name):
    assert "CONTROLLER_CA" not in connection_failure_reason("unix:/x", None)
    assert "name its authority in CONTROLLER_CA" in connection_failure_reason(
        "pod:1", "Socket closed"
    )
    assert "certificate" in connection_failure_reason(
        "pod:1", "Tls handshake failed (TSI_PROTOCOL_FAILURE)"
    )
    name("CA")
    assert connection_failure_reason("pod:1", None) == "is `controller serve` running there?"
