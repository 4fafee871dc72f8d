"""The metrics and labels that PromQL expressions use, found by a parser of PromQL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import promql_parser

OF_PROMETHEUS = frozenset({"job", "instance"})
"""Labels that Prometheus adds to every series."""


def uses(expression: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the metrics that an expression selects, each with the labels that it is selected by, and "" with the labels
    that series are grouped or joined by. Raises ValueError for an expression that is no PromQL."""
    yield from _uses(promql_parser.parse(expression))


def _uses(node: Any) -> Iterator[tuple[str, frozenset[str]]]:
    match type(node).__name__:
        case "VectorSelector":
            yield node.name, frozenset(matcher.name for matcher in node.matchers.matchers)
        case "MatrixSelector":
            yield from _uses(node.vector_selector)
        case "AggregateExpr":
            if node.modifier is not None:
                yield "", frozenset(node.modifier.labels)
            yield from _uses(node.expr)
        case "BinaryExpr":
            if node.modifier is not None and node.modifier.matching is not None:
                yield "", frozenset(node.modifier.matching.labels)
            yield from _uses(node.lhs)
            yield from _uses(node.rhs)
        case "Call":
            for argument in node.args:
                yield from _uses(argument)
        case "ParenExpr" | "UnaryExpr" | "SubqueryExpr":
            yield from _uses(node.expr)
        case "NumberLiteral" | "StringLiteral":
            pass
        case other:
            raise TypeError(f"an expression of type {other} is not looked into")
