"""Classes of requests: few, short, and no more of a request than its class."""

import hashlib
import hmac
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.sampling.sampling_params import SamplingParams

from controller.core.step_report import MAX_LABEL_CHARACTERS
from engine_shim.common.errors import PluginError
from engine_shim.sglang.api.settings import load_settings
from engine_shim.sglang.request_options import (
    MAX_LABELS,
    OTHER_LABEL,
    UNUSED_AFTER_REQUESTS,
    RequestClasses,
    read_key,
)

KEY = b"0123456789abcdef"


def request(
    prompt: Any = (), params: object = None, adapter: str | None = None, **sampling: Any
) -> SimpleNamespace:
    """What is read of SGLang's `Req`."""
    sampling_params = SamplingParams(custom_params=params, **sampling)
    sampling_params.normalize(None)
    return SimpleNamespace(
        origin_input_ids=list(prompt), sampling_params=sampling_params, lora_id=adapter
    )


def hashing(tokens: int = 4) -> RequestClasses:
    return RequestClasses(("prompt",), key=KEY, prompt_tokens=tokens)


@pytest.mark.parametrize(
    ("sampling", "label"),
    [
        ({"json_schema": "{}"}, "json warm"),
        ({"structural_tag": "x", "temperature": 0.3}, "tool cool"),
        ({"regex": "a*", "temperature": 0}, "grammar greedy"),
        ({"ebnf": "root ::= 'a'"}, "grammar warm"),
        ({}, "warm"),
    ],
)
def test_traits_are_joined_to_one_label(sampling: dict[str, Any], label: str) -> None:
    assert RequestClasses(("temperature", "grammar")).label(request(**sampling)) == label


def test_a_clients_label_is_cut_and_printable() -> None:
    asked = request(params={"speculation_class": "a\n\x1b[31m" + "b" * 300})
    label = RequestClasses(("label",)).label(asked)
    assert len(label) == 40
    assert label.isprintable()


def test_all_traits_together_are_a_label_of_the_contract() -> None:
    classes = RequestClasses(
        ("label", "adapter", "prompt", "temperature", "grammar"), key=KEY, prompt_tokens=2
    )
    asked = request((1, 2), {"speculation_class": "c" * 80}, "a" * 80, temperature=0, regex="a*")
    classes.label(asked)
    label = classes.label(asked)
    grammar, temperature, prompt, adapter, own = label.split()
    assert (grammar, temperature, adapter) == ("grammar", "greedy", "a" * 20)
    assert len(prompt) == 8
    assert own
    assert len(label) == MAX_LABEL_CHARACTERS


def test_labels_without_end_are_one_class() -> None:
    classes = RequestClasses(("label",))
    labels = [
        classes.label(request(params={"speculation_class": f"class {i}"}))
        for i in range(MAX_LABELS + 5)
    ]
    assert len(set(labels)) == MAX_LABELS + 1
    assert set(labels[MAX_LABELS:]) == {OTHER_LABEL}


def test_labels_that_are_unused_make_room_and_those_in_use_do_not() -> None:
    classes = RequestClasses(("label",))

    def label(name: str) -> str:
        return classes.label(request(params={"speculation_class": name}))

    for number in range(MAX_LABELS):
        label(f"once {number}")
    assert label("honest") == OTHER_LABEL
    for _ in range(UNUSED_AFTER_REQUESTS):
        label("once 1")
    assert label("honest") == "honest"
    assert label("once 1") == "once 1"
    # It has lost its place, and the next unused one makes room when it returns.
    assert label("once 0") == "once 0"
    assert label("once 2") == "once 2"


def test_beginnings_that_are_unused_make_room() -> None:
    classes = hashing(2)

    def second(first: int) -> str:
        classes.label(request((first, 1)))
        return classes.label(request((first, 1)))

    for first in range(MAX_LABELS):
        assert second(first)
    assert second(500) == ""
    for _ in range(UNUSED_AFTER_REQUESTS):
        classes.label(request((1, 1)))
    assert second(500)


