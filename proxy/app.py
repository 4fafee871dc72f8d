"""The composition root: builds and wires all parts, and defines the order of startup and shutdown."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from proxy.api import http
from proxy.api.addresses import Addresses
from proxy.api.agent_listener import AgentListener
from proxy.api.bodies import Bodies
from proxy.api.forwarding import Forwarding
from proxy.api.guard import Guard
from proxy.api.long_polls import LongPolls
from proxy.api.request_lines import RequestLines
from proxy.api.turn_routes import App, TurnRoutes
from proxy.api.worker_endpoints import WorkerEndpoints
from proxy.api.wrong_keys import WrongKeys
from proxy.engine.adapter_files import AdapterFiles
from proxy.engine.admin import EngineAdmin
from proxy.engine.create import examine_engine, model_name, prepare_engine, tokenizer_folder
from proxy.engine.gate import Gate
from proxy.engine.interface import Capability, Engine, EngineInfo, ServerPool
from proxy.engine.pauses import NotedEngine, Pauses
from proxy.hub import pinned, revision_of
from proxy.images.fetch import ImageFetcher
from proxy.images.image_pool import ImagePool
from proxy.images.intake import ImageIntake, Limits
from proxy.models.declared import read_models
from proxy.progress import doing, step
from proxy.rendering.examination import Examination, examine
from proxy.rendering.renderer import Renderer, check_folder, check_names, load_renderer
from proxy.resources.fair_pool import FairPool
from proxy.resources.memory import FreedMemory
from proxy.resources.places import Places
from proxy.resources.senders import Senders
from proxy.resources.turnstile import Turnstile
from proxy.routes import Parts, listener_routes, routes, turn_endpoints
from proxy.served_engines import EngineParts, ServedEngines, check_declared
from proxy.sessions.parts import SessionParts
from proxy.sessions.retention import Retention
from proxy.settings import Settings
from proxy.settings.checks import listed
from proxy.settings.retention import read_rules
from proxy.store import schema
from proxy.store.absence import Patience
from proxy.store.archive.files import folder_url
from proxy.store.archive.parquet import load_pyarrow
from proxy.store.archive.served import ServedArchive
from proxy.store.database import label, parse_url
from proxy.store.retained import Retained
from proxy.store.store import Store
from proxy.store.text_indexer import TextIndexer
from proxy.store.text_search import TextSearch
from proxy.telemetry.metrics import Metrics
from proxy.telemetry.process_metrics import ProcessMetrics
from proxy.turns.turns import Turns
from proxy.webhooks.deliverer import Deliverer
from proxy.workers.group import Group, Place
from tokengrove.errors import ConfigurationError, InvalidRequest, ProxyError, codes
from tokengrove.options.start import Replay
from tokengrove.tracing import start_tracing

if TYPE_CHECKING:
    from proxy.engine.servers.examination import ServerFindings

logger = logging.getLogger(__name__)

# Rendering and encoding release the interpreter lock for only part of the time.
_RENDERING_THREADS = 4

# The assumed number of concurrent requests of an engine that does not report it.
_USUAL_RUNNING = 256

# The number of senders that a metric names.
_SHOWN = 16


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answer errors that Starlette itself raises, other than 404 and 405."""
    assert isinstance(error, HTTPException)
    return http.error_response(request.scope, InvalidRequest(error.detail))


_ERROR_HANDLERS: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    ProxyError: http.on_proxy_error,
    ClientDisconnect: http.on_disconnect,
    HTTPException: _on_http_exception,
    404: http.on_not_found,
    405: http.on_method_not_allowed,
    Exception: http.on_crash,
}


def examine_model(settings: Settings) -> Examination:
    """Examine the tokenizer and chat template of `settings`. Raises ConfigurationError."""
    settings = pinned(settings)
    return examine(load_renderer(settings, tokenizer_folder(settings)))


def examine_servers(settings: Settings) -> tuple[list[ServerFindings], Examination | None]:
    """Examine the engine servers of `settings`, and the model, if one is named. Raises ConfigurationError."""
    settings = pinned(settings)
    if not (settings.model or settings.tokenizer):
        return asyncio.run(examine_engine(settings, None)), None
    renderer = load_renderer(settings, tokenizer_folder(settings))
    return asyncio.run(examine_engine(settings, renderer)), examine(renderer)


def write_tiny_model(folder: Path, seed: int) -> None:
    """Write the built-in tiny model to `folder`, with random weights from `seed`."""
    from proxy.engine.tiny.model import build_tiny_model

    build_tiny_model(folder, seed)


