"""Whatever a text is, strict YAML is read or refused by its own error."""

from contextlib import suppress
from typing import ClassVar

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from controller.util.strict_yaml import StrictLoader, StrictYamlError, load_mapping

# What YAML gives a meaning to, and numbers, dates and escapes on the edge of theirs.
_PIECES = st.sampled_from(
    [
        *"{}[],:-?&*!|>'\"%@`#~=<.\\ \n\t",
        "a", "a: ", "- ", "? ", "<<: ", "---\n", "...\n", "%YAML 1.2\n", "%TAG ! x\n", "!!set ",
        "&a ", "*a", "1", "-1", "0x_", "0b", "0_", "08", "1:1", "1:59:59", ":1" * 70, ".5", "1e999",
        "1.0e+999", ".inf", ".nan", "9" * 70, "0x" + "f" * 5000, "2026-99-99",
        "2026-01-01 25:61:61",
        "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "1-1-1", "on", "off", "null",
        '"\\UFFFFFFFF"', '"\\U00110000"', '"\\ud800"', '"\\0"', '"\\xZZ"', "\0", "\x85", "\u2028",
        "\ufeff", "\U0001f600", "\ud800",
    ]
)  # fmt: skip
_TEXTS = st.lists(_PIECES | st.text(max_size=3), max_size=12).map("".join)


class _Loader(StrictLoader):
    depth_max: ClassVar[int] = 6
    too_deep: ClassVar[str] = "too deep"


def read(text: str) -> object:
    """Its values; the error's line and text if it is refused."""
    try:
        mapping_result = load_mapping(text, _Loader, lambda root: root.start_mark.line)
    except StrictYamlError as error:
        return error.line, str(error)
    return mapping_result[0] if mapping_result else {}


@given(_TEXTS)
@example("a: 1" + ":1" * 200 + ".5")
@example("a: 1" + ":1" * 2000)
@example('a: "\\UFFFFFFFF"')
@example("a: " + "[" * 30_000)
@example("a: &a [*a]")
@example("? " * 1000)
@settings(max_examples=400, deadline=None)
def test_any_text_is_read_or_refused_by_the_typed_error(text: str):
    for whole in (text, f"a: {text}"):
        result = read(whole)
        if isinstance(result, tuple):
            line, message = result
            assert 0 <= line <= len(whole) + 1
            assert message


@given(st.recursive(st.none() | st.integers() | st.floats() | st.text(max_size=9),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                        st.text(max_size=4), inner, max_size=3), max_leaves=9))  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_what_is_read_can_be_shown_and_stored(value: object):
    with suppress(UnicodeEncodeError):
        result = read(yaml.safe_dump({"a": value}, allow_unicode=True))
        repr(result).encode()
