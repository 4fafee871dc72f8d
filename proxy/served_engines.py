"""The engines of a server: its own, and one for each declared model that has an engine of its own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from proxy.engine.adapter_files import AdapterFiles
from proxy.engine.adapters import Adapters
from proxy.engine.admin import EngineAdmin
from proxy.engine.create import model_name, prepare_engine, tokenizer_folder
from proxy.engine.gate import Gate
from proxy.engine.interface import Capability, Engine, ServerPool, SessionEngine
from proxy.engine.pauses import NotedEngine, Pauses, PauseTable
from proxy.hub import pinned
from proxy.images.image_pool import ImagePool
from proxy.models.declared import DeclaredModel, check_engines
from proxy.models.names import ModelNames
from proxy.progress import doing
from proxy.rendering.renderer import Renderer, load_renderer
from proxy.resources.fair_pool import FairPool
from proxy.settings import Settings
from proxy.turns.prompts import Prompts
from proxy.turns.route import EngineRoute, ExternalRoute, Routes
from proxy.turns.tokens import Tokens
from proxy.upstream.client import UpstreamClient
from tokengrove.errors import ConfigurationError, InvalidRequest, ModelNotFound, brief
from tokengrove.options.model import RouteKind

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ServedEngine:
    """An engine with its route and its administration."""

    engine: Engine
    route: EngineRoute
    admin: EngineAdmin

    @property
    def pool(self) -> ServerPool | None:
        """The engine, if it is a pool of servers."""
        return self.engine if isinstance(self.engine, ServerPool) else None

    def check_started(self) -> None:
        """Raise ConfigurationError if the started engine cannot serve the adapters that its table asks for."""
        info, declared = self.engine.info(), self.route.declared
        if declared is not None and declared.lora and Capability.ADAPTERS not in info.capabilities:
            raise ConfigurationError(
                f"models.{declared.name}.lora: the engine {info.name!r} has no LoRA adapters; docs/engines.md says "
                "which have them, and with which options"
            )


@dataclass(frozen=True, slots=True, eq=False)
class EngineParts:
    """What all engines of a server share.

    `owner`: the name of this server in the notes of pauses. `files`: adapters that were sent as bytes.
    """

    settings: Settings
    pool: FairPool
    images: ImagePool
    pauses: PauseTable
    owner: str
    files: AdapterFiles

    def load(self, declared: DeclaredModel) -> ServedEngine:
        """Build the engine of a declared model, not started. Raises ConfigurationError."""
        with doing(f"loading the model of [models.{declared.name}]"):
            own = pinned(declared.settings(self.settings))
            make_engine = prepare_engine(own)
            renderer = load_renderer(own, tokenizer_folder(own))
            engine = make_engine(renderer.vocab_size, renderer)
        if isinstance(engine, NotedEngine):
            engine.pauses = Pauses(self.pauses, f"{self.owner}/{declared.name}", leads=True)
        gate = Gate(engine, own)
        return self.wired(own, engine, gate, EngineAdmin(engine, gate), renderer, declared)

    def external(self, declared: DeclaredModel) -> ExternalRoute:
        """The route of an external model. Raises ConfigurationError for a URL or a key that cannot be sent."""
        assert declared.upstream is not None
        return ExternalRoute(client=UpstreamClient(declared.upstream), settings=self.settings, declared=declared)

    def wired(
        self,
        settings: Settings,
        engine: Engine,
        gate: Gate,
        admin: EngineAdmin,
        renderer: Renderer,
        declared: DeclaredModel | None,
    ) -> ServedEngine:
        """Wire an engine to the parts that its turns need. `settings`: the server's, with those of its table."""
        prompts, name = Prompts(renderer, self.pool), "" if declared is None else declared.name
        lora = declared is not None and declared.lora
        route = EngineRoute(
            gate=gate,
            renderer=renderer,
            prompts=prompts,
            adapters=Adapters(engine, settings, self.files.remove, route=name, lora=lora),
            tokens=Tokens(prompts, gate, self.images, settings),
            settings=settings,
            model=name or model_name(settings),
            declared=declared,
        )
        return ServedEngine(engine, route, admin)


