"""TLS files are used where they fit together, at the start and after a change."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from controller.service.net.access import AccessFileError
from controller.service.net.tcp import server_credentials
from tests.support.credentials import free_address, make_authority, openssl
from tests.support.service_harness import PATIENCE_SECONDS

FILES = ("sidecar.pem", "sidecar.key", "ca.pem")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("authority")
    make_authority(folder, ["sidecar", "other", "ann"])
    openssl(
        folder, "ec", "-in", "sidecar.key", "-aes256", "-passout", "pass:x", "-out", "locked.key"
    )
    return folder


@pytest.fixture
def files(authority: Path, tmp_path: Path) -> list[Path]:
    for name in FILES:
        (tmp_path / name).write_bytes((authority / name).read_bytes())
    return [tmp_path / name for name in FILES]


@pytest.fixture
def address(files: list[Path]) -> Iterator[str]:
    """A server with these files."""
    server = grpc.server(ThreadPoolExecutor(1))
    address = free_address().replace("127.0.0.1", "localhost")
    server.add_secure_port(address, server_credentials(*files))
    server.start()
    yield address
    server.stop(0)


def connects(address: str, authority: Path, name: str = "ann") -> bool:
    """Whether a caller with this certificate gets a connection."""
    pair = ((authority / f"{name}.{kind}").read_bytes() for kind in ("key", "pem"))
    tls = grpc.ssl_channel_credentials((authority / "ca.pem").read_bytes(), *pair)
    with grpc.secure_channel(address, tls, (("grpc.use_local_subchannel_pool", 1),)) as channel:
        call = channel.unary_unary("/x/Y", lambda x: x, lambda x: x)
        try:
            call(b"", timeout=PATIENCE_SECONDS)
        except grpc.RpcError as error:
            return error.code() is grpc.StatusCode.UNIMPLEMENTED
    return True


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


@pytest.mark.parametrize(
    ("which", "content"),
    [
        *((which, content) for which in range(3) for content in ("", "cut")),
        (1, "other"),
        (1, "locked"),
    ],
)
def test_files_that_do_not_fit_refuse_a_start_and_leave_a_server_as_it_was(
    files: list[Path], authority: Path, address: str, which: int, content: str
):
    good = files[which].read_bytes()
    wrong = {"": b"", "cut": cut(good)} | {
        name: (authority / f"{name}.key").read_bytes() for name in ("other", "locked")
    }
    files[which].write_bytes(wrong[content])
    with pytest.raises(AccessFileError, match=r"TLS: .*sidecar\.pem, .*sidecar\.key"):
        server_credentials(*files)
    assert connects(address, authority)
    files[which].write_bytes(good)
    assert connects(address, authority)


def test_a_pair_is_used_when_both_have_been_replaced(
    files: list[Path], authority: Path, address: str, tmp_path: Path
):
    new = tmp_path / "new"
    new.mkdir()
    make_authority(new, ["sidecar", "ann"])
    for path in files:
        path.write_bytes((new / path.name).read_bytes())
        if path == files[0]:
            assert connects(address, authority)
    assert connects(address, new)
    assert not connects(address, authority)


def test_a_missing_file_is_named(files: list[Path]):
    files[2].unlink()
    with pytest.raises(AccessFileError, match=r"ca\.pem: No such file"):
        server_credentials(*files)