def build_app(
    settings: Settings,
    *,
    engine: Engine | None = None,
    renderer: Renderer | None = None,
    place: Place | None = None,
) -> App:
    """Build the server as an ASGI application. Parts that are not given are built from `settings`.

    `place`: the place of this process among the workers of one server, if it is a worker; `app.state.for_workers` then
    answers the other workers. The lifespan starts the engine; at its end it waits for running turns, then closes the
    engine and the store. Raises ConfigurationError if a part cannot be built.
    """
    settings = pinned(settings)
    if place is None:
        check(settings)
    engine, renderer = _loaded(settings, engine, renderer)
    with doing(f"opening the database {label(parse_url(settings.database_url))}"):
        patience = Patience(settings.database_wait_s, settings.max_connections, settings.all_body_bytes)
        store = Store.open(
            settings.database_url, migrate=settings.migrate, patience=patience, webhooks=settings.webhook
        )
    shared = None if place is None else place.share(engine)
    engine = shared or engine
    archive = ServedArchive(store.database)
    metrics = _metrics(store, engine)
    freed = FreedMemory()
    senders, addresses, turnstile = Senders(), Addresses(settings), Turnstile()
    pool = FairPool(min(os.cpu_count() or 1, _RENDERING_THREADS), freed, senders.work)
    if isinstance(engine, NotedEngine):
        engine.pauses = Pauses(store.pauses, _name_of(settings), leads=place is None or place.leads)
    gate = Gate(engine, settings, metrics.engine)
    adapter_files = AdapterFiles()
    images = ImagePool(store.images.read, settings.image_memory_bytes)
    models = read_models(settings.models)
    main = next((each for each in models if each.of_server), None)
    admin = EngineAdmin(engine, gate, metrics.engine)
    engine_parts = EngineParts(settings, pool, images, store.pauses, _name_of(settings), adapter_files)
    served = ServedEngines(engine_parts.wired(settings, engine, gate, admin, renderer, main), models, engine_parts)
    sessions = SessionParts(
        *(store, settings, metrics),
        partial(getattr, served.main.route.adapters, "version"),
        served.forget_session,
        lambda asked: gate.info().why_unrecorded(asked),
        served.routes.names.check_bindings,
    )
    turns = Turns(
        routes=served.routes,
        log=store.turns,
        news=store.news,
        registry=sessions.registry,
        named=sessions.named,
        settings=settings,
        metrics=metrics.turns,
        places=Places(senders, partial(_most_running, settings, gate)),
        turnstile=turnstile,
        images=images,
        worker_attempts=None if place is None else place.attempts,
    )
    seeing = renderer.has_vision or renderer.blind or models
    intake = _intake(settings, renderer, gate, lambda: served.sees_elsewhere) if seeing else None
    bodies = Bodies(settings, freed, intake, addresses, senders)
    _watch_room(metrics.process, bodies, pool, images)
    metrics.turns.queued.watch(lambda: dict(senders.queued.largest(_SHOWN)))
    search = TextSearch(store.database, on=settings.search)
    forwarding = None if place is None else Forwarding(place.peers, bodies)
    tracing = start_tracing(tell=place is None or place.leads)
    parts = Parts(
        settings=settings,
        sessions=sessions,
        turns=turns,
        store=store,
        archive=archive,
        retention=None
        if place is not None and not place.leads
        else _retention(settings, store, archive, sessions, served.forget_session),
        search=search,
        indexer=TextIndexer(store.database, search, lambda: turns.running.busy) if settings.search else None,
        deliverer=Deliverer(store.outbox, settings) if settings.webhook and (place is None or place.leads) else None,
        engine=engine,
        gate=gate,
        metrics=metrics,
        images=images,
        renderer=renderer,
        polls=LongPolls(),
        addresses=addresses,
        turn_endpoints=turn_endpoints(sessions.access, turns, turnstile, bodies, forwarding, tracing),
        group=None if place is None or shared is None else Group(place, shared, gate, metrics, store.changed.since),
        pool=pool,
        bodies=bodies,
        agent_bodies=None if settings.agent_address is None else Bodies(settings.for_agents, freed, intake, addresses),
        forwarding=forwarding,
        served=served,
        adapter_files=adapter_files,
        tracing=tracing,
    )
    app = App(routes=routes(parts), exception_handlers=_ERROR_HANDLERS, lifespan=partial(_lifespan, parts))
    app.turn_routes = TurnRoutes(parts.turn_endpoints)
    guard = Guard(settings)
    app.guard = None if guard.idle else guard
    app.wrong_keys = WrongKeys(addresses, parts.polls, senders=senders)
    app.state.metrics, app.state.addresses = metrics, addresses
    app.on_end = RequestLines(metrics.http)
    app.metadata_of = sessions.registry.metadata_of
    app.state.turns, app.state.polls, app.state.registry = turns, parts.polls, sessions.registry
    app.state.memory, app.state.senders = sessions.memory, senders
    app.state.engine, app.state.renderer, app.state.store = engine, renderer, store
    app.state.retention, app.state.episodes = parts.retention, sessions.episodes
    app.state.indexer = parts.indexer
    app.state.adapters = served.main.route.adapters
    app.state.model, app.state.revision = model_name(settings), revision_of(settings)
    app.state.agents = (
        None if parts.agent_bodies is None else _agent_listener(parts, app, turnstile, parts.agent_bodies)
    )
    if parts.group is not None:
        app.state.for_workers = WorkerEndpoints(parts.group.steps(), app.passed_on, parts.group.joined)
    return app


