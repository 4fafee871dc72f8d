"""The engines of a server: its own, and one for each declared model that has an engine of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from proxy.engine.adapter_files import AdapterFiles
from proxy.engine.adapters import Adapters
from proxy.engine.admin import EngineAdmin
from proxy.engine.create import model_name, prepare_engine, tokenizer_folder
from proxy.engine.gate import Gate
from proxy.engine.interface import Engine, ServerPool, SessionEngine
from proxy.engine.pauses import NotedEngine, Pauses, PauseTable
from proxy.hub import pinned
from proxy.images.image_pool import ImagePool
from proxy.models.declared import DeclaredModel
from proxy.models.names import ModelNames
from proxy.progress import doing
from proxy.rendering.renderer import Renderer, load_renderer
from proxy.resources.fair_pool import FairPool
from proxy.settings import Settings
from proxy.turns.prompts import Prompts
from proxy.turns.route import EngineRoute, ExternalRoute, Routes
from proxy.turns.tokens import Tokens
from proxy.upstream.client import UpstreamClient

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


class ServedEngines:
    """The engines by the names of their routes. `main`: the server's own."""

    def __init__(
        self,
        main: ServedEngine,
        others: Sequence[ServedEngine],
        names: ModelNames,
        externals: Sequence[ExternalRoute] = (),
    ) -> None:
        self.main, self._others = main, list(others)
        self.routes = Routes(names, main.route)
        self.routes.engines.update({each.route.name: each.route for each in others})
        self.routes.externals.update({each.name: each for each in externals})

    def __iter__(self) -> Iterator[ServedEngine]:
        return iter((self.main, *self._others))

    def forget_session(self, session_id: str) -> None:
        """Tell the engines and their adapters that a session has ended."""
        for each in self:
            each.route.adapters.forget(session_id)
            if isinstance(each.engine, SessionEngine):
                each.engine.forget_session(session_id)

    async def start_others(self, stack: AsyncExitStack) -> None:
        """Start the engines of declared models; `stack` closes them, and external ones. Raises ConfigurationError."""
        for external in self.routes.externals.values():
            stack.push_async_callback(external.client.close)
        for each in self._others:
            began = time.monotonic()
            await each.engine.start()
            stack.push_async_callback(each.engine.close)
            fields = {"model": each.route.name, "seconds": round(time.monotonic() - began, 3)}
            logger.info("engine of a declared model started", fields)


def served_engine(
    settings: Settings,
    engine: Engine,
    gate: Gate,
    renderer: Renderer,
    pool: FairPool,
    images: ImagePool,
    files: AdapterFiles,
    declared: DeclaredModel | None = None,
    admin: EngineAdmin | None = None,
) -> ServedEngine:
    """Wire an engine to the parts that its turns need."""
    prompts = Prompts(renderer, pool)
    route = EngineRoute(
        gate=gate,
        renderer=renderer,
        prompts=prompts,
        adapters=Adapters(
            engine,
            settings,
            files.remove,
            route="" if declared is None else declared.name,
            lora=declared is not None and declared.lora,
        ),
        tokens=Tokens(prompts, gate, images, settings),
        settings=settings,
        model=model_name(settings) if declared is None else declared.name,
        declared=declared,
    )
    return ServedEngine(engine, route, admin or EngineAdmin(engine, gate))


def load_declared(
    models: Sequence[DeclaredModel],
    settings: Settings,
    pool: FairPool,
    images: ImagePool,
    pauses: PauseTable,
    owner: str,
    files: AdapterFiles,
) -> list[ServedEngine]:
    """Build the engines of the declared models that have one of their own. Raises ConfigurationError."""
    found = []
    for each in models:
        if each.upstream is None and not each.of_server:
            with doing(f"loading the model of [models.{each.name}]"):
                found.append(_load(each, settings, pool, images, pauses, owner, files))
    return found


def load_externals(models: Sequence[DeclaredModel], settings: Settings) -> list[ExternalRoute]:
    """The routes of external models. Raises ConfigurationError for a URL or a key that cannot be sent."""
    return [
        ExternalRoute(client=UpstreamClient(each.upstream), settings=settings, declared=each)
        for each in models
        if each.upstream is not None
    ]


def _load(
    declared: DeclaredModel,
    settings: Settings,
    pool: FairPool,
    images: ImagePool,
    pauses: PauseTable,
    owner: str,
    files: AdapterFiles,
) -> ServedEngine:
    own = pinned(declared.settings(settings))
    make_engine = prepare_engine(own)
    renderer = load_renderer(own, tokenizer_folder(own))
    engine = make_engine(renderer.vocab_size, renderer)
    if isinstance(engine, NotedEngine):
        engine.pauses = Pauses(pauses, f"{owner}/{declared.name}", leads=True)
    return served_engine(own, engine, Gate(engine, own), renderer, pool, images, files, declared)
