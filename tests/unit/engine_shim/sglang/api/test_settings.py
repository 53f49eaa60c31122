"""Settings of the plugin, as people write them."""

import pytest

from engine_shim.common.errors import PluginError
from engine_shim.sglang.api.settings import load_settings


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
        ("6:8", "6:8 is not a draft length of SPECULATION_GAMMAS 0,1,2,3,5,7"),
        ("7:-1", "or not a batch size"),
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


def test_online_updates_are_off_unless_asked_for() -> None:
    assert not load_settings().online_updates


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ANCHORS", "256", "anchors 256 must be 1 or more, and fewer than window 256"),
        ("LEARNING_RATE", "0", "learning rate 0.0 must be in"),
        ("LEARNING_RATE", "fast", "SPECULATION_ONLINE_LEARNING_RATE"),
        ("DISCOUNT", "2", "discount 2.0 must be in"),
        ("PROXIMAL", "-1", "proximal weight -1.0 must be 0 or more"),
        ("STEPS", "0", "steps 0 and top 64 must be 1 or more"),
        ("SCOPE", "user", "SPECULATION_ONLINE_SCOPE"),
    ],
)
def test_online_updates_that_cannot_work_are_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv("SPECULATION_ONLINE_UPDATES", "1")
    monkeypatch.setenv(f"SPECULATION_ONLINE_{variable}", value)
    with pytest.raises(PluginError, match=message):
        load_settings()