class ServedEngines:
    """The engines by the names of their routes, and the external models. `main`: the server's own engine."""

    def __init__(self, main: ServedEngine, models: Sequence[DeclaredModel], parts: EngineParts) -> None:
        """`models`: the declared models, that of `main` included. Raises ConfigurationError."""
        self.main, self._parts = main, parts
        self._others: dict[str, ServedEngine] = {}
        self.routes = Routes(ModelNames(models), main.route)
        self._changing = asyncio.Lock()
        for each in models:
            if each.upstream is not None:
                self.routes.externals[each.name] = parts.external(each)
            elif not each.of_server:
                self._take(parts.load(each))

    def __iter__(self) -> Iterator[ServedEngine]:
        return iter((self.main, *self._others.values()))

    @property
    def sees_elsewhere(self) -> bool:
        """Whether a declared model besides the server's own may take images."""
        return bool(self.routes.externals) or any(each.route.renderer.has_vision for each in self._others.values())

    def find(self, name: str) -> ServedEngine | None:
        """The engine of a route; None if no engine serves it."""
        return self.main if name == self.main.route.name else self._others.get(name)

    def forget_session(self, session_id: str) -> None:
        """Tell the engines and their adapters that a session has ended."""
        for each in self:
            each.route.adapters.forget(session_id)
            if isinstance(each.engine, SessionEngine):
                each.engine.forget_session(session_id)

    async def start_others(self) -> None:
        """Start the engines of declared models. Raises ConfigurationError."""
        for each in self._others.values():
            began = time.monotonic()
            await each.engine.start()
            each.check_started()
            fields = {"model": each.route.name, "seconds": round(time.monotonic() - began, 3)}
            logger.info("engine of a declared model started", fields)

    async def close_others(self) -> None:
        """Close the engines of declared models, and the connections to external ones."""
        for each in self._others.values():
            await each.route.adapters.close()
            await each.engine.close()
        for external in self.routes.externals.values():
            await external.client.close()

    async def add(self, declared: DeclaredModel) -> None:
        """Serve another model until it is removed or the server ends. Raises InvalidRequest and ConfigurationError."""
        async with self._changing:
            if declared.name in self.routes.names.declared:
                raise InvalidRequest(
                    f"the model {brief(declared.name)} is served already; remove it first", param="name"
                )
            check_engines([*self.routes.names.declared.values(), declared], self._parts.settings)
            if declared.upstream is not None:
                self.routes.externals[declared.name] = self._parts.external(declared)
            else:
                served = await asyncio.to_thread(self._parts.load, declared)
                try:
                    await served.engine.start()
                except BaseException:
                    await served.engine.close()
                    raise
                self._take(served)
            self.routes.names.declared[declared.name] = declared

    async def remove(self, name: str, busy: Callable[[str], bool]) -> None:
        """Serve a model no more. `busy`: whether turns of a route run. Raises ModelNotFound and InvalidRequest."""
        async with self._changing:
            declared = self.routes.names.declared.get(name)
            if declared is None:
                raise ModelNotFound(f"the model {brief(name)} is not served", param="name")
            if declared.kind is RouteKind.POLICY:
                raise InvalidRequest(f"the model {brief(name)} is trained; the configuration declares it", param="name")
            if busy(name):
                raise InvalidRequest(f"turns of the model {brief(name)} are running; try again", param="name")
            del self.routes.names.declared[name]
            if (external := self.routes.externals.pop(name, None)) is not None:
                await external.client.close()
                return
            del self.routes.engines[name]
            served = self._others.pop(name)
            await served.route.gate.until_idle()  # of generations outside of sessions
            await served.engine.close()

    def _take(self, served: ServedEngine) -> None:
        self._others[served.route.name], self.routes.engines[served.route.name] = served, served.route


def check_declared(models: Sequence[DeclaredModel], settings: Settings) -> None:
    """Raise ConfigurationError, which names the table, for a fault that can be found without loading anything."""
    check_engines(models, settings)
    if settings.max_staleness is not None and sum(each.kind is RouteKind.POLICY for each in models) > 1:
        raise ConfigurationError(
            "--max-staleness counts the versions of one model, and --models trains several; leave it out, and let each "
            "trainer choose its sessions by 'filter.min_version'"
        )
    for each in models:
        try:
            if each.upstream is not None:
                UpstreamClient(each.upstream)
            elif not each.of_server:
                prepare_engine(pinned(each.settings(settings)))
        except ConfigurationError as error:
            raise ConfigurationError(f"models.{each.name}: {error}") from None
