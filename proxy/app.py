"""The composition root: builds and wires all parts, and defines the routes and the order of startup and shutdown."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from proxy.api import http
from proxy.api.addresses import Addresses
from proxy.api.audit_log import Endpoint, audited
from proxy.api.bodies import Bodies
from proxy.api.claim_endpoints import ClaimEndpoints
from proxy.api.engine_endpoints import EngineEndpoints
from proxy.api.export_endpoint import ExportEndpoint
from proxy.api.forwarding import Forwarding
from proxy.api.generate_endpoint import GenerateEndpoint
from proxy.api.guard import Guard
from proxy.api.health_endpoints import HealthEndpoints
from proxy.api.key_endpoints import KeyEndpoints
from proxy.api.long_polls import LongPolls
from proxy.api.mailbox_endpoints import MailboxEndpoints
from proxy.api.model_endpoints import ModelEndpoints
from proxy.api.pace import Pace
from proxy.api.request_lines import RequestLines
from proxy.api.reward_endpoints import RewardEndpoints
from proxy.api.routes import Route
from proxy.api.session_endpoints import SessionEndpoints
from proxy.api.tokenize_endpoints import TokenizeEndpoints
from proxy.api.turn_endpoints import TurnEndpoint, count_endpoint
from proxy.api.turn_reply import Replies
from proxy.api.turn_routes import App, TurnRoutes
from proxy.api.turnstile import Turnstile
from proxy.api.worker_endpoints import WorkerEndpoints
from proxy.engine.admin import EngineAdmin
from proxy.engine.create import model_name, prepare_engine, tokenizer_folder
from proxy.engine.gate import Gate
from proxy.engine.interface import Engine, ServerPool, WeightTransfer
from proxy.engine.mailbox import Mailbox
from proxy.engine.pauses import NotedEngine, Pauses
from proxy.errors import InvalidRequest, ProxyError, codes
from proxy.hub import pinned, revision_of
from proxy.progress import doing, step
from proxy.protocols.chat.protocol import ChatProtocol
from proxy.protocols.completions.protocol import CompletionsProtocol
from proxy.protocols.generate import GenerateProtocol
from proxy.protocols.messages.protocol import MessagesProtocol
from proxy.protocols.responses.protocol import ResponsesProtocol
from proxy.protocols.wire_protocol import WireProtocol
from proxy.rendering.examination import Examination, examine
from proxy.rendering.renderer import Renderer, check_folder, check_names, load_renderer
from proxy.resources.fair_pool import FairPool
from proxy.resources.memory import FreedMemory
from proxy.sessions.access import Access
from proxy.sessions.deletion import Deletion
from proxy.sessions.end_waiter import EndWaiter
from proxy.sessions.endings import Endings
from proxy.sessions.idle_sweep import IdleSweep
from proxy.sessions.key_rotation import KeyRotation
from proxy.sessions.keys import Keyring
from proxy.sessions.named_sessions import NamedSessions
from proxy.sessions.new_records import NewRecords
from proxy.sessions.registry import Registry
from proxy.sessions.scores import Scores
from proxy.sessions.session_memory import SessionMemory
from proxy.sessions.session_series import SessionSeries
from proxy.sessions.session_starter import SessionStarter
from proxy.sessions.start_limits import StartLimits
from proxy.settings import Settings
from proxy.store import schema
from proxy.store.database import label, parse_url
from proxy.store.store import Store
from proxy.telemetry.http_request import HttpRequest, RequestEnd
from proxy.telemetry.metrics import Metrics
from proxy.telemetry.process_metrics import ProcessMetrics
from proxy.telemetry.tracing import start_tracing
from proxy.turns.turns import Turns
from proxy.workers.group import Group, Place

if TYPE_CHECKING:
    from proxy.telemetry.spans import Tracing

logger = logging.getLogger(__name__)

# Rendering and encoding leave the interpreter to others for part of the time only.
_RENDERING_THREADS = 4


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answer errors that Starlette raises itself, other than 404 and 405."""
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
    """Check what works with the tokenizer and chat template of `settings`. Raises ConfigurationError."""
    settings = pinned(settings)
    return examine(load_renderer(settings, tokenizer_folder(settings)))


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

    `place`: among the workers of one server, if this is one of them; `app.state.for_workers` then answers the others.

    The lifespan starts the engine; at the end it lets running turns finish, then closes the engine and the store.
    Raises ConfigurationError if a part cannot be built.
    """
    settings = pinned(settings)
    if place is None:
        check(settings)
    engine, renderer = _loaded(settings, engine, renderer)
    with doing(f"opening the database {label(parse_url(settings.database_url))}"):
        store = Store.open(settings.database_url, migrate=settings.migrate)
    shared = None if place is None else place.share(engine)
    engine = shared or engine
    metrics = _metrics(store, engine)
    freed = FreedMemory()
    pool = FairPool(min(os.cpu_count() or 1, _RENDERING_THREADS), freed)
    if isinstance(engine, NotedEngine):
        engine.pauses = Pauses(store.pauses, _name_of(settings), leads=place is None or place.leads)
    gate = Gate(engine, settings, metrics.engine)
    sessions = SessionParts(store, settings, metrics, lambda: gate.info().weight_version)
    turns = Turns(
        gate=gate,
        renderer=renderer,
        log=store.turns,
        news=store.news,
        registry=sessions.registry,
        named=sessions.named,
        scores=sessions.scores,
        settings=settings,
        metrics=metrics.turns,
        pool=pool,
        seat=None if place is None else place.seat,
    )
    bodies = Bodies(settings, freed)
    _watch_room(metrics.process, bodies, pool)
    forwarding = None if place is None else Forwarding(place.peers, bodies)
    tracing = start_tracing(warn=place is None or place.leads)
    parts = _Parts(
        settings=settings,
        sessions=sessions,
        turns=turns,
        store=store,
        engine=engine,
        gate=gate,
        metrics=metrics,
        renderer=renderer,
        polls=LongPolls(),
        addresses=Addresses(settings),
        turn_endpoints=_turn_endpoints(
            sessions.access, turns, renderer, bodies, model_name(settings), forwarding, tracing
        ),
        group=None if place is None or shared is None else Group(place, shared, gate, metrics),
        pool=pool,
        bodies=bodies,
        forwarding=forwarding,
        admin=EngineAdmin(engine, gate, metrics.engine),
        tracing=tracing,
    )
    app = App(routes=_routes(parts), exception_handlers=_ERROR_HANDLERS, lifespan=partial(_lifespan, parts))
    app.turn_routes = TurnRoutes(parts.turn_endpoints)
    guard = Guard(settings)
    app.guard = None if guard.idle else guard
    app.state.metrics = metrics
    app.on_end = _each(metrics.http.count, RequestLines())
    app.state.turns, app.state.polls, app.state.registry = turns, parts.polls, sessions.registry
    app.state.memory = sessions.memory
    app.state.engine, app.state.renderer, app.state.store = engine, renderer, store
    app.state.model, app.state.revision = model_name(settings), revision_of(settings)
    if parts.group is not None:
        app.state.for_workers = WorkerEndpoints(parts.group.steps(), app.passed_on, parts.group.joined)
    return app


def _each(*listeners: RequestEnd) -> RequestEnd:
    """What tells all listeners of the end of a request."""

    def ended(request: HttpRequest) -> None:
        for listener in listeners:
            listener(request)

    return ended


def check(settings: Settings) -> None:
    """Raise ConfigurationError for what can be told of pinned settings without loading anything."""
    check_names(settings)
    if settings.model or settings.tokenizer:
        check_folder(tokenizer_folder(settings), settings.family)
    with doing(f"checking the database {label(parse_url(settings.database_url))}"):
        schema.check(settings.database_url, migrate=settings.migrate)


def _loaded(settings: Settings, engine: Engine | None, renderer: Renderer | None) -> tuple[Engine, Renderer]:
    """Build what is not given. A wrong engine is refused before the tokenizer is loaded. Raises ConfigurationError."""
    make_engine = None if engine is not None else prepare_engine(settings)
    if renderer is None:
        renderer = load_renderer(settings, tokenizer_folder(settings))
    if engine is None:
        assert make_engine is not None
        engine = make_engine(renderer.vocab_size, renderer)
    return engine, renderer


def _metrics(store: Store, engine: Engine) -> Metrics:
    """The metrics of this process, which read the engine's servers if it has several."""
    metrics = Metrics(store.metrics)
    metrics.http.errors.expect((code,) for code in codes())
    if isinstance(engine, ServerPool):

        async def see_servers() -> None:
            metrics.engine.see(await engine.show())

        metrics.sources.append(see_servers)
    return metrics


