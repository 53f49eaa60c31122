"""What PromQL asks for: its metrics, and the labels that each has to have."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser as promql

_COMPARISONS = {"==", "!=", "<", ">", "<=", ">=", "and", "or", "unless"}
# What Grafana puts in.
_VARIABLES = {"$__rate_interval": "5m", "$engine": ".+"}


@dataclass(frozen=True)
class Selector:
    """A metric, and labels that the expression takes it to have.

    text: as it stands there.  is_exact: it asks for one value of a label.
    """

    name: str
    labels: frozenset[str]
    text: str
    is_exact: bool


def panel_targets(dashboard: dict[str, Any]) -> list[tuple[str, str]]:
    """(expression, legend) of everything that a panel shows, with the variables filled in."""
    return [
        (_filled(target["expr"]), target["legendFormat"])
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]


def dashboard_queries(dashboard: dict[str, Any]) -> list[str]:
    """The panels' expressions, and those of the variables themselves."""
    queries = [expression for expression, _ in panel_targets(dashboard)]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = variable["query"]["query"][len("label_values(") : -1].split(", ")
            queries.append(f"count by ({label}) ({metric})")
    return queries


def _filled(expression: str) -> str:
    for name, value in _VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def selectors(query: str) -> set[Selector]:
    """Raises ValueError for what is no PromQL."""
    return set(_in(promql.parse(query), frozenset()))


def compared(query: str) -> list[str]:
    """What an alert compares: its expression without comparisons, sets and plain numbers."""
    return list(_sides(promql.parse(query)))


def _sides(node: promql.Expr) -> Iterator[str]:
    match node:
        case promql.ParenExpr():
            yield from _sides(node.expr)
        case promql.BinaryExpr() if str(node.op) in _COMPARISONS:
            yield from _sides(node.lhs)
            yield from _sides(node.rhs)
        case promql.NumberLiteral():
            pass
        case _:
            yield str(node.prettify())


def _in(node: promql.Expr, needed: frozenset[str]) -> Iterator[Selector]:
    """needed: labels by which what is around it groups or matches."""
    match node:
        case promql.VectorSelector():
            matchers = node.matchers.matchers
            yield Selector(
                node.name or "",
                needed | {matcher.name for matcher in matchers},
                str(node.prettify()),
                any(matcher.op == promql.MatchOp.Equal for matcher in matchers),
            )
        case promql.MatrixSelector():
            yield from _in(node.vector_selector, needed)
        case promql.Call():
            for argument in node.args:
                yield from _in(argument, needed)
        case promql.AggregateExpr():
            yield from _in(node.expr, needed | _grouped(node))
        case promql.BinaryExpr():
            matched, carried = _matched(node)
            # Labels that come from the other side are that side's.
            yield from _in(node.lhs, (needed - carried) | matched)
            yield from _in(node.rhs, matched | carried)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            yield from _in(node.expr, needed)


def _grouped(node: promql.AggregateExpr) -> frozenset[str]:
    modifier = node.modifier
    is_by_modifier = modifier is not None and modifier.type == promql.AggModifierType.By
    return frozenset(modifier.labels if modifier is not None and is_by_modifier else ())


def _matched(node: promql.BinaryExpr) -> tuple[frozenset[str], frozenset[str]]:
    """(labels of `on`, labels of `group_left`)."""
    modifier = node.modifier
    if modifier is None:
        return frozenset(), frozenset()
    matching = modifier.matching
    on = matching is not None and matching.type == promql.LabelModifierType.Include
    carried = modifier.group_labels
    return (
        frozenset(matching.labels if matching is not None and on else ()),
        frozenset(carried or ()),
    )
