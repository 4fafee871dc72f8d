"""The routes of the server: the endpoint of each path, and the parts that it is built from.

Routes are matched in order: a path that also matches a more general route comes before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proxy.api.adapter_endpoints import AdapterEndpoints
from proxy.api.addresses import Addresses
from proxy.api.agent_listener import no_endpoint
from proxy.api.annotation_endpoints import AnnotationEndpoints
from proxy.api.audit_log import Endpoint, audited
from proxy.api.bodies import Bodies
from proxy.api.chosen_routes import ChosenRoutes
from proxy.api.claim_endpoints import ClaimEndpoints
from proxy.api.engine_endpoints import Call, EngineEndpoints, EnginesByModel
from proxy.api.event_feed import Feed
from proxy.api.export_endpoint import ExportEndpoint
from proxy.api.export_images import ExportImages
from proxy.api.forwarding import Forwarding
from proxy.api.generate_endpoint import GenerateEndpoint
from proxy.api.health_endpoints import HealthEndpoints
from proxy.api.image_endpoints import ImageEndpoints
from proxy.api.key_endpoints import KeyEndpoints
from proxy.api.listing import Listing
from proxy.api.listing_endpoints import ListingEndpoints, Lists
from proxy.api.long_polls import LongPolls
from proxy.api.mailbox_endpoints import MailboxEndpoints
from proxy.api.model_endpoints import ModelEndpoints
from proxy.api.pace import Pace
from proxy.api.reason_endpoints import ReasonEndpoints
from proxy.api.repeated_calls import RepeatedCalls
from proxy.api.reward_endpoints import RewardEndpoints
from proxy.api.routes import Route
from proxy.api.runs import Runs
from proxy.api.score_endpoint import ScoreEndpoint
from proxy.api.served_model_endpoints import ServedModelEndpoints
from proxy.api.session_endpoints import SessionEndpoints
from proxy.api.sorted_listing import SortedListing
from proxy.api.statistics import Statistics
from proxy.api.statistics_endpoints import StatisticsEndpoints
from proxy.api.summaries import Summaries
from proxy.api.teacher_columns import Teachers
from proxy.api.tokenize_endpoints import TokenizeEndpoints
from proxy.api.turn_endpoints import StreamForms, TurnEndpoint, count_endpoint
from proxy.api.turn_reply import Replies
from proxy.api.turn_request import Requests
from proxy.api.turn_routes import label_of, prefixes
from proxy.api.webhook_endpoints import WebhookEndpoints
from proxy.engine.adapter_files import AdapterFiles
from proxy.engine.gate import Gate
from proxy.engine.interface import Engine, ServerPool, WeightTransfer
from proxy.engine.mailbox import Mailbox
from proxy.images.image_pool import ImagePool
from proxy.page.endpoints import PageEndpoints
from proxy.protocols.chat.protocol import ChatProtocol
from proxy.protocols.completions.protocol import CompletionsProtocol
from proxy.protocols.generate import GenerateProtocol
from proxy.protocols.google.protocol import GoogleProtocol, StreamForm
from proxy.protocols.messages.protocol import MessagesProtocol
from proxy.protocols.responses.protocol import ResponsesProtocol
from proxy.protocols.wire_protocol import WireProtocol
from proxy.rendering.renderer import Renderer
from proxy.resources.fair_pool import FairPool
from proxy.resources.turnstile import Turnstile
from proxy.served_engines import ServedEngine, ServedEngines
from proxy.sessions.access import Access
from proxy.sessions.parts import SessionParts
from proxy.sessions.recent_rewards import RecentRewards
from proxy.sessions.retention import Retention
from proxy.settings import Settings
from proxy.store.archive.served import ServedArchive
from proxy.store.store import Store
from proxy.store.text_indexer import TextIndexer
from proxy.store.text_search import TextSearch
from proxy.telemetry.metrics import Metrics
from proxy.trajectory.mismatch import Mismatch
from proxy.turns.turns import Turns
from proxy.webhooks.deliverer import Deliverer
from proxy.workers.common_live import CommonLive
from proxy.workers.group import Group
from tokengrove.options.model import RouteKind

if TYPE_CHECKING:
    from tokengrove.spans import Tracing

Turning = TurnEndpoint | StreamForms


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts that endpoints are built from, and the endpoints of turns by path.

    `agent_bodies`: the bodies of the listener for agents; None without one.
    `adapters`: those of each policy by the name of its route, the server's own engine first.
    """

    settings: Settings
    sessions: SessionParts
    turns: Turns
    store: Store
    archive: ServedArchive
    retention: Retention | None
    search: TextSearch
    indexer: TextIndexer | None
    deliverer: Deliverer | None
    engine: Engine
    gate: Gate
    metrics: Metrics
    images: ImagePool
    renderer: Renderer
    polls: LongPolls
    addresses: Addresses
    turn_endpoints: Mapping[str, Turning]
    group: Group | None
    pool: FairPool
    bodies: Bodies
    agent_bodies: Bodies | None
    forwarding: Forwarding | None
    served: ServedEngines
    adapter_files: AdapterFiles
    tracing: Tracing | None

    def audited(self, action: str, endpoint: Endpoint) -> Endpoint:
        return audited(self.sessions.access, action, endpoint)

    @property
    def server_pool(self) -> ServerPool | None:
        return self.engine if isinstance(self.engine, ServerPool) else None


