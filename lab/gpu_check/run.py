"""Runs the parts of a check in their order, within its budget, and writes down what was found.

After every part, and whenever a part has something new, result.json and page.md are written whole.
A check that has ended also leaves a price list, prices.json, for the plan of the next one.
"""

import json
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from controller.util.files import write_atomically
from lab.gpu_check import acceptance, page
from lab.gpu_check.budget import (
    PRICE_FILE,
    Deadline,
    OutOfTimeError,
    PlannedPart,
    Planner,
    plan,
    total_seconds,
)
from lab.gpu_check.check import Check, GpuCheckOptions
from lab.gpu_check.parts import PARTS
from lab.gpu_check.shapes import WITHOUT_GPU, Device, Scale, largest_that_fits
from lab.harness.engines import Workplace
from lab.harness.errors import HarnessError
from lab.harness.measured import run_facts, write_result
from lab.harness.terminal import Terminal

# Of the budget, for the end of the engines and the page.
_SPARE_SECONDS = 10.0


def planned_parts(options: GpuCheckOptions, scale: Scale) -> list[PlannedPart]:
    """Counts and prices the parts at a scale."""
    planner = Planner(options.shape, scale, options.device, options.graph_sizes)
    counting = [(name, PARTS[name].plan) for name in options.parts]
    return plan(counting, planner, options.prices)


def choose_scale(options: GpuCheckOptions) -> Scale:
    """Returns the scale that was asked for, or the largest that fits the budget."""
    if options.scale is not None:
        return options.scale
    if options.device is not Device.GPU:
        return WITHOUT_GPU[options.device]
    return largest_that_fits(
        options.seconds - _SPARE_SECONDS,
        lambda scale: total_seconds(planned_parts(options, scale)),
    )


def run(options: GpuCheckOptions, terminal: Terminal) -> dict[str, Any]:
    """Runs the check; returns what it found, which is in result.json too.

    A part that fails does not keep the next ones from running.  Raises HarnessError for a failure
    outside the parts, such as a folder that cannot be written, and SystemExit for SIGTERM; the
    results so far are written first.
    """
    deadline = Deadline(options.seconds - _SPARE_SECONDS)
    scale = choose_scale(options)
    planned = planned_parts(options, scale)
    document: dict[str, Any] = {
        **run_facts(),
        "device": options.device.value,
        "shape": options.shape.name,
        "scale": scale.name,
        "acceptance": dict(acceptance.ASSUMED),
        "planned_seconds": {part.name: round(part.seconds, 1) for part in planned},
        "left_out": {},
        "failed": {},
        "seconds": 0.0,
    }
    save = _make_save(document, options.output, deadline)
    try:
        # Before anything starts.  Files of an earlier check must not pass for this one's.
        save()
        (options.output / PRICE_FILE.name).unlink(missing_ok=True)
        with ExitStack() as stack:
            place = stack.enter_context(Workplace.temporary(options.output, "gpu-check"))
            check = Check(options, scale, deadline, place, terminal, stack, document, save)
            for part in planned:
                _run_part(check, part)
            check.run_only()
            document["done"] = check.tally.as_json()
            source = f"measured: {page.machine_text(document)}, shape {options.shape.name}"
            prices = check.tally.prices(source, options.prices.request)
            if prices is not None:
                text = json.dumps(prices.as_json(), indent=1) + "\n"
                write_atomically(options.output / PRICE_FILE.name, text.encode())
            save()
    except BaseException as error:
        document["stopped"] = f"{type(error).__name__}: {error}".rstrip(": ")
        save()
        raise
    return document


def _run_part(check: Check, planned: PlannedPart) -> None:
    """Runs a part, unless the time that is left is too short; what it leaves out is noted."""
    left_out = check.document["left_out"]
    start_seconds = check.deadline.elapsed
    try:
        # A part is started if half of its time is left: every part writes its results as it goes.
        check.deadline.require(planned.seconds / 2, f"the part {planned.name}")
        PARTS[planned.name].run(check)
    except OutOfTimeError as error:
        left_out[planned.name] = str(error)
        check.terminal.say(f"{planned.name}: stopped, {error}")
    except Exception as error:  # noqa: BLE001  # whatever it is, the other parts can still run
        expected = isinstance(error, HarnessError)
        reason = str(error) if expected else "".join(traceback.format_exception(error)[::-1])
        check.document["failed"][planned.name] = reason.strip()
        check.terminal.say(f"{planned.name} failed: {reason}")
        check.abandon()
    part_seconds = check.document.setdefault("part_seconds", {})
    part_seconds[planned.name] = round(check.deadline.elapsed - start_seconds, 1)
    check.save()


def _make_save(document: dict[str, Any], output: Path, deadline: Deadline) -> Callable[[], None]:
    def save() -> None:
        document["seconds"] = round(deadline.elapsed, 1)
        try:
            write_result(document, output)
            write_atomically(output / "page.md", f"{page.markdown(document)}\n".encode())
        except OSError as error:
            raise HarnessError(f"nothing can be written to {output}: {error}") from error

    return save
