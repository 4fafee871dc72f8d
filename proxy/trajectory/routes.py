"""The turns of a session by the route that answered them. No tree has turns of two routes.

Each route is laid out, scored and compared by itself, with the session's own score beside the rewards of its turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from proxy.types import Interaction
from tokengrove.options.model import RouteKind


def by_route(interactions: Iterable[Interaction]) -> Mapping[str, Sequence[Interaction]]:
    """The turns of each route, in order of the first turn of each. One entry at most without a table of models."""
    found: dict[str, list[Interaction]] = {}
    for interaction in interactions:
        found.setdefault(interaction.route, []).append(interaction)
    return found


def trained_turns(interactions: Sequence[Interaction]) -> Sequence[Interaction]:
    """The turns of trained routes."""
    return [interaction for interaction in interactions if interaction.route_kind is RouteKind.POLICY]