def routes(parts: Parts) -> list[Route]:
    """All routes in order of matching: frequent routes first, except where they would hide another route."""
    session, listing = _session_endpoints(parts), _listing_endpoints(parts)
    watch = _statistics_endpoints(parts)
    images = ImageEndpoints(parts.sessions.access, parts.sessions.registry, parts.store.images)
    # A session id may end in /models, which the agents' routes would match.
    models = ServedModelEndpoints(
        parts.sessions.access, parts.bodies, parts.served, parts.turns.running, parts.settings
    )
    webhooks = WebhookEndpoints(parts.sessions.access, parts.bodies, parts.store.outbox)
    first = [
        Route("/engine/models", models.index, methods=["GET"]),
        Route("/rl/reasons", ReasonEndpoints(parts.sessions.access).index, methods=["GET"]),
        Route("/rl/sessions", listing.index, methods=["GET"]),
        Route("/rl/groups", listing.groups, methods=["GET"]),
        Route("/rl/runs", listing.runs, methods=["GET"]),
        Route("/rl/webhooks", webhooks.index, methods=["GET"]),
        Route("/rl/webhooks/resend", parts.audited("webhooks.resend", webhooks.resend), methods=["POST"]),
        Route("/rl/statistics", watch.statistics, methods=["GET"]),
        Route("/rl/events", watch.events, methods=["GET"]),
        *_annotation_routes(parts),
        Route("/rl/sessions/{session:path}/interactions/{interaction}", session.show_turn, methods=["GET"]),
        Route("/rl/sessions/{session:path}/images/{digest}", images.show, methods=["GET"]),
        Route("/rl/sessions/{session:path}", session.show, methods=["GET"]),
        Route("/rl/sessions/{session:path}", parts.audited("session.delete", session.delete), methods=["DELETE"]),
    ]
    return [
        *first,
        *_agent_routes(parts, parts.sessions.access, parts.bodies, parts.turn_endpoints),
        *_session_routes(parts, session),
        *_export_routes(parts),
        *_health_routes(parts),
        *_of_leader(parts, [*_engine_routes(parts, models), *_mailbox_routes(parts)]),
        *(_page_routes() if parts.settings.page else []),
    ]


def _session_endpoints(parts: Parts) -> SessionEndpoints:
    protocols = (*_protocols().values(), GenerateProtocol())
    return SessionEndpoints(
        access=parts.sessions.access,
        registry=parts.sessions.registry,
        starter=parts.sessions.starter,
        scores=parts.sessions.scores,
        endings=parts.sessions.endings,
        deletion=parts.sessions.deletion,
        withdrawal=parts.sessions.withdrawal,
        running=parts.turns.running,
        starts=parts.store.starts,
        recordings=parts.store.recordings,
        archive=parts.archive,
        bodies=parts.bodies,
        repeated=RepeatedCalls(parts.store.answers),
        addresses=parts.addresses,
        images=parts.store.images,
        routes=parts.turns.routes,
        replies=Replies(parts.turns.routes, protocols),
        requests=Requests(parts.turns.routes, protocols, parts.store.images.read),
        pace=Pace(lambda: parts.turns.running.busy),
    )


def _listing_endpoints(parts: Parts) -> ListingEndpoints:
    turns, recordings = parts.turns, parts.store.recordings
    summaries = Summaries(recordings, Pace(lambda: turns.running.busy))
    listing = Listing(recordings, summaries)
    lists = Lists(recordings, listing, SortedListing(recordings, summaries), parts.search)
    return ListingEndpoints(parts.sessions.access, lists, Runs(recordings, listing, parts.search))


