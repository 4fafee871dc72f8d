"""Which route serves a request: by the name that the request gives, and by the names that its session is bound to.

An unknown name is an error: no request is served by a route that nobody named.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from proxy.models.declared import DeclaredModel
from tokengrove.errors import InvalidRequest, ModelNotFound, brief
from tokengrove.options.model import RouteKind

_PINNED = re.compile(r"(?P<route>.+)@(?P<version>[0-9]{1,15})")
_WILD = re.compile(r"[*?]|\[[^\]]*\]")


class Named(NamedTuple):
    """A route, and the adapter version that the name pins (`policy@7`); None: the route decides."""

    route: str
    version: int | None = None


class ModelNames:
    """The declared models by name. Without any, every name means the only route, whose name is "".

    `own`: the route of the server's own engine.
    """

    def __init__(self, declared: Sequence[DeclaredModel]) -> None:
        self.declared = {each.name: each for each in declared}
        self.own = next((each.name for each in declared if each.of_server), "")

    @property
    def kinds(self) -> dict[str, RouteKind]:
        """The kind of each route by name."""
        return {each.name: each.kind for each in self.declared.values()}

    @property
    def trained(self) -> tuple[str, ...]:
        """The names of trained routes, in the order of the table."""
        return tuple(name for name, kind in self.kinds.items() if kind is RouteKind.POLICY)

    @property
    def other_trained(self) -> tuple[str, ...]:
        """The trained routes with an engine of their own."""
        return tuple(name for name in self.trained if name != self.own)

    def find(self, model: str, bindings: Mapping[str, str] | None = None) -> Named:
        """The route of a request with this `model` ("": none). `bindings`: names or patterns to names of routes.

        Bindings come first: the name itself, then the pattern with the most literal characters. Raises ModelNotFound.
        """
        if not self.declared:
            return Named("")
        asked = model or self.own
        if bindings and (bound := _bound(asked, bindings)) is not None:
            found, pin = self._named(bound, model), _PINNED.fullmatch(asked)
            if pin is not None and pin["route"] == found.route and found.version is None:
                return Named(found.route, int(pin["version"]))  # a pattern binds the route, not the version
            return found
        found = self._named(asked, model)
        if self.declared[found.route].restricted and found.route not in map(_route_of, (bindings or {}).values()):
            raise ModelNotFound(
                f"the model {brief(model)} does not exist for this session: its start did not name it ('models')",
                param="model",
            )
        return found

    def check_bindings(self, bindings: Mapping[str, str]) -> None:
        """Raise InvalidRequest, which names the field, if one of these names or patterns is bound to no route."""
        if not self.declared:
            raise InvalidRequest(
                "'models' binds names to routes, but this server declares none (--models); leave it out", param="models"
            )
        for pattern, name in bindings.items():
            try:
                self._named(name, name)
            except ModelNotFound as error:
                raise InvalidRequest(f"'models.{pattern}': {error.message}", param=f"models.{pattern}") from None

    def listed(self, bindings: Mapping[str, str] | None = None) -> list[DeclaredModel]:
        """The models that a session with these bindings may use."""
        bound = set(map(_route_of, (bindings or {}).values()))
        return [each for each in self.declared.values() if not each.restricted or each.name in bound]

    def _named(self, name: str, model: str) -> Named:
        if name in self.declared:
            return Named(name)
        if (found := _PINNED.fullmatch(name)) is not None and found["route"] in self.declared:
            if self.declared[found["route"]].kind is not RouteKind.POLICY:
                raise ModelNotFound(
                    f"the model {brief(name)} does not exist: {found['route']} has no adapters", param="model"
                )
            return Named(found["route"], int(found["version"]))
        known = ", ".join(each.name for each in self.declared.values() if not each.restricted)
        raise ModelNotFound(f"the model {brief(model or name)} does not exist; this server has {known}", param="model")


def _bound(asked: str, bindings: Mapping[str, str]) -> str | None:
    if asked in bindings:
        return bindings[asked]
    matching = [pattern for pattern in bindings if fnmatchcase(asked, pattern)]
    best = max(matching, key=lambda pattern: len(_WILD.sub("", pattern)), default=None)
    return None if best is None else bindings[best]


def _route_of(name: str) -> str:
    found = _PINNED.fullmatch(name)
    return name if found is None else found["route"]