def _watch_room(metrics: ProcessMetrics, bodies: Bodies, pool: FairPool) -> None:
    """Let the metrics read what requests share."""
    metrics.body_bytes.watch(lambda: bodies.budget.held)
    metrics.body_room.watch(lambda: bodies.budget.most)
    metrics.work.watch(lambda: {("render",): pool.waiting, ("body",): bodies.pool.waiting})


def _name_of(settings: Settings) -> str:
    """The name that this server has at every start, and no other server has at the same time."""
    return f"{socket.gethostname()}:{settings.port or uuid.uuid4().hex}"


@asynccontextmanager
async def _lifespan(parts: _Parts, app: Starlette) -> AsyncIterator[None]:
    """Start the engine; at the end drain the turns, then close the engine and the store."""
    async with AsyncExitStack() as stack:
        if parts.tracing is not None:
            stack.push_async_callback(parts.tracing.close)
        stack.push_async_callback(parts.store.close)
        stack.callback(parts.pool.close)
        stack.callback(parts.bodies.pool.close)
        if parts.group is not None:
            await parts.group.catch_up()
        await asyncio.to_thread(parts.store.database.rehearse)
        step(f"starting the engine ({parts.settings.engine})")
        began = time.monotonic()
        await parts.engine.start()
        info, seconds = parts.engine.info(), round(time.monotonic() - began, 3)
        logger.info("engine started", {"engine": info.name, "version": info.weight_version, "seconds": seconds})
        if parts.group is not None:
            await parts.group.join()
        elif isinstance(parts.engine, NotedEngine) and (pause := parts.engine.left_over) is not None:
            await parts.admin.go_on(*pause)
        stack.push_async_callback(parts.engine.close)
        stack.push_async_callback(parts.turns.drain, parts.settings.shutdown_timeout_s)
        stack.push_async_callback(
            _cancel, asyncio.create_task(parts.sessions.memory.run(parts.renderer.forget_prompts))
        )
        stack.push_async_callback(_cancel, asyncio.create_task(parts.metrics.process.watch_loop()))
        if (idle_s := parts.settings.session_idle_s) is not None:
            stack.push_async_callback(_cancel, asyncio.create_task(parts.sessions.idle_sweep.run(idle_s)))
        yield


