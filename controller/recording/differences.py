"""Describes differences in one line: between two plans, and between two states of a core."""

from collections.abc import Mapping
from typing import Any

from controller.core.engine.checkpoint import Tree, Typed
from controller.recording.checkpoint_messages import state_to_proto
from controller.wire.override_text import reason_text
from speculation.v1 import plan_pb2

_ROWS_SHOWN = 4


def plan_difference(recorded: plan_pb2.Plan | None, now: plan_pb2.Plan | None) -> str:
    """Empty for the same plan, bit by bit."""
    if recorded is None or now is None:
        if recorded is now:
            return ""
        return f"recorded {_said(recorded)}, now {_said(now)}"
    if recorded.SerializeToString(deterministic=True) == now.SerializeToString(deterministic=True):
        return ""
    parts = [
        f"{name}: recorded {str(was)!r}, now {str(is_)!r}"
        for name in ("epoch", "lease_ms", "reason_detail", "draft_version")
        if (was := getattr(recorded, name)) != (is_ := getattr(now, name))
    ]
    if recorded.reason != now.reason:
        parts.append(f"reason: recorded {reason_text(recorded)}, now {reason_text(now)}")
    if recorded.regime != now.regime:
        parts.append(f"regime: recorded {_line(recorded.regime)}, now {_line(now.regime)}")
    if list(recorded.overrides) != list(now.overrides):
        parts.append(f"overrides: recorded {list(recorded.overrides)}, now {list(now.overrides)}")
    rows = _rows(recorded, now)
    return "; ".join([*parts, *rows[:_ROWS_SHOWN], *(["…"] if len(rows) > _ROWS_SHOWN else [])])


def _rows(recorded: plan_pb2.Plan, now: plan_pb2.Plan) -> list[str]:
    if len(recorded.rows) != len(now.rows):
        return [f"rows: recorded {len(recorded.rows)}, now {len(now.rows)}"]
    return [
        f"B <= {was.max_batch_size}: recorded {_line(was)}, now {_line(is_)}"
        for was, is_ in zip(recorded.rows, now.rows, strict=True)
        if was != is_
    ]


def _said(plan: plan_pb2.Plan | None) -> str:
    return "no new plan" if plan is None else f"plan {plan.epoch}"


def _line(message: object) -> str:
    return " ".join(str(message).split())


def state_difference(recorded: Mapping[str, Tree], now: Mapping[str, Tree]) -> str:
    """Empty for the same variables, bit by bit."""
    was, is_ = state_to_proto(recorded), state_to_proto(now)
    if was.SerializeToString(deterministic=True) == is_.SerializeToString(deterministic=True):
        return ""
    return f"the core's variables differ: {_where(recorded, now, 'core')}"


def _where(recorded: Tree, now: Tree, name: str) -> str:
    """The first variable that differs, by its path."""
    if type(recorded) is type(now):
        mine, theirs = _children(recorded), _children(now)
        if mine and theirs and mine.keys() == theirs.keys():
            for key, value in mine.items():
                if state_to_proto({"": value}) != state_to_proto({"": theirs[key]}):
                    return _where(value, theirs[key], f"{name}.{key}")
    return f"{name}: recorded {_line(recorded)[:120]}, now {_line(now)[:120]}"


def _children(tree: Tree) -> Mapping[Any, Tree]:
    if isinstance(tree, Typed):
        return dict(tree.fields)
    if isinstance(tree, Mapping):
        return tree
    if isinstance(tree, list | tuple):
        return dict(enumerate(tree))
    return {}
