"""Describes an engine before it starts: whether it would be steered, and what steering costs."""

from __future__ import annotations

import contextlib
import io
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from engine_shim.common.checks import Check
from engine_shim.common.settings import ShimSettings

# The sidecar's socket in the documents.
DEFAULT_SIDECAR: Final = "unix:/run/speculation/controller.sock"

_START_CHECK_NOTE: Final = (
    "Only the start itself shows whether every hook takes effect in the engine's package, and "
    "whether the drafter drafts. If something is missing, the engine does not start and names it."
)
_LEFT_OUT_NOTE: Final = (
    "They are not taken from a running engine, because they may name code, files or secrets. Give "
    "those that matter after `--`."
)


class InputError(ValueError):
    """Options that do not describe an engine; the message says why."""


@dataclass(frozen=True, slots=True)
class Drafter:
    """Describes a drafter that would be steered.  gammas: its draft lengths, ascending."""

    name: str
    gammas: tuple[int, ...]
    model: str = ""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory that the plugin takes on each device.

    values: the numbers by name, sizes in MiB unless the name says otherwise.  lines: the same as
    text.
    """

    values: Mapping[str, Any]
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on an engine with these flags.

    facts: properties that are never an obstacle.  variables: for the engine's environment, by name.
    memory: None if the engine would not be steered.  left_out: names of flags of a running engine
    that were ignored, because they may make SGLang load something.
    """

    engine: str
    version: str
    checks: tuple[Check, ...]
    facts: Mapping[str, str] = field(default_factory=dict)
    drafters: tuple[Drafter, ...] = ()
    memory: Memory | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def is_steered(self) -> bool:
        """Whether no check has found an obstacle."""
        return not any(check.obstacle for check in self.checks)

    @property
    def engine_starts(self) -> bool:
        """Whether the engine starts, possibly without a gain."""
        return all(check.engine_starts for check in self.checks if check.obstacle)

    def document(self) -> dict[str, Any]:
        """Returns the verdict in plain values."""
        return {
            "api_version": "speculation.v1",
            "kind": "WouldSteer",
            "would_be_steered": self.is_steered,
            "engine": self.engine,
            "engine_version": self.version,
            "checks": [
                {
                    "topic": check.topic,
                    "found": check.actual,
                    "obstacle": check.obstacle,
                    "starts": check.engine_starts,
                    "advice": check.advice,
                }
                for check in self.checks
            ],
            "facts": dict(self.facts),
            "drafters": [asdict(drafter) for drafter in self.drafters],
            "memory": None if self.memory is None else dict(self.memory.values),
            "variables": dict(self.variables),
            "left_out": list(self.left_out),
        }


@contextlib.contextmanager
def raise_input_errors(engine: str) -> Iterator[None]:
    """Raises InputError if the engine's parser, inside the block, exits because of a bad flag."""
    stderr_output = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr_output):
            yield
    except SystemExit as error:
        # argparse prints all options before its reason.
        last_line = stderr_output.getvalue().strip().splitlines()[-1:]
        raise InputError(f"{engine}: {last_line[0] if last_line else 'no flags'}") from error


def strip_launcher(launchers: Iterable[Sequence[str]], arguments: Sequence[str]) -> list[str]:
    """Returns the flags of a command line, without the launch command if it begins with one."""
    for launcher in launchers:
        if list(arguments[: len(launcher)]) == list(launcher):
            return list(arguments[len(launcher) :])
    return list(arguments)


def environment_variables(settings: ShimSettings, gammas: tuple[int, ...]) -> dict[str, str]:
    """Returns the SPECULATION_* variables for which this verdict holds.

    These are the variables that are set, and the two that an engine needs.  gammas: draft lengths
    that the engine prepares.
    """
    values = {name: getattr(settings, name) for name in sorted(settings.model_fields_set)}
    values = {"sidecar": DEFAULT_SIDECAR, "gammas": gammas} | {
        k: v for k, v in values.items() if v != ""
    }
    return {f"SPECULATION_{name.upper()}": _format_value(value) for name, value in values.items()}


def _format_value(value: object) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{key}:{limit}" for key, limit in value.items())
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(int(value)) if isinstance(value, bool) else str(value)


def render_text(verdict: Verdict, width: int) -> str:
    """Formats a verdict as text.

    width: columns of the terminal; a path or an option is not broken, and may exceed the width.
    """
    return "\n".join(_lines(verdict, max(40, width))) + "\n"


def replace_unprintable(text: str) -> str:
    """Replaces characters of a foreign text that could control a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _lines(verdict: Verdict, width: int) -> Iterator[str]:
    conclusion = "would be steered" if verdict.is_steered else "would not be steered"
    if verdict.engine_starts and not verdict.is_steered:
        conclusion = "would start, and gain nothing from its drafter"
    yield from _wrap_line(
        f"{verdict.engine} {verdict.version}: this engine {conclusion}.", "", width
    )
    if verdict.left_out:
        yield from _wrap_line(
            f"Ignored flags: {', '.join(verdict.left_out)}. {_LEFT_OUT_NOTE}", "", width
        )
    yield ""
    topics = [*(check.topic for check in verdict.checks), *verdict.facts]
    topic_width = max(map(len, topics))
    for check in verdict.checks:
        yield from _check_lines(check, topic_width, width)
    for topic, fact in verdict.facts.items():
        yield from _wrap_line(f"yes  {topic:{topic_width}}  {fact}", " " * (topic_width + 7), width)
    if not verdict.is_steered:
        return
    yield ""
    yield "It would steer"
    name_width = max((len(drafter.name) for drafter in verdict.drafters), default=0)
    for drafter in verdict.drafters:
        lengths = ",".join(map(str, drafter.gammas))
        yield replace_unprintable(f"  {drafter.name:{name_width}}  draft lengths {lengths}")
    if verdict.memory is not None:
        yield ""
        yield "Memory"
        for line in verdict.memory.lines:
            yield from _wrap_line(f"  {line}", "  ", width)
    yield ""
    yield "In the engine's environment"
    for name, value in verdict.variables.items():
        yield replace_unprintable(f"  {name}={value}")
    yield ""
    yield from _wrap_line(_START_CHECK_NOTE, "", width)


def _check_lines(check: Check, topic_width: int, width: int) -> Iterator[str]:
    answer = "no" if check.obstacle else "yes"
    yield from _wrap_line(
        f"{answer:3}  {check.topic:{topic_width}}  {check.actual}", " " * (topic_width + 7), width
    )
    if check.obstacle:
        yield from _wrap_line(f"     -> {check.obstacle}", " " * 8, width)
    if check.advice:
        yield from _wrap_line(f"     !  {check.advice}", " " * 8, width)


def _wrap_line(line: str, indent: str, width: int) -> list[str]:
    """Breaks a line between words only, so that paths and options can be copied."""
    printable_line = replace_unprintable(line)
    if len(printable_line) <= width:
        return [printable_line.rstrip()]
    # The blanks before the first word are kept.
    return textwrap.wrap(
        printable_line, width, subsequent_indent=indent, break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True, replace_whitespace=False,
    )  # fmt: skip