class SessionParts:
    """The parts of `proxy.sessions`, wired to each other and to the parts of the store that they use."""

    def __init__(self, store: Store, settings: Settings, metrics: Metrics, weight_version: Callable[[], int]) -> None:
        keys = Keyring(store.keys, settings.admin_key)
        limits, records = StartLimits(settings, weight_version), NewRecords(settings, weight_version)
        self.registry = Registry(store.news, keys, metrics)
        self.named = NamedSessions(self.registry, store.starts, limits, records)
        self.starter = SessionStarter(self.registry, store.starts, limits, records, keys, settings)
        self.scores = Scores(self.registry, store.changes)
        self.endings = Endings(self.registry, self.named, store.changes, keys)
        self.deletion = Deletion(self.registry, store.changes)
        self.rotation = KeyRotation(self.registry, store.changes, keys, settings.key_lifetime_s)
        self.waiter = EndWaiter(self.registry, store.news)
        self.idle_sweep = IdleSweep(self.registry, store.changes, self.endings)
        self.memory = SessionMemory(self.registry, settings.session_memory_bytes)
        series = SessionSeries(self.registry, self.named, store.starts)
        self.access = Access(self.registry, self.named, series, keys, settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The parts that endpoints are built from."""

    settings: Settings
    sessions: SessionParts
    turns: Turns
    store: Store
    engine: Engine
    gate: Gate
    metrics: Metrics
    renderer: Renderer
    polls: LongPolls
    addresses: Addresses
    turn_endpoints: Mapping[str, TurnEndpoint]
    group: Group | None
    pool: FairPool
    bodies: Bodies
    forwarding: Forwarding | None
    admin: EngineAdmin
    tracing: Tracing | None

    def audited(self, action: str, endpoint: Endpoint) -> Endpoint:
        return audited(self.sessions.access, action, endpoint)

    @property
    def server_pool(self) -> ServerPool | None:
        return self.engine if isinstance(self.engine, ServerPool) else None


def _routes(parts: _Parts) -> list[Route]:
    """All routes in order of matching: the frequent ones first, except where an earlier path would hide a later one."""
    session = _session_endpoints(parts)
    # A session id may end in /models, which the agents' routes would match.
    first = [
        Route("/rl/sessions", session.index, methods=["GET"]),
        Route("/rl/sessions/{session:path}/interactions/{interaction}", session.show_turn, methods=["GET"]),
        Route("/rl/sessions/{session:path}", session.show, methods=["GET"]),
        Route("/rl/sessions/{session:path}", parts.audited("session.delete", session.delete), methods=["DELETE"]),
    ]
    return [
        *first,
        *_agent_routes(parts),
        *_session_routes(parts, session),
        *_export_routes(parts),
        *_health_routes(parts),
        *_of_leader(parts, [*_engine_routes(parts), *_mailbox_routes(parts)]),
    ]


def _session_endpoints(parts: _Parts) -> SessionEndpoints:
    return SessionEndpoints(
        access=parts.sessions.access,
        registry=parts.sessions.registry,
        starter=parts.sessions.starter,
        scores=parts.sessions.scores,
        endings=parts.sessions.endings,
        deletion=parts.sessions.deletion,
        turns=parts.turns,
        starts=parts.store.starts,
        recordings=parts.store.recordings,
        bodies=parts.bodies,
        addresses=parts.addresses,
        decode=parts.renderer.decode,
        replies=Replies(parts.renderer, (*_protocols(parts.renderer).values(), GenerateProtocol())),
    )


def _protocols(renderer: Renderer) -> dict[str, WireProtocol]:
    """The protocols of turns by the end of their paths; of two that end alike the longer path comes first."""
    return {
        "/chat/completions": ChatProtocol(),
        "/completions": CompletionsProtocol(renderer.decode),
        "/responses": ResponsesProtocol(),
        "/messages": MessagesProtocol(),
    }


def _turn_endpoints(
    access: Access,
    turns: Turns,
    renderer: Renderer,
    bodies: Bodies,
    model: str,
    forwarding: Forwarding | None,
    tracing: Tracing | None,
) -> dict[str, TurnEndpoint]:
    """The endpoints of turns by their paths."""
    turnstile = Turnstile()
    return {
        path: TurnEndpoint(protocol, access, turns, turnstile, model, bodies, forwarding, tracing)
        for path, protocol in _protocols(renderer).items()
    }


def _agent_routes(parts: _Parts) -> list[Route]:
    """The routes that agents call."""
    access, turns, bodies = parts.sessions.access, parts.turns, parts.bodies
    models = ModelEndpoints(model_name(parts.settings))
    count_tokens = count_endpoint(MessagesProtocol().parse_count, {}, access, turns, bodies)
    input_tokens = count_endpoint(ResponsesProtocol().parse, {"object": "response.input_tokens"}, access, turns, bodies)
    tokens = TokenizeEndpoints(access, turns, parts.gate, parts.renderer.vocab_size, parts.settings, bodies)
    generate = GenerateEndpoint(
        access,
        turns,
        parts.gate,
        parts.settings,
        bodies,
        parts.renderer.stop_token_ids,
        parts.forwarding,
        parts.tracing,
    )
    return [
        *(route for path, endpoint in parts.turn_endpoints.items() for route in _aliases(path, endpoint, ["POST"])),
        *_aliases("/messages/count_tokens", count_tokens, ["POST"]),
        *_aliases("/responses/input_tokens", input_tokens, ["POST"]),
        *_aliases("/generate", generate.generate, ["POST"]),
        *_aliases("/tokenize", tokens.tokenize, ["POST"]),
        *_aliases("/detokenize", tokens.detokenize, ["POST"]),
        *_aliases("/models", models.index, ["GET"]),
        *_aliases("/models/{model:path}", models.show, ["GET"]),
    ]


def _session_routes(parts: _Parts, session: SessionEndpoints) -> list[Route]:
    """The routes that start, reward and end sessions; `/grant_capacity` is AReaL's name."""
    access, bodies = parts.sessions.access, parts.bodies
    keys = KeyEndpoints(access, parts.sessions.rotation, bodies, parts.addresses)
    rotate = parts.audited("keys.rotate", keys.rotate)
    rewards = RewardEndpoints(access, parts.sessions.scores, bodies)
    return [
        *(Route(path, session.grant_capacity, methods=["POST"]) for path in ("/rl/grant_capacity", "/grant_capacity")),
        Route("/rl/start_session", session.start, methods=["POST"]),
        Route("/rl/set_reward", rewards.set_reward, methods=["POST"]),
        Route("/rl/end_session", session.end, methods=["POST"]),
        Route("/rl/rotate_keys", rotate, methods=["POST"]),
        Route("/rl/mark", rewards.mark, methods=["POST"]),
        Route("/{session:path}/rl/mark", rewards.mark, methods=["POST"]),
        Route("/{session:path}/rl/rotate_keys", rotate, methods=["POST"]),
        Route("/{session:path}/rl/set_reward", rewards.set_reward, methods=["POST"]),
        Route("/{session:path}/rl/end_session", session.end, methods=["POST"]),
    ]


def _export_routes(parts: _Parts) -> list[Route]:
    """The routes that give trajectories to trainers; `/export_trajectories` is AReaL's name."""
    access, store, turns = parts.sessions.access, parts.store, parts.turns
    export = ExportEndpoint(
        access,
        parts.sessions.registry,
        parts.sessions.waiter,
        store.recordings,
        parts.bodies,
        parts.polls,
        Pace(lambda: turns.busy),
        parts.metrics.exports,
        parts.renderer.decode,
    )
    claims = ClaimEndpoints(access, store.claims, store.recordings, export, parts.bodies, parts.polls)
    return [
        *(Route(path, export.export, methods=["POST"]) for path in ("/trajectories/export", "/export_trajectories")),
        Route("/trajectories/claim", claims.claim, methods=["POST"]),
        Route("/trajectories/acknowledge", claims.acknowledge, methods=["POST"]),
    ]


def _health_routes(parts: _Parts) -> list[Route]:
    numbers = parts.metrics.now if parts.group is None else parts.group.metrics.total
    health = HealthEndpoints(parts.gate, parts.store, parts.metrics, numbers, parts.server_pool, parts.settings)
    return [
        Route("/health", health.health, methods=["GET"]),
        Route("/ready", health.ready, methods=["GET"]),
        Route("/metrics", health.metrics, methods=["GET"]),
    ]


def _of_leader(parts: _Parts, routes: list[Route]) -> list[Route]:
    """The routes of one process, or of the worker that leads: the other workers pass these requests on to it."""
    if parts.group is None or parts.group.admin is not None or parts.forwarding is None:
        return routes
    return [Route(route.path, parts.forwarding.to_leader, methods=list(route.methods or ())) for route in routes]


def _engine_routes(parts: _Parts) -> list[Route]:
    """The routes that administer the engine."""
    admin, pool = parts.admin, parts.server_pool
    if parts.group is not None and parts.group.admin is not None:
        admin, pool = parts.group.admin, parts.group.pool
    engine = EngineEndpoints(parts.sessions.access, parts.gate, admin, pool, parts.bodies, parts.settings)

    def control(name: str, endpoint: Endpoint) -> Route:
        return Route(f"/engine/{name}", parts.audited(f"engine.{name}", endpoint), methods=["POST"])

    return [
        Route("/engine", engine.show, methods=["GET"]),
        control("pause_generation", engine.pause),
        control("continue_generation", engine.resume),
        control("update_weights", engine.update_weights),
        *(control(step, engine.transfer_weights) for step in WeightTransfer),
        control("release_memory", engine.release_memory),
        control("resume_memory", engine.resume_memory),
        control("flush_cache", engine.flush_cache),
        Route("/engine/servers", engine.list_servers, methods=["GET"]),
        Route("/engine/servers", parts.audited("engine.servers.add", engine.add_server), methods=["POST"]),
        Route("/engine/servers", parts.audited("engine.servers.remove", engine.remove_server), methods=["DELETE"]),
    ]


def _mailbox_routes(parts: _Parts) -> list[Route]:
    engine = parts.engine if isinstance(parts.engine, Mailbox) else None
    access, registry = parts.sessions.access, parts.sessions.registry
    waiter = parts.sessions.waiter
    mailbox = MailboxEndpoints(access, engine, registry, waiter, parts.bodies, parts.polls, parts.renderer)
    return [
        Route("/mailbox/next", mailbox.next, methods=["POST"]),
        Route("/mailbox/deliver", mailbox.deliver, methods=["POST"]),
    ]


def _aliases(path: str, endpoint: object, methods: list[str]) -> list[Route]:
    """Routes under `/v1` and `/{session}/v1`, and both without `/v1`.

    Some clients drop `/v1`: AReaL's workflow gives its agents the root URL of the server and a session's key.
    """
    label = f"/v1{path}".replace(":path}", "}")
    prefixes = ("/v1", "/{session:path}/v1", "/{session:path}", "")
    return [Route(prefix + path, endpoint, methods=methods, label=label) for prefix in prefixes]  # type: ignore[arg-type]


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
