"""Templates of prompts: texts with `{fields}`. Each kind of prompt has its own fields."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import Any

from tokengrove.errors import InvalidRequest


def contains_renderable_field(template: str, field: str) -> bool:
    """Whether the template has `{field}`, also with a format (`{field:>3}`) or a path into it (`{field.name}`)."""
    return field in _fields(template, "the template")


def rendered(template: str, fields: Mapping[str, Any], name: str = "agent_template") -> str:
    """The template, called `name` in the configuration, with its fields filled in.

    Raises InvalidRequest for an unknown field, and for a brace that belongs to no field.
    """
    for field in _fields(template, name):
        if field not in fields:
            raise InvalidRequest(
                f"{name} has {{{field}}}, but its fields are {', '.join(fields)}; write {{{{ and }}}} for braces",
                param=name,
            )
    return template.format(**fields)


def _fields(template: str, name: str) -> set[str]:
    try:
        found = [field for _, field, _, _ in Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise InvalidRequest(
            f"{name} cannot be rendered: {error}; write {{{{ and }}}} for braces", param=name
        ) from None
    return {field.partition(".")[0].partition("[")[0] for field in found}
