"""Names that the contract takes, whatever the host is called."""

import re
import socket
from pathlib import Path

import pytest

from engine_shim.common.process import default_engine_id, hub_revision, processor_name


@pytest.mark.parametrize("host", ["pod-7", "a b/c", "x" * 300, ""])
def test_the_default_engine_id_is_allowed_by_the_contract(
    monkeypatch: pytest.MonkeyPatch, host: str
):
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    for server in (8000, "vllm-123456"):
        assert re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", default_engine_id(server))


def test_a_folder_has_no_revision(tmp_path: Path):
    assert hub_revision(str(tmp_path), "main") == ""
    assert hub_revision("org/model", "main") == "main"
    assert hub_revision("org/model", None) == ""


def test_the_processor_has_one_line():
    assert processor_name()
    assert "\n" not in processor_name()