def _statistics_endpoints(parts: Parts) -> StatisticsEndpoints:
    group, pool = parts.group, parts.server_pool

    async def servers() -> list[dict[str, Any]] | None:
        if pool is None:
            return None
        return await pool.show() if group is None else await group.servers()

    live = CommonLive(parts.metrics.history, parts.store.changed.since, None) if group is None else group.live
    numbers = parts.metrics.now if group is None else group.metrics.total
    rewards = RecentRewards(parts.store.recordings)
    parts.store.backlog.routes = parts.served.routes.names.other_trained
    statistics = Statistics(parts.gate, numbers, live, servers, parts.store.backlog, rewards.read)
    return StatisticsEndpoints(parts.sessions.access, statistics, Feed(statistics, live), parts.polls)


def _protocols() -> dict[str, WireProtocol]:
    """The protocols of turns by the end of their paths. Of two paths with the same end, the longer comes first."""
    return {
        "/chat/completions": ChatProtocol(),
        "/completions": CompletionsProtocol(),
        "/responses": ResponsesProtocol(),
        "/messages": MessagesProtocol(),
        "/models/{model:path}:generateContent": GoogleProtocol(),
    }


def turn_endpoints(
    access: Access,
    turns: Turns,
    turnstile: Turnstile,
    bodies: Bodies,
    forwarding: Forwarding | None,
    tracing: Tracing | None,
) -> dict[str, Turning]:
    """The endpoints of turns by path."""

    def endpoint(protocol: WireProtocol) -> TurnEndpoint:
        return TurnEndpoint(protocol, access, turns, turnstile, bodies, forwarding, tracing)

    events, array = endpoint(GoogleProtocol(StreamForm.EVENTS)), endpoint(GoogleProtocol(StreamForm.ARRAY))
    found: dict[str, Turning] = {path: endpoint(protocol) for path, protocol in _protocols().items()}
    return {**found, "/models/{model:path}:streamGenerateContent": StreamForms(events, array)}


def listener_routes(parts: Parts, bodies: Bodies, endpoints: Mapping[str, Turning]) -> list[Route]:
    """All routes of the listener for agents. `endpoints`: its endpoints of turns."""
    return [
        # Else the models of a session named `engine`.
        Route("/engine/models", no_endpoint, methods=["GET", "POST", "DELETE"]),
        *_agent_routes(parts, parts.sessions.agent_access, bodies, endpoints),
        Route("/health", _health(parts).health, methods=["GET"]),
    ]


def _agent_routes(parts: Parts, access: Access, bodies: Bodies, endpoints: Mapping[str, Turning]) -> list[Route]:
    """The routes that agents call."""
    served = parts.turns.routes
    models = ModelEndpoints(access, served)
    messages, responses, google = MessagesProtocol(), ResponsesProtocol(), GoogleProtocol()
    rest = (access, served, bodies)
    count_tokens = count_endpoint(messages.api, messages.parse_count, lambda n: {"input_tokens": n}, *rest)
    head = {"object": "response.input_tokens"}
    input_tokens = count_endpoint(responses.api, responses.parse, lambda n: {**head, "input_tokens": n}, *rest)
    total_tokens = count_endpoint(google.api, google.parse_count, lambda n: {"totalTokens": n}, *rest)
    tokenize = TokenizeEndpoints(access, served, bodies)
    generate = GenerateEndpoint(access, parts.turns, bodies, parts.forwarding, parts.tracing)
    return [
        *(route for path, endpoint in endpoints.items() for route in _aliases(path, endpoint, ["POST"])),
        *_aliases("/messages/count_tokens", count_tokens, ["POST"]),
        *_aliases("/responses/input_tokens", input_tokens, ["POST"]),
        *_aliases("/models/{model:path}:countTokens", total_tokens, ["POST"]),
        *_aliases("/generate", generate.generate, ["POST"]),
        *_aliases("/tokenize", tokenize.tokenize, ["POST"]),
        *_aliases("/detokenize", tokenize.detokenize, ["POST"]),
        *_aliases("/parse", tokenize.parse, ["POST"]),
        *_google_models(models),
        *_aliases("/models", models.index, ["GET"]),
        *_aliases("/models/{model:path}", models.show, ["GET"]),
    ]


