"""A controller's variables as plain values, and back: what deciding on from some moment needs.

    capture(core) -> tree of numbers, texts, lists, arrays and `Typed` objects, all of them copies
    restore(core, tree)  into a core that was made from the same engine, settings and profile

What the constructor makes and nothing changes is left out (`_CONSTANT`), and so is what no decision
reads (the account, the diagnostics of the last decision); settings and overrides are given to the
new core before.  Only classes of the core are ever built, by name, from a closed list.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeAlias

import numpy as np

from controller.core import engine_spec, plan
from controller.core.acceptance import by_class, cusum, estimator, warm_start
from controller.core.cost import catch_up, drafter_backlog, model
from controller.core.engine import engine_controller
from controller.core.engine.engine_controller import EngineController
from controller.core.errors import InvalidStateError
from controller.core.planning import baseline_planners, exploration, observation_cost, planner
from controller.core.training import (
    drafter_updates,
    selective_training,
    stride_planner,
    update_cost,
    update_response,
)

_MODULES = (
    estimator, catch_up, model, drafter_updates, engine_controller, exploration,
    drafter_backlog, planner, baseline_planners, stride_planner, selective_training, cusum,
    by_class, engine_spec, plan, update_cost, update_response, warm_start, observation_cost,
)  # fmt: skip
# Made by the constructor, and the same ever after.
_PLANNER = frozenset({
    "arms", "buckets", "_settings", "_off", "_observation_planner", "_feasible", "_possible",
    "_on_arm", "_off_arm", "_index",
})  # fmt: skip
_CONSTANT: Final[Mapping[type, frozenset[str]]] = {
    engine_controller.EngineController: frozenset({
        "spec", "_settings", "_clock", "arms", "_arm_index", "_buckets", "_sizes", "_overrides",
        "_rows_at",
    }),
    estimator.AcceptanceEstimator: frozenset({
        "gamma_max", "_settings", "_fast_keeps", "_slow_keeps",
    }),
    model.CostModel: frozenset({
        "profile_id", "prior", "_buckets", "_bucket_list", "_padded",
        "_extrapolated", "_kv_reference", "_kv_rate", "_grid", "_grid_rows", "_drift_max",
        "_features", "_flat_features", "_process_noise", "_covariance_start", "_cell_sigma",
        "_order",
        "_off",
    }),
    drafter_updates.DrafterUpdates: frozenset({"_able"}),
    exploration.Explorer: frozenset({"_arms", "_settings"}),
    drafter_backlog.DrafterBacklog: frozenset({"_can_sleep", "_apart", "_most_steps"}),
    planner.Planner: _PLANNER,
    baseline_planners.TidePlanner: _PLANNER,
    baseline_planners.EmaPlanner: _PLANNER,
    baseline_planners._Slot: frozenset({"gammas", "_down"}),  # noqa: SLF001  # a closed list has to name all
    stride_planner.RegimePlanner: frozenset({"_learner", "_learns", "_gammas"}),
    selective_training.SelectiveTraining: frozenset({"drafter", "settings"}),
    cusum.Cusum: frozenset({"limit"}),
    by_class.TrafficEstimator: frozenset({"_settings"}),
    update_response.UpdateResponse: frozenset({"_eta", "_delta", "_log_prior"}),
}  # fmt: skip
# Of an EngineController: what only people look at.
_LEFT_OUT: Final = _CONSTANT[EngineController] | {"prediction_audit", "_decision"}
_NOTHING: Final[frozenset[str]] = frozenset()
_DTYPES = ("<f8", "<i8", "|b1")


@dataclass(frozen=True, slots=True)
class Typed:
    """An object: its class by name, its variables by theirs."""

    type: str
    fields: "Mapping[str, Tree]"


@dataclass(frozen=True, slots=True)
class Chosen:
    """A member of an enumeration."""

    type: str
    name: str


Tree: TypeAlias = Any
"""None, bool, int, float, str, numpy number or array, list, tuple, dict, Typed or Chosen."""


def _classes() -> dict[str, type]:
    return {
        f"{module.__name__.rpartition('.')[2]}.{name}": kind
        for module in _MODULES
        for name, kind in vars(module).items()
        if isinstance(kind, type) and kind.__module__ == module.__name__
    }


_BY_NAME = _classes()
_NAME_OF = {kind: name for name, kind in _BY_NAME.items()}


def capture(core: EngineController) -> dict[str, Tree]:
    """The variables of a core.  Nothing in it moves when the core goes on."""
    return {name: _tree(value) for name, value in vars(core).items() if name not in _LEFT_OUT}


def restore(core: EngineController, state: Mapping[str, Tree]) -> None:
    """Puts variables into a fresh core, which holds the same overrides already.

    Raises InvalidStateError for what does not fit.
    """
    try:
        for label in state["traffic"].fields["classes"]:
            core.traffic.admit(str(label))
        expected = set(vars(core)) - _LEFT_OUT
        if set(state) != expected:
            odd = min(set(state) ^ expected)
            raise InvalidStateError(f"variable {odd!r} is there on one side only")
        for name in expected:
            setattr(core, name, _value(state[name], getattr(core, name)))
        core.take_estimates()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidStateError(f"no state of this engine's core: {error!r}") from error


def _names(found: object) -> list[str]:
    if dataclasses.is_dataclass(found):
        names = [item.name for item in dataclasses.fields(found)]
    else:
        names = list(vars(found))
    left_out = _CONSTANT.get(type(found), _NOTHING)
    return [name for name in names if name not in left_out]


def _tree(value: Any) -> Tree:
    """A copy, all the way down."""
    if value is None or isinstance(value, bool | int | float | str | np.generic):
        return value
    if isinstance(value, list | tuple):
        items = [_tree(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {_tree(key): _tree(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return value.copy(order="K")
    return _named(value)


def _named(value: Any) -> Chosen | Typed:
    name = _NAME_OF[type(value)]
    if isinstance(value, Enum):
        return Chosen(name, value.name)
    return Typed(name, {field: _tree(getattr(value, field)) for field in _names(value)})


def _value(tree: Tree, current: Any) -> Any:
    """What a tree says.  current: what stands in its place now, and lends what is constant."""
    if isinstance(tree, Typed):
        return _object(tree, current)
    if isinstance(tree, Chosen):
        return _enumeration(tree.type)[tree.name]
    if isinstance(tree, list | tuple):
        now = current if isinstance(current, list | tuple) and len(current) == len(tree) else ()
        items = [_value(item, now[i] if now else None) for i, item in enumerate(tree)]
        return items if isinstance(tree, list) else tuple(items)
    if isinstance(tree, dict):
        known = current if isinstance(current, dict) else {}
        return {
            (key := _value(name, None)): _value(item, known.get(key)) for name, item in tree.items()
        }
    if isinstance(tree, np.ndarray):
        if tree.dtype.str not in _DTYPES:
            raise InvalidStateError(f"an array of {tree.dtype}")
        return tree.copy(order="K")
    return tree


def _enumeration(name: str) -> type[Enum]:
    kind = _BY_NAME[name]
    if not issubclass(kind, Enum):
        raise InvalidStateError(f"{name} is no enumeration")
    return kind


def _object(tree: Typed, current: Any) -> Any:
    kind = _BY_NAME[tree.type]
    if type(current) is kind and not _is_frozen(kind):
        built = current
        names = set(_names(built))
    elif dataclasses.is_dataclass(kind) and kind not in _CONSTANT:
        built = object.__new__(kind)
        names = {item.name for item in dataclasses.fields(kind)}
    else:
        raise InvalidStateError(f"a {tree.type} where the engine's core has none")
    if set(tree.fields) != names:
        odd = min(set(tree.fields) ^ names)
        raise InvalidStateError(f"{tree.type}.{odd} is there on one side only")
    for name, item in tree.fields.items():
        value = _value(item, getattr(current, name, None) if built is current else None)
        object.__setattr__(built, name, value)
    return built


def _is_frozen(kind: type) -> bool:
    parameters = getattr(kind, "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)