def _agent_listener(parts: Parts, main: App, turnstile: Turnstile, bodies: Bodies) -> AgentListener:
    """The app of the listener for agents. It shares the turns of `main`, and none of its limits.

    It has no guard: every request needs the key of a session, which no page of another site knows.
    """
    access, forwarding = parts.sessions.agent_access, parts.forwarding
    endpoints = turn_endpoints(access, parts.turns, turnstile, bodies, forwarding, parts.tracing)
    app = App(routes=listener_routes(parts, bodies, endpoints), exception_handlers=_ERROR_HANDLERS)
    app.turn_routes = TurnRoutes(endpoints)
    app.wrong_keys = WrongKeys(parts.addresses, parts.polls)
    app.on_end, app.metadata_of = main.on_end, main.metadata_of
    return AgentListener(app, parts.settings.agent_max_requests)


def _retention(
    settings: Settings, store: Store, archive: ServedArchive, sessions: SessionParts, forget: Callable[[str], None]
) -> Retention | None:
    """What removes old sessions; None if the settings keep all. Raises ConfigurationError for an unusable archive."""
    rules = read_rules(settings.keep_days, settings.keep)
    if not rules:
        return None
    folder = None if settings.archive_to is None else folder_url(settings.archive_to)
    if folder is not None:
        load_pyarrow()
    return Retention(rules, folder, Retained(store.database), archive, sessions.registry, forget)


def check(settings: Settings) -> None:
    """Raise ConfigurationError for errors in pinned settings that can be detected without loading anything."""
    check_names(settings)
    check_declared(read_models(settings.models), settings)
    if settings.model or settings.tokenizer:
        check_folder(tokenizer_folder(settings), settings.family)
    with doing(f"checking the database {label(parse_url(settings.database_url))}"):
        schema.check(settings.database_url, migrate=settings.migrate)


def _loaded(settings: Settings, engine: Engine | None, renderer: Renderer | None) -> tuple[Engine, Renderer]:
    """Build the parts that are not given. Raises ConfigurationError, for the engine before loading the tokenizer."""
    make_engine = None if engine is not None else prepare_engine(settings)
    if renderer is None:
        renderer = load_renderer(settings, tokenizer_folder(settings))
    if engine is None:
        assert make_engine is not None
        engine = make_engine(renderer.vocab_size, renderer)
    return engine, renderer


def _metrics(store: Store, engine: Engine) -> Metrics:
    """The metrics of this process, including the servers of the engine if it is a pool."""
    metrics = Metrics(store.metrics)
    metrics.http.errors.expect((code,) for code in codes())
    if isinstance(engine, ServerPool):

        async def see_servers() -> None:
            metrics.engine.see(await engine.show())

        metrics.sources.append(see_servers)
    return metrics


def _intake(settings: Settings, renderer: Renderer, gate: Gate, elsewhere: Callable[[], bool]) -> ImageIntake:
    """The reader of the images of requests, which refuses images if the server or the engine cannot take them.

    `elsewhere`: whether other declared models may take them, so that each model refuses them by itself.
    """

    def refusal() -> str:
        if elsewhere():
            return ""
        if renderer.blind:  # not shown to clients, since it names files of this machine
            return "this server lacks what reading images needs: its log says what, as a warning at the start"
        info = gate.info()
        if Capability.IMAGES not in info.capabilities:
            return f"the engine {info.name!r} takes none for this model; send text only"
        return ""

    fetch = None
    if settings.allow_image_urls:
        hosts = tuple(name.lower().strip("[]") for name in listed(settings.image_hosts))
        fetch = ImageFetcher(hosts, settings.image_url_timeout_s, settings.max_image_bytes)
    limits = Limits(
        settings.max_image_pixels, settings.max_image_bytes, settings.max_request_images, settings.max_body_bytes
    )
    return ImageIntake(limits, refusal, fetch)