def _session_routes(parts: Parts, session: SessionEndpoints) -> list[Route]:
    """The routes that start, reward and end sessions; `/grant_capacity` is AReaL's name."""
    access, bodies = parts.sessions.access, parts.bodies
    repeated = RepeatedCalls(parts.store.answers)
    keys = KeyEndpoints(access, parts.sessions.rotation, bodies, parts.addresses, repeated)
    rotate = parts.audited("keys.rotate", keys.rotate)
    rewards = RewardEndpoints(access, parts.sessions.scores, bodies, repeated)
    return [
        *(Route(path, session.grant_capacity, methods=["POST"]) for path in ("/rl/grant_capacity", "/grant_capacity")),
        Route("/rl/start_session", session.start, methods=["POST"]),
        Route("/rl/set_reward", rewards.set_reward, methods=["POST"]),
        Route("/rl/end_session", session.end, methods=["POST"]),
        Route("/rl/withdraw_session", session.withdraw, methods=["POST"]),
        Route("/rl/rotate_keys", rotate, methods=["POST"]),
        Route("/rl/mark", rewards.mark, methods=["POST"]),
        Route("/{session:path}/rl/mark", rewards.mark, methods=["POST"]),
        Route("/{session:path}/rl/rotate_keys", rotate, methods=["POST"]),
        Route("/{session:path}/rl/set_reward", rewards.set_reward, methods=["POST"]),
        Route("/{session:path}/rl/end_session", session.end, methods=["POST"]),
        Route("/{session:path}/rl/withdraw_session", session.withdraw, methods=["POST"]),
    ]


def _export_routes(parts: Parts) -> list[Route]:
    """The routes that return trajectories to trainers; `/export_trajectories` is AReaL's name."""
    access, store, turns = parts.sessions.access, parts.store, parts.turns
    chosen = ChosenRoutes(parts.served.routes.names, store.recordings)
    export = ExportEndpoint(
        access,
        parts.sessions.registry,
        parts.sessions.waiter,
        store.recordings,
        parts.bodies,
        parts.polls,
        Pace(lambda: turns.running.busy),
        parts.metrics.exports,
        ExportImages(store.images, parts.renderer),
        chosen,
        Teachers(turns, store.recordings, parts.images),
        parts.archive,
        parts.turns.routes.decoder,
    )
    scores = ScoreEndpoint(access, turns, store.recordings, parts.images, parts.bodies)
    claims = ClaimEndpoints(access, store.claims, store.recordings, export, parts.bodies, parts.polls, chosen)
    return [
        *(Route(path, export.export, methods=["POST"]) for path in ("/trajectories/export", "/export_trajectories")),
        Route("/v1/logprobs", scores.score, methods=["POST"]),
        Route("/trajectories/claim", claims.claim, methods=["POST"]),
        Route("/trajectories/acknowledge", claims.acknowledge, methods=["POST"]),
    ]


def _annotation_routes(parts: Parts) -> list[Route]:
    """The routes of what trainers tell of the tokens that they trained."""
    mismatch = Mismatch(parts.settings.mismatch_limit)
    store = parts.store
    told = AnnotationEndpoints(
        *(parts.sessions.access, store.annotations, store.recordings, parts.bodies),
        *(mismatch, parts.metrics.exports),
    )
    return [
        Route("/trajectories/annotate", told.annotate, methods=["POST"]),
        Route("/trajectories/steps", told.steps, methods=["GET"]),
        Route("/trajectories/steps/{trainer}/{step}", told.step, methods=["GET"]),
        Route("/trajectories/mismatch", told.mismatch, methods=["GET"]),
        Route("/rl/sessions/{session:path}/annotations", told.of_session, methods=["GET"]),
    ]


def _health(parts: Parts) -> HealthEndpoints:
    numbers = parts.metrics.now if parts.group is None else parts.group.metrics.total
    return HealthEndpoints(parts.gate, parts.store, parts.metrics, numbers, parts.server_pool, parts.settings)


def _health_routes(parts: Parts) -> list[Route]:
    health = _health(parts)
    return [
        Route("/health", health.health, methods=["GET"]),
        Route("/ready", health.ready, methods=["GET"]),
        Route("/metrics", health.metrics, methods=["GET"]),
    ]


def _of_leader(parts: Parts, routes: list[Route]) -> list[Route]:
    """The routes of a single process or of the leading worker. On other workers, they forward to the leader."""
    if parts.group is None or parts.group.admin is not None or parts.forwarding is None:
        return routes
    return [Route(route.path, parts.forwarding.to_leader, methods=list(route.methods or ())) for route in routes]


