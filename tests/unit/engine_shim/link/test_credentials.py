"""The file of an engine's token is read for every session, and may be half-written by then."""

from pathlib import Path

import pytest

from engine_shim.link.credentials import EngineCredentials


@pytest.mark.parametrize("content", [b"two\nlines", b"\xff\xfe", b"half\0", b"\x7f"])
def test_a_file_that_holds_no_token_is_named_until_it_does(tmp_path: Path, content: bytes):
    path = tmp_path / "token"
    path.write_bytes(content)
    credentials = EngineCredentials(token_file=str(path))
    # The kind of error of a missing file, which the agent shows and waits out.
    with pytest.raises(OSError, match="not one line of printable ASCII") as caught:
        credentials.metadata()
    assert caught.value.filename == str(path)
    path.write_bytes(b" secret\n")
    assert credentials.metadata() == (("authorization", "Bearer secret"),)
