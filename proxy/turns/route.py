"""The routes of turns: what serves the requests of each name. No turn continues the tokens of another route."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from proxy.engine.adapters import BASE, Adapters
from proxy.engine.gate import Gate
from proxy.models.declared import DeclaredModel
from proxy.models.names import ModelNames
from proxy.rendering.renderer import Renderer
from proxy.rendering.token_texts import TokenTexts
from proxy.sessions.live_session import LiveSession
from proxy.settings import Settings
from proxy.turns.prompts import Prompts
from proxy.turns.tokens import Tokens
from proxy.types import SessionRecord, TurnRequest
from proxy.upstream.client import UpstreamClient
from tokengrove.errors import ModelNotFound, UnsupportedParameter, brief
from tokengrove.options.model import RouteKind
from tokengrove.options.start import AdapterPinning


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineRoute:
    """A route that an engine serves.

    `gate`, `renderer`, `prompts`, `tokens`, `texts`: its engine, and the prompts and texts of its model. `adapters`:
    those of its engine. `settings`: the server's, with those of the route. `model`: its name, for requests that give
    none. `declared`: its table; None without a table of models.
    """

    gate: Gate
    renderer: Renderer
    prompts: Prompts
    tokens: Tokens
    adapters: Adapters
    settings: Settings
    model: str
    declared: DeclaredModel | None = None
    texts: TokenTexts = field(init=False)
    name: str = field(init=False)
    kind: RouteKind = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "texts", TokenTexts(self.renderer.piece, self.renderer.is_special))
        declared = self.declared
        object.__setattr__(self, "name", "" if declared is None else declared.name)
        object.__setattr__(self, "kind", RouteKind.POLICY if declared is None else declared.kind)

    def begin(self, session: LiveSession | None, pinned: int | None) -> int | None:
        """Count a request that starts, and return the version of its adapter until `adapters.end`; None: none.

        `pinned`: the version that it names. Raises NotFound for a version that is not live, and EngineUnavailable if
        the route serves adapters only and has none yet.
        """
        if not self.adapters.possible and pinned is None:
            return None
        if session is None:
            return self.adapters.begin(None, pinned=pinned)
        told, policy = session.record.turn_options.get("adapter_pinning"), self.settings.adapter_pinning
        if told:
            policy = AdapterPinning(told)
        recorded = None
        if session.cache.nodes and not self.adapters.knows(session.id):
            recorded = self._recorded(session, policy)
        return self.adapters.begin(session.id, pinned=pinned, policy=policy, recorded=recorded)

    def _recorded(self, session: LiveSession, policy: AdapterPinning) -> int | None:
        """The adapter version of the first turn that a session began on this route; BASE: none; None: no turn.

        The largest version of all turns if the session follows.
        """
        name = self.name
        own = [node.interaction for node in session.cache.nodes.values() if node.interaction.route == name]
        if policy == AdapterPinning.FOLLOW:
            return max([turn.adapter or BASE for turn in own], default=None)
        first = min(own, key=_created_at, default=None)
        return None if first is None else first.adapter or BASE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExternalRoute:
    """A route that another server's API serves."""

    client: UpstreamClient
    settings: Settings
    declared: DeclaredModel

    @property
    def name(self) -> str:
        return self.declared.name


Route = EngineRoute | ExternalRoute


_created_at = attrgetter("created_at")


class Routes:
    """The routes of a server by name. `main`: the route of its own engine."""

    def __init__(self, names: ModelNames, main: EngineRoute) -> None:
        self.names, self.main = names, main
        self.engines: dict[str, EngineRoute] = {main.name: main}
        self.externals: dict[str, ExternalRoute] = {}

    def assign(self, request: TurnRequest, record: SessionRecord | None) -> None:
        """Set the route of a request, in a session or outside of one. Raises ModelNotFound."""
        if self.names.declared:
            request.route, request.pinned = self.names.find(request.model, bindings_of(record))

    def named(self, model: str, session: LiveSession | None) -> EngineRoute:
        """The route that serves a `model`, in a session or outside of one. Raises ModelNotFound."""
        return self.engine(self.names.find(model, bindings_of(None if session is None else session.record)).route)

    def of(self, request: TurnRequest) -> Route:
        """The route of a request. Raises ModelNotFound."""
        if not request.route:
            return self.main
        return self.externals.get(request.route) or self.engine(request.route)

    def reader(self, name: str) -> EngineRoute | None:
        """The engine whose tokens a stored turn of this route has; None for external and removed models."""
        return self.engines.get(name) if name else self.main

    def decoder(self, name: str) -> Callable[[Sequence[int]], str] | None:
        """What decodes the tokens of stored turns of this route; None if nothing does."""
        return None if (route := self.reader(name)) is None else route.renderer.decode

    def engine(self, name: str) -> EngineRoute:
        """The engine's route with this name; "": the main one.

        Raises ModelNotFound, and UnsupportedParameter for an external model.
        """
        if name in self.externals:
            raise UnsupportedParameter(
                f"the model {brief(name)} is external: this server has no token ids of it; name another", param="model"
            )
        if (route := self.reader(name)) is None:
            raise ModelNotFound(f"the model {brief(name)} is no longer served", param="model")
        return route


def bindings_of(record: SessionRecord | None) -> Mapping[str, str] | None:
    """The routes that a session's names are bound to."""
    return None if record is None else record.turn_options.get("models")
