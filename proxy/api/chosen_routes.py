"""The routes that bodies name. Errors name the field `route` and the routes that there are.

Weight versions are whole numbers per route, and a claim is of one route. So where several routes are trained, a body
that compares versions or claims sessions names one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from proxy.models.names import ModelNames
from proxy.store.leases import Queue
from proxy.store.recordings import SessionReads
from proxy.trajectory.layout_options import LayoutOptions
from proxy.types import Interaction
from tokengrove.errors import InvalidRequest, brief
from tokengrove.options.model import RouteKind

_EXTERNAL = frozenset({RouteKind.EXTERNAL})


class ChosenRoutes:
    """Checks names of routes against the server's table and the stored turns."""

    def __init__(self, routes: ModelNames, recordings: SessionReads) -> None:
        self._routes, self._recordings = routes, recordings

    def over(self, recordings: SessionReads) -> ChosenRoutes:
        """The same routes, with the turns of other sessions."""
        return ChosenRoutes(self._routes, recordings)

    def queue(self, route: str | None) -> Queue:
        """The queue of claims that a body names. Raises InvalidRequest."""
        trained = self._routes.trained
        if route is None:
            if len(trained) > 1:
                raise InvalidRequest(
                    f"this server trains the routes {_listed(trained)}, each with a queue of its own: name one in "
                    "'route'",
                    param="route",
                )
            return Queue()
        if route not in trained:
            kind = self._routes.kinds.get(route)
            told = "is none of this server" if kind is None else f"is {kind}, and only trained ones are claimed"
            way_out = f"its trained routes are {_listed(trained)}" if trained else "it has no table of models"
            raise InvalidRequest(f"route {brief(route)} {told}; {way_out}", param="route")
        return Queue(None if route == self._routes.own else route, self._routes.other_trained)

    def of_claim(self, route: str | None) -> Queue:
        """The queue in which a claim holds sessions, also of a route that the table no longer has."""
        return Queue(route, self._routes.other_trained)

    async def of_export(self, options: LayoutOptions, session_ids: Collection[str]) -> LayoutOptions:
        """The options with the routes of these sessions. Raises InvalidRequest for routes that they cannot have."""
        stored = await self._recordings.load_routes(session_ids)
        self._check_versions(options, stored)
        if options.routes is None:
            return replace(options, labels_route=bool(stored or self._routes.kinds))
        known = {
            **stored,
            **{name: frozenset({kind}) for name, kind in self._routes.kinds.items() if name not in stored},
        }
        if unknown := options.routes - known.keys():
            known = {**known, **await self._recordings.load_routes(None)}
            _check_known(unknown, known)
        check_not_external(options.routes, known)
        # Turns from before there was a table are the server's own.
        own = {self._routes.own, ""} if self._routes.own in options.routes else set()
        return replace(options, routes=options.routes | own, labels_route=True)

    def _check_versions(self, options: LayoutOptions, stored: Mapping[str, Collection[RouteKind]]) -> None:
        if not options.freshness.is_asked:
            return
        trained = [name for name, kinds in stored.items() if RouteKind.POLICY in kinds]
        trained = list(dict.fromkeys((*self._routes.trained, *trained)))
        chosen = [name for name in trained if options.routes is None or name in options.routes]
        if len(chosen) > 1:
            raise InvalidRequest(
                "'filter.min_version' and 'filter.max_version_span' compare weight versions, which count per route, "
                f"and the export has the trained routes {_listed(chosen)}: name one in 'route'",
                param="route",
            )


def check_of_session(options: LayoutOptions, interactions: Iterable[Interaction]) -> None:
    """Raise InvalidRequest for a route that the session has no turn of, or only external ones."""
    if options.routes is not None:
        kinds: dict[str, set[RouteKind]] = {}
        for turn in interactions:
            kinds.setdefault(turn.route, set()).add(turn.route_kind)
        known = {name: frozenset(found) for name, found in kinds.items() if name}
        _check_known(options.routes, known)
        check_not_external(options.routes, known)


def _check_known(names: Collection[str], known: Mapping[str, object]) -> None:
    if unknown := sorted(set(names) - known.keys()):
        listed = f"; there are {_listed(sorted(known))}" if known else "; no turn has a route"
        raise InvalidRequest(f"'route' names {brief(unknown[0])}, which no turn has{listed}", param="route")


def check_not_external(names: Collection[str], known: Mapping[str, frozenset[RouteKind]]) -> None:
    """Raise InvalidRequest for a route of kind external, of which no sample can be made."""
    for name in sorted(names):
        if known.get(name) == _EXTERNAL:
            raise InvalidRequest(
                f"route {brief(name)} is external: its turns have no token ids, so no sample is made of them; the tree "
                "of a session shows them",
                param="route",
            )


def _listed(names: Collection[str]) -> str:
    return " and ".join([", ".join(map(brief, list(names)[:-1])), brief(list(names)[-1])][len(names) < 2 :])