def _engine_routes(parts: Parts, models: ServedModelEndpoints) -> list[Route]:
    """The routes that administer the engine."""
    admin, pool = parts.served.main.admin, parts.server_pool
    if parts.group is not None and parts.group.admin is not None:
        admin, pool = parts.group.admin, parts.group.pool
    access, bodies = parts.sessions.access, parts.bodies
    main = parts.served.main

    def endpoints(each: ServedEngine) -> EngineEndpoints:
        of_main, route = each is main, each.route
        return EngineEndpoints(
            access,
            route.gate,
            admin if of_main else each.admin,
            pool if of_main else each.pool,
            bodies,
            route.settings,
            route.adapters,
            route.renderer.sight,
            route.declared,
            parts.store.outbox.tell,
        )

    of_model = EnginesByModel(parts.served, endpoints).endpoint
    trained = [each for each in parts.served if each.route.kind is RouteKind.POLICY]
    policies = {each.route.name: each.route.adapters for each in trained}
    adapters = AdapterEndpoints(access, bodies, policies, parts.adapter_files, parts.store.outbox.tell)

    def control(name: str, call: Call) -> Route:
        return Route(f"/engine/{name}", parts.audited(f"engine.{name}", of_model(call)), methods=["POST"])

    add, remove = of_model(EngineEndpoints.add_server), of_model(EngineEndpoints.remove_server)
    return [
        Route("/engine", of_model(EngineEndpoints.show), methods=["GET"]),
        control("pause_generation", EngineEndpoints.pause),
        control("continue_generation", EngineEndpoints.resume),
        control("update_weights", EngineEndpoints.update_weights),
        *(
            control(step, EngineEndpoints.transfer_weights)
            for step in WeightTransfer
            if step is not WeightTransfer.UPDATE
        ),
        control("release_memory", EngineEndpoints.release_memory),
        control("resume_memory", EngineEndpoints.resume_memory),
        control("flush_cache", EngineEndpoints.flush_cache),
        Route("/engine/models", parts.audited("engine.models.add", models.add), methods=["POST"]),
        Route("/engine/models", parts.audited("engine.models.remove", models.remove), methods=["DELETE"]),
        Route("/engine/adapters", adapters.index, methods=["GET"]),
        Route("/engine/adapters", parts.audited("engine.adapters.publish", adapters.publish), methods=["POST"]),
        Route("/engine/adapters", parts.audited("engine.adapters.withdraw", adapters.withdraw), methods=["DELETE"]),
        Route("/engine/servers", of_model(EngineEndpoints.list_servers), methods=["GET"]),
        Route("/engine/servers", parts.audited("engine.servers.add", add), methods=["POST"]),
        Route("/engine/servers", parts.audited("engine.servers.remove", remove), methods=["DELETE"]),
    ]


def _mailbox_routes(parts: Parts) -> list[Route]:
    engine = parts.engine if isinstance(parts.engine, Mailbox) else None
    access, registry = parts.sessions.access, parts.sessions.registry
    waiter = parts.sessions.waiter
    mailbox = MailboxEndpoints(access, engine, registry, waiter, parts.bodies, parts.polls, parts.renderer)
    return [
        Route("/mailbox/next", mailbox.next, methods=["POST"]),
        Route("/mailbox/deliver", mailbox.deliver, methods=["POST"]),
    ]


def _page_routes() -> list[Route]:
    """The routes of the web page. A session named `ui` keeps its own routes, which come first."""
    page = PageEndpoints()
    return [
        Route("/", page.root, methods=["GET"]),
        Route("/ui", page.page, methods=["GET"]),
        Route("/ui/", page.page_above, methods=["GET"]),
        Route("/ui/{file:path}", page.file, methods=["GET"], label="/ui/{file}"),
    ]


def _aliases(path: str, endpoint: object, methods: list[str]) -> list[Route]:
    """Routes under each prefix of a path: under `/v1` and `/{session}/v1`, and both without `/v1`."""
    label = label_of(path)
    return [Route(prefix + path, endpoint, methods=methods, label=label) for prefix in prefixes(path)]  # type: ignore[arg-type]


def _google_models(models: ModelEndpoints) -> list[Route]:
    """The routes of the models under Google's version of its API."""
    return [
        Route(f"{prefix}/v1beta/models{path}", endpoint, methods=["GET"], label=f"/v1beta/models{label}")
        for prefix in ("", "/{session:path}")
        for path, label, endpoint in (("", "", models.index), ("/{model:path}", "/{model}", models.show))
    ]
