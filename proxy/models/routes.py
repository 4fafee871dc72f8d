"""The routes of a server: the names in its table of models, by kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from proxy.models.declared import DeclaredModel
from tokengrove.options.model import RouteKind


@dataclass(frozen=True, slots=True)
class Routes:
    """`kinds`: by name; empty without a table, when any name is taken. `own`: the route of the server's own engine."""

    kinds: Mapping[str, RouteKind] = field(default_factory=dict)
    own: str = ""

    @classmethod
    def of(cls, models: Sequence[DeclaredModel]) -> Routes:
        """The routes of a table."""
        own = next((model.name for model in models if model.of_server), "")
        return cls({model.name: model.kind for model in models}, own)

    @property
    def trained(self) -> tuple[str, ...]:
        """The names of trained routes, in the order of the table."""
        return tuple(name for name, kind in self.kinds.items() if kind is RouteKind.POLICY)

    @property
    def other_trained(self) -> tuple[str, ...]:
        """The trained routes with an engine of their own."""
        return tuple(name for name in self.trained if name != self.own)
