"""Settings of the plugin, as people write them."""

import pytest

from engine_shim.sglang.errors import PluginError
from engine_shim.sglang.settings import load_settings


@pytest.mark.parametrize(
    ("value", "limits"),
    [("", {}), ("7:8", {7: 8}), (" 5:32 , 7:8,", {5: 32, 7: 8}), ("3:0", {3: 0})],
)
def test_graph_limits_are_read(
    monkeypatch: pytest.MonkeyPatch, value: str, limits: dict[int, int]
) -> None:
    monkeypatch.setenv("SPECULATION_GRAPH_LIMITS", value)
    assert load_settings().graph_limits == limits


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("7", "gamma:largest batch is needed"),
        ("7:8,7:9", "each gamma once"),
        ("7:many", "SPECULATION_GRAPH_LIMITS"),
        ("6:8", "6:8 is no draft length of SPECULATION_GAMMAS 0,1,2,3,5,7"),
        ("7:-1", "or no batch size"),
        ("3:8", "limits 3, which SPECULATION_SAFE_GAMMA needs"),
    ],
)
def test_graph_limits_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    monkeypatch.setenv("SPECULATION_GRAPH_LIMITS", value)
    monkeypatch.setenv("SPECULATION_SAFE_GAMMA", "3")
    with pytest.raises(PluginError, match=message):
        load_settings()