def _watch_room(metrics: ProcessMetrics, bodies: Bodies, pool: FairPool, images: ImagePool) -> None:
    """Connect the metrics to the resources that requests share."""
    metrics.image_bytes.watch(lambda: images.held_bytes)
    metrics.body_bytes.watch(lambda: bodies.budget.held)
    metrics.body_room.watch(lambda: bodies.budget.most)
    metrics.work.watch(lambda: {("render",): pool.waiting, ("body",): bodies.pool.waiting})


def _most_running(settings: Settings, gate: Gate) -> int:
    """The number of places for choices that run in this process."""
    most = settings.shared_running_requests or gate.info().max_running_requests or _USUAL_RUNNING
    return -(-most // settings.workers)


def _name_of(settings: Settings) -> str:
    """The name of this server: the same at every start on a fixed port, and different from other running servers."""
    return f"{socket.gethostname()}:{settings.port or uuid.uuid4().hex}"


@asynccontextmanager
async def _lifespan(parts: Parts, app: Starlette) -> AsyncIterator[None]:
    """Start the engine. At the end, drain the turns, then close the engine and the store.

    Raises ConfigurationError on a second start, since the parts are then closed.
    """
    assert isinstance(app, App)
    if not parts.store.database.running:
        raise ConfigurationError("this app was stopped, and cannot be started again: build another with build_app")
    async with AsyncExitStack() as stack:
        if parts.tracing is not None:
            stack.push_async_callback(parts.tracing.close)
        stack.push_async_callback(parts.store.close)
        stack.callback(parts.pool.close)
        stack.callback(parts.bodies.pool.close)
        if parts.agent_bodies is not None:
            stack.callback(parts.agent_bodies.pool.close)
        if parts.group is not None:
            await parts.group.catch_up()
        await asyncio.to_thread(parts.store.database.rehearse)
        step(f"starting the engine ({parts.settings.engine})")
        began = time.monotonic()
        await parts.engine.start()
        info, seconds = parts.engine.info(), round(time.monotonic() - began, 3)
        logger.info("engine started", {"engine": info.name, "version": info.weight_version, "seconds": seconds})
        _check_replay(parts.settings, info)
        parts.served.main.check_started()
        if parts.renderer.has_vision and Capability.IMAGES not in info.capabilities:
            logger.warning(
                "the engine takes no images, so they are refused", {"engine": info.name, "model": info.model}
            )
        if parts.group is not None:
            await parts.group.join()
        elif isinstance(parts.engine, NotedEngine) and (pause := parts.engine.left_over) is not None:
            await parts.served.main.admin.go_on(*pause)
        stack.callback(parts.adapter_files.close)
        stack.push_async_callback(parts.engine.close)
        stack.push_async_callback(parts.served.main.route.adapters.close)
        stack.push_async_callback(parts.served.close_others)
        await parts.served.start_others()
        stack.push_async_callback(parts.sessions.episodes.close)
        if parts.group is None or parts.group.admin is not None:
            stack.push_async_callback(_cancel, asyncio.create_task(parts.sessions.episodes.run()))
        stack.push_async_callback(parts.turns.drain, parts.settings.shutdown_timeout_s)
        stack.push_async_callback(_cancel, asyncio.create_task(parts.store.database.write.watch()))
        stack.push_async_callback(_cancel, asyncio.create_task(parts.store.database.stay_present()))
        stack.push_async_callback(
            _cancel, asyncio.create_task(parts.sessions.memory.run(parts.renderer.forget_prompts))
        )
        stack.push_async_callback(_cancel, asyncio.create_task(parts.metrics.process.watch_loop()))
        stack.push_async_callback(_cancel, asyncio.create_task(parts.metrics.history.run()))
        if (idle_s := parts.settings.session_idle_s) is not None:
            stack.push_async_callback(_cancel, asyncio.create_task(parts.sessions.idle_sweep.run(idle_s)))
        stack.push_async_callback(parts.archive.close)
        if await parts.archive.needs_recovery():
            stack.push_async_callback(_cancel, asyncio.create_task(parts.archive.recover()))
        if parts.indexer is not None:
            stack.push_async_callback(parts.indexer.close)
            stack.push_async_callback(_cancel, asyncio.create_task(parts.indexer.run()))
        if parts.deliverer is not None:
            stack.push_async_callback(_cancel, asyncio.create_task(parts.deliverer.run()))
        if parts.retention is not None:
            stack.push_async_callback(_cancel, asyncio.create_task(parts.retention.run()))
        app.running_loop = asyncio.get_running_loop()
        try:
            yield
        finally:
            app.running_loop = None


def _check_replay(settings: Settings, info: EngineInfo) -> None:
    """Raise ConfigurationError if the engine does not record what `--replay` asks for."""
    fault = info.why_unrecorded(map(Replay, settings.replay))
    if fault is not None:
        raise ConfigurationError(f"--replay {fault[0]}: {fault[1]}")


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