def test_an_adapter_is_called_what_its_operator_calls_it() -> None:
    refs = {
        "1f": LoRARef(lora_id="1f", lora_name="invoices"),
        "2f": LoRARef(lora_id="2f", lora_name="/models/adapters/2026/Grü\nße-of-a-tenant"),
        "3f": LoRARef(lora_id="3f"),
    }
    classes = RequestClasses(("adapter",), adapters=refs)
    assert classes.label(request(adapter="1f")) == "invoices"
    assert classes.label(request(adapter="2f")) == "6/Gr__ße-of-a-tenant".replace("ß", "_")
    assert classes.label(request(adapter="3f")) == "3f"
    assert classes.label(request(adapter="unloaded")) == "unloaded"
    assert classes.label(request()) == ""
    refs["4f"] = LoRARef(lora_id="4f", lora_name="loaded later")
    assert classes.label(request(adapter="4f")) == "loaded later"


def test_prompts_that_begin_alike_are_a_class_from_the_second_one_on() -> None:
    classes = hashing()
    labels = [classes.label(request((7, 8, 9, 10, last))) for last in (1, 2, 3)]
    assert labels[0] == ""
    assert labels[1] == labels[2]
    packed = b"".join(token.to_bytes(8, "little") for token in (7, 8, 9, 10))
    assert labels[1] == hmac.new(KEY, packed, hashlib.sha256).hexdigest()[:8]


def test_another_key_and_other_tokens_give_another_label() -> None:
    def second(classes: RequestClasses, prompt: tuple[int, ...]) -> str:
        classes.label(request(prompt))
        return classes.label(request(prompt))

    other = RequestClasses(("prompt",), key=KEY[::-1], prompt_tokens=4)
    labels = [
        second(hashing(), (7, 8, 9, 10)),
        second(hashing(), (7, 8, 9, 11)),
        second(other, (7, 8, 9, 10)),
    ]
    assert len(set(labels)) == 3


def test_a_short_prompt_has_no_class() -> None:
    classes = hashing()
    assert [classes.label(request((7, 8, 9))) for _ in range(3)] == [""] * 3


def test_unique_beginnings_take_no_place_of_those_that_repeat() -> None:
    classes = hashing(2)
    for first in range(5000):
        assert classes.label(request((first, 1))) == ""
    assert classes.label(request((9999, 1))) == ""
    assert len(classes.label(request((9999, 1)))) == 8
    assert len(classes._seen_once) <= 1024


def test_beginnings_without_end_that_repeat_are_bounded() -> None:
    classes = hashing(2)
    labels = {classes.label(request((first, 1))) for first in range(500) for _ in range(2)}
    assert len(labels) <= MAX_LABELS + 1
    assert len(classes._seen_once) <= 1024


def test_an_error_ends_the_classes_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    classes = RequestClasses(("label",))
    with caplog.at_level(logging.ERROR):
        assert classes.label(SimpleNamespace(sampling_params=None)) == ""
    assert "no longer divided into classes" in caplog.text
    assert classes.label(request(params={"speculation_class": "late"})) == ""


def test_the_key_is_read_from_its_file(tmp_path: Path) -> None:
    (file := tmp_path / "key").write_text(f"{KEY.decode()}\n")
    assert read_key(str(file)) == KEY
    assert read_key("") == b""


def test_a_key_that_keeps_no_secret_is_refused(tmp_path: Path) -> None:
    (file := tmp_path / "key").write_text("changeme\n")
    with pytest.raises(PluginError, match="key has 8 bytes, at least 16 are needed") as short:
        read_key(str(file))
    assert "changeme" not in str(short.value)
    with pytest.raises(PluginError, match=r"CLASS_KEY_FILE: .*nowhere: No such file"):
        read_key(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    "variables",
    [
        {"SPECULATION_CLASSES": "prompt"},
        {"SPECULATION_CLASSES": "label", "SPECULATION_CLASS_KEY_FILE": "/run/secrets/classes"},
    ],
)
def test_the_hash_and_its_key_go_together(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PluginError, match="must be set together"):
        load_settings()


def test_an_unknown_trait_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECULATION_CLASSES", "label,user")
    with pytest.raises(PluginError, match="SPECULATION_CLASSES"):
        load_settings()
