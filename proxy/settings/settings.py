"""The settings of one server, read once at startup (`settings.sources`).

Each field of `Settings` is a flag of `tokengrove serve`, an environment variable, a key of the configuration file and a
documented line; a test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from proxy.settings import checks
from proxy.settings.retention import read_rules
from tokengrove.errors import ConfigurationError
from tokengrove.loopback import is_loopback_host
from tokengrove.options.option import flag_of, option, options_of
from tokengrove.options.session import Credit
from tokengrove.options.start import AdapterPinning, EpisodeCut, Replay

# Pillow treats a larger image as a decompression bomb.
_MOST_PIXELS = 89_000_000


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one server, from keyword arguments or `read_settings`. Raises ConfigurationError."""

    host: str = option("127.0.0.1", "Address to listen on. Addresses beyond loopback require --admin-key.")
    port: int = option(8080, "Port to listen on; 0 picks a free port.", least=0, most=65535)
    workers: int = option(
        1,
        "Processes that serve the port as one server; more than 1 need PostgreSQL and engine servers.",
        above=0,
        note="[Workers](deployment.md#workers).",
    )
    public_url: str | None = option(
        None,
        "URL of this server for agents, used in base_url; none: the URL of the request.",
        note="It may have the path below which a gateway serves the server.",
    )
    agent_port: int | None = option(
        None,
        "Port of its own for agents on other machines: it has their endpoints only, and takes keys of sessions only. "
        "None: no such port; 0 picks a free one.",
        least=0,
        most=65535,
        note="[Agents on other machines](deployment.md#agents-on-other-machines).",
    )
    agent_host: str | None = option(None, "Address to listen on with --agent-port; none: --host.")
    expose: str | None = option(
        None,
        "Tunnel to the port for agents: cloudflared, or a command with {port} that prints its URL, such as "
        "'ssh -R 80:localhost:{port} nokey@localhost.run'. Sessions get that URL. Opens --agent-port on a free port of "
        "127.0.0.1 if there is none.",
        note="[Tunnels](deployment.md#tunnels).",
    )
    expose_timeout_s: float = option(60.0, "Seconds that a tunnel of --expose may take to print its URL.", above=0)
    agent_max_connections: int = option(1024, "Limit of connections at --agent-port, of a process.", above=0)
    agent_max_requests: int = option(
        1024, "Limit of requests at --agent-port that a process answers at once, and of their turns; then 429.", above=0
    )
    agent_max_body_bytes: int | None = option(
        None,
        "Limit of a request body at --agent-port in bytes; none: --max-body-bytes.",
        above=0,
        note="A process holds eight times as much at once.",
    )
    reconnect_s: float | None = option(
        None,
        "Seconds that a turn continues without its client, so that a retry gets it; none: 2, or 30 with --agent-port.",
        least=0,
        note="[Retries](concepts.md#retries).",
    )
    model: str | None = option(
        None,
        "Hugging Face causal model: a local folder, or ORG/NAME[@REVISION] of the hub; none: a tiny random one.",
        note="[The hub](engines.md#models-from-the-hub).",
    )
    tokenizer: str | None = option(None, "Tokenizer, named like a model; none: the model's.")
    served_model_name: str | None = option(None, "Model name in /v1/models; none: that on the hub, or of the folder.")
    engine: str = option(
        "auto",
        "auto (sglang with a GPU, else transformers), sglang, transformers, scripted, mailbox, "
        "package.module:Class, or URL[,URL...] of inference servers.",
        note="[Engines](engines.md).",
    )
    engine_arg: tuple[str, ...] = option(
        (), "Engine option as key=value, repeatable (variable: separated by ;). SGLang takes its ServerArgs fields."
    )
    models: str | None = option(
        None,
        "Models by the names that requests give: a TOML file with tables [models.NAME], or a JSON object; "
        "none: one model under any name. A configuration file has the tables themselves.",
        note="[Several models](models.md).",
    )
    model_hosts: str | None = option(
        None,
        "Hosts of external models that may be declared over HTTP: NAME or *.SUFFIX, separated by commas; their "
        "addresses may be private. None: no host. URLs of the configuration need no entry.",
    )
    max_live_versions: int = option(
        4,
        "LoRA adapters of a model that serve at once; publishing another one waits until one is unused.",
        above=0,
        note="[Adapters](models.md#adapters).",
    )
    adapter_pinning: AdapterPinning = option(
        AdapterPinning.SESSION,
        "Adapter of a session's turns: session (the one that it began with) or follow (the newest at each turn).",
        note="[The version of a session](models.md#the-version-of-a-session).",
    )
    family: str | None = option(
        None,
        "Model family for rendering and parsing; none: from the model's config.json.",
        note="`tokengrove doctor --family x` lists them.",
    )
    tool_parser: str | None = option(
        None,
        "Tool-call format; none: the family's.",
        note="`tokengrove doctor --tool-parser x` lists them.",
    )
    reasoning_parser: str | None = option(
        None,
        "Reasoning format; none: the family's.",
        note="`tokengrove doctor --reasoning-parser x` lists them.",
    )
    thinking_retention: str = option(
        "all",
        "Reasoning of earlier turns in the prompt: all (kept as sampled) or template (as the template does).",
        choices=("all", "template"),
        note="The latter [forks](troubleshooting.md#template).",
    )
    database_url: str = option(
        "sqlite:///tokengrove.db",
        "SQLAlchemy URL of the database.",
        note="[Databases](deployment.md#databases).",
    )
    migrate: bool | None = option(
        None,
        "Upgrade an older database schema at startup; none: for SQLite files only.",
        note="[Upgrades](deployment.md#upgrades).",
    )
    admin_key: str | None = option(
        None,
        "Administrator's key, or several separated by commas. Prefer the variable: flags are visible in ps.",
        secret=True,
        note="Beyond loopback, it needs 16 characters.",
    )
    metrics_key: str | None = option(
        None,
        "Key that /metrics needs, or several separated by commas; the admin key opens it too. None: it is open.",
        secret=True,
        note="[Access](monitoring.md#access).",
    )
    trainer_key: str | None = option(
        None,
        "Key of trainers, or several separated by commas: it may claim, acknowledge and annotate, nothing else.",
        secret=True,
        note="[What the trainer saw](train.md#what-the-trainer-saw).",
    )
    reader_key: str | None = option(
        None,
        "Key of readers, or several separated by commas: it may list, show and export sessions, nothing else.",
        secret=True,
        note="[Keys](deployment.md#keys-and-access).",
    )
    mismatch_limit: float = option(
        0.01,
        "KL between a sampler's and a trainer's logprobs above which the sampler is named in log and metrics.",
        above=0,
        note="[Mismatch](monitoring.md#sampler-and-trainer-disagree).",
    )
    metrics_port: int | None = option(
        None,
        "Port of its own for /metrics, /health and /ready; /metrics is not on --port then. None: it is.",
        least=1,
        most=65535,
        note="[Access](monitoring.md#access).",
    )
    rewards_by: str | None = option(
        None,
        "Key that sets rewards: control or session; none: session without --admin-key, else control.",
        choices=("control", "session"),
    )
    require_key: bool = option(False, "Refuse requests that have no key but the secret in the path of base_url.")
    allow_chosen_keys: bool = option(False, "Let callers choose session keys even beyond loopback.")
    refresh_by_key: bool = option(
        False,
        "A start with the api_key of a live session ends that session first; else such a start is refused.",
        note="[AReaL's online mode](coming-from-areal.md#online-mode).",
    )
    key_lifetime_s: float | None = option(None, "Seconds until a session's keys expire; none: never.", above=0)
    forwarded_allow_ips: str | None = option(
        None, "Proxies whose X-Forwarded-* headers are trusted: addresses and networks separated by commas, or *."
    )
    allowed_hosts: str | None = option(
        None,
        "Names under which the server may be called besides loopback's and the public URL's: NAME or *.SUFFIX, "
        "separated by commas. Checked without --admin-key, or where it is given.",
        note="[Browsers](deployment.md#browsers).",
    )
    allowed_origins: str | None = option(
        None,
        "Origins of web pages and webviews that may call the server: https://HOST, https://*.SUFFIX or "
        "SCHEME://*, separated by commas.",
        note="Such as `vscode-webview://*`.",
    )
    page: bool = option(
        True,
        "Serve the page for people, at / (to browsers) and /ui.",
        note="[The page](page.md).",
    )
    capacity_control: bool = option(False, "Admit only starts granted by /rl/grant_capacity; further ones get 429.")
    max_live_sessions: int | None = option(None, "Limit of live sessions; further starts get 429.", above=0)
    session_idle_s: float | None = option(
        None, "Seconds without use until a session expires (its data stays); none: never.", above=0
    )
    episode_idle_s: float | None = option(
        None,
        "Seconds without a turn after which the next one at an address or key begins another session.",
        above=0,
        note="[Episodes](online.md#episodes).",
    )
    episode_turns: int | None = option(
        None, "Turns of such a session after which the next one begins another.", above=0
    )
    episode_lineage: tuple[str, ...] = option(
        (),
        "Conversations that begin another session, repeatable: new, compaction, head, reset.",
        choices=tuple(EpisodeCut),
    )
    keep_days: float | None = option(
        None,
        "Days after their end at which the server deletes exported, acknowledged, withdrawn and expired sessions; "
        "none: never.",
        least=0,
        note="[Retention](deployment.md#retention).",
    )
    keep: tuple[str, ...] = option(
        (),
        "How long to keep some sessions, repeatable (variable: separated by ;), before --keep-days: group=PATTERN:90d, "
        "step<1000:12h, group=PATTERN,step<10:forever; with :unexported also ones that nobody exported.",
    )
    archive_to: str | None = option(
        None,
        "Folder or URL of an archive, to which --keep-days and --keep move sessions instead of deleting them.",
        note="[Archive](deployment.md#archive).",
    )
    search: bool = option(
        False,
        "Index the texts of turns in the background, earlier ones included, so that listings, the page and show find "
        "sessions by them; for every server of a database.",
        note="[Its filter](http-api.md#get-rlsessions).",
    )
    webhook: tuple[str, ...] = option(
        (),
        "URL that is told of events by signed requests, repeatable (variable: separated by ;).",
        note="[Webhooks](online.md#webhooks).",
    )
    webhook_secret: str | None = option(
        None,
        "Secret that signs them: whsec_ and base64 of 24 to 64 bytes; several, separated by commas, for rotation.",
        secret=True,
    )
    webhook_timeout_s: float = option(10.0, "Seconds that a receiver may take to answer.", above=0)
    webhook_attempts: int = option(16, "Attempts to deliver an event, in about six hours; then it is kept.", above=0)
    max_staleness: int | None = option(
        None,
        "Start a session only if it will be at most this many weight versions old when trained; else 429.",
        least=0,
        note="AReaL's rule.",
    )
    batch_size: int | None = option(
        None, "Sessions that the trainer consumes per weight version; required by --max-staleness.", above=0
    )
    max_turns_in_flight: int = option(4096, "Limit of turns that run at once; further ones get 429.", above=0)
    shared_running_requests: int | None = option(
        None,
        "Choices that several senders generate at once before who has many waits in turn; none: as many as the "
        "engine runs, or 256.",
        above=0,
        note="[Fairness](planning.md#many-senders).",
    )
    max_connections: int = option(
        8192,
        "Limit of client connections of a process; less if its limit of open files has no room for them.",
        above=0,
        note="[Connections](deployment.md#connections).",
    )
    strict_sampling: bool = option(
        False,
        "Refuse sampling fields that the engine takes only as best effort (a seed, if it is not deterministic).",
        note="[Seeds](engines.md#seeds).",
    )
    hosted_tools: str = option(
        "ignore",
        "Tools that only a provider runs, like a web search: ignore (named in x-tokengrove-ignored) or refuse (400).",
        choices=("ignore", "refuse"),
    )
    replay: tuple[str, ...] = option(
        (),
        "What turns record for training, unless their session says otherwise: kept (sets of ids that sampling left), "
        "experts, top_logprobs; may be repeated.",
        choices=tuple(Replay),
        note="[Replay columns](replay.md).",
    )
    max_kept: int = option(512, "Size of the largest kept set, or complement of one, that is recorded.", above=0)
    alternatives: int = option(5, "Alternatives of each token that --replay top_logprobs records.", least=1, most=20)
    max_context_tokens: int | None = option(None, "Limit of prompt plus output tokens; none: the model's.", above=0)
    max_tokens_per_turn: int | None = option(None, "Limit of sampled tokens in one turn.", above=0)
    max_body_bytes: int = option(32 * 1024 * 1024, "Limit of a request body in bytes; longer ones get 413.", above=0)
    max_inflight_body_bytes: int | None = option(
        None,
        "Limit of the request bodies that are held at once, in bytes; none: eight times --max-body-bytes.",
        above=0,
        note="One key, session or address gets half.",
    )
    session_memory_bytes: int = option(
        512 * 1024 * 1024,
        "Memory of the sessions that stay loaded while turns run, in bytes; others are read again.",
        above=0,
    )
    image_memory_bytes: int = option(
        256 * 1024 * 1024,
        "Memory of the images that were used last, in bytes; others are read from the database.",
        above=0,
    )
    max_session_images: int = option(
        10_000,
        "Limit of the different images in one session.",
        above=0,
        note="More get 403.",
    )
    max_session_image_bytes: int = option(
        1024 * 1024 * 1024, "Limit of the bytes of all images in one session; equal ones count once.", above=0
    )
    max_body_values: int = option(
        1_250_000, "Limit of the values in a request body; an array, an object or a key counts as 12.", above=0
    )
    max_request_images: int = option(
        1000, "Limit of the images of one request, those of its history included; more get 400.", above=0
    )
    max_image_bytes: int = option(
        20 * 1024 * 1024, "Limit of an image in bytes, as it is sent; larger ones get 400.", above=0
    )
    max_image_pixels: int = option(
        36_000_000,
        "Limit of an image's width times height, at most 89000000; checked before it is decoded.",
        above=0,
        most=_MOST_PIXELS,
        note="A side has at most 32,768 pixels, and 200 times the other.",
    )
    allow_image_urls: bool = option(
        False,
        "Fetch images that a request names by http(s) URL; otherwise they get 400. Data URLs need no permission.",
        note="Never from private, loopback or link-local addresses.",
    )
    image_hosts: str | None = option(
        None,
        "Hosts that images are fetched from: NAME or *.SUFFIX, separated by commas; a NAME may have a private "
        "address. None: all public hosts.",
        note="Needs `--allow-image-urls`.",
    )
    image_url_timeout_s: float = option(10.0, "Seconds that fetching an image may take; then 400.", above=0)
    engine_timeout_s: float = option(
        600.0,
        "Seconds to wait for the engine's next token; then 504.",
        above=0,
        note="The turn first continues once at another engine server.",
    )
    stream_interval: int | None = option(
        None,
        "Tokens that SGLang sends in one part of a stream; none: 1, and up to 3 while many streams run.",
        above=0,
        note="[Streams](engines.md#sglang-and-vllm-servers).",
    )
    pause_timeout_s: float = option(
        120.0,
        "Seconds that a request waits for a paused engine, or for a server; then 503.",
        least=0,
        note="[No server alive](engines.md#when-no-server-is-alive).",
    )
    database_wait_s: float = option(
        60.0,
        "Seconds that turns and control calls wait for a database that is away; then 503. 0: not at all.",
        least=0,
        note="[PostgreSQL away](deployment.md#when-postgresql-is-away).",
    )
    shutdown_timeout_s: float = option(30.0, "Seconds that running turns may take to finish at shutdown.", least=0)
    discount: float = option(
        1.0, "Discount per step of rewards that flow back to earlier turns, 0 to 1.", least=0, most=1
    )
    credit: Credit = option(
        Credit.TREE,
        "How rewards flow back: tree (to ancestors) or linear (to earlier turns).",
        note="[Rewards](concepts.md#rewards).",
    )
    log_level: str = option(
        "info",
        "debug, info, warning or error.",
        choices=("debug", "info", "warning", "error"),
        note="[Logs](monitoring.md#logs). [Audit lines](deployment.md#audit-lines) are written at any level.",
    )
    log_format: str = option("pretty", "pretty (for people) or json (one object a line).", choices=("pretty", "json"))
    log_content: bool = option(
        False, "Log the beginning of each turn's new messages and answer, with --log-level debug."
    )

    def __post_init__(self) -> None:
        _check(self)

    @property
    def loopback(self) -> bool:
        """True if only this machine can reach the server."""
        return is_loopback_host(self.host) and self.agent_address is None

    @property
    def agent_address(self) -> tuple[str, int] | None:
        """Host and port (0: a free one) of the listener for agents; None if there is none."""
        if self.agent_port is None:
            return None if self.expose is None else (self.agent_host or "127.0.0.1", 0)
        return self.agent_host or self.host, self.agent_port

    @property
    def for_agents(self) -> Settings:
        """The same settings with the limits of the listener for agents."""
        most = self.agent_max_body_bytes or self.max_body_bytes
        return replace(self, max_body_bytes=most, max_inflight_body_bytes=None)

    @property
    def weak_key(self) -> str | None:
        """The warning about an admin key that can be guessed, else None."""
        if self.admin_key is None or all(len(key) >= _KEY_LENGTH for key in self.admin_key.split(",")):
            return None
        return (
            f"--admin-key has a key of fewer than {_KEY_LENGTH} characters, which can be guessed; make one with "
            "`openssl rand -hex 32`"
        )

    @property
    def all_body_bytes(self) -> int:
        """The limit of request bodies that one process holds at once, in bytes."""
        return self.max_inflight_body_bytes or 8 * self.max_body_bytes

    @property
    def agents_may_reward(self) -> bool:
        """True if the agent's key may set rewards and end its session; on an open server, any caller may."""
        return (self.rewards_by or ("control" if self.admin_key else "session")) == "session"


_KEY_LENGTH = 16


def _check(settings: Settings) -> None:
    """Raise ConfigurationError for the first setting that is not valid."""
    for name, each in options_of(Settings).items():
        value = getattr(settings, name)
        if isinstance(value, str):
            checks.check_text(each.flag, value)
        each.check(value)
    checks.check_host(settings.host)
    if not is_loopback_host(settings.host) and not settings.admin_key:
        raise ConfigurationError(
            f"--host {settings.host} is reachable from other machines: set TOKENGROVE_ADMIN_KEY (or --admin-key), "
            "or listen on 127.0.0.1"
        )
    _check_agents(settings)
    if settings.metrics_port == settings.port:
        raise ConfigurationError(f"--metrics-port {settings.port} is --port; choose another, or leave it out")
    if settings.log_content and settings.log_level != "debug":
        raise ConfigurationError("--log-content has no effect without --log-level debug; add it, or leave this out")
    checks.check_key("--admin-key", settings.admin_key)
    if not is_loopback_host(settings.host) and settings.weak_key:
        raise ConfigurationError(f"--host {settings.host} is reachable from other machines: {settings.weak_key}")
    checks.check_key("--metrics-key", settings.metrics_key)
    _check_lesser_key("--trainer-key", settings.trainer_key, settings.admin_key)
    _check_lesser_key("--reader-key", settings.reader_key, settings.admin_key)
    checks.check_proxies(settings.forwarded_allow_ips)
    checks.check_public_url(settings.public_url)
    checks.check_listed(
        "--allowed-hosts", settings.allowed_hosts, checks.HOST, "a host name without a port, or *.SUFFIX"
    )
    checks.check_listed(
        "--allowed-origins",
        settings.allowed_origins,
        checks.ORIGIN,
        "https://HOST[:PORT], https://*.SUFFIX or SCHEME://*",
    )
    checks.check_listed("--image-hosts", settings.image_hosts, checks.HOST, "a host name without a port, or *.SUFFIX")
    checks.check_listed("--model-hosts", settings.model_hosts, checks.HOST, "a host name without a port, or *.SUFFIX")
    if settings.image_hosts is not None and not settings.allow_image_urls:
        raise ConfigurationError("--image-hosts has no effect without --allow-image-urls; add it, or leave this out")
    if not read_rules(settings.keep_days, settings.keep) and settings.archive_to is not None:
        raise ConfigurationError("--archive-to has no effect without --keep-days or --keep; add one, or leave it out")
    checks.check_webhooks(settings.webhook, settings.webhook_secret)
    if settings.all_body_bytes < 2 * settings.max_body_bytes:
        raise ConfigurationError(
            f"--max-inflight-body-bytes {settings.all_body_bytes} must be at least twice --max-body-bytes "
            f"{settings.max_body_bytes}: one body of that length must always find room beside others"
        )
    if (settings.max_staleness is None) != (settings.batch_size is None):
        raise ConfigurationError("--max-staleness and --batch-size work only together: give both or neither")
    if settings.workers > 1:
        _check_workers(settings)
    if settings.admin_key is None:
        _check_open(settings)
    turn, context = settings.max_tokens_per_turn, settings.max_context_tokens
    if turn is not None and context is not None and turn > context:
        raise ConfigurationError(
            f"--max-tokens-per-turn {turn} is more than --max-context-tokens {context}, so it has no effect; lower it"
        )


def _check_lesser_key(flag: str, key: str | None, admin_key: str | None) -> None:
    """Raise ConfigurationError for a key that would permit more, or less, than its flag says."""
    checks.check_key(flag, key)
    if key is None:
        return
    if admin_key is None:
        raise ConfigurationError(f"{flag} needs --admin-key: without it, everybody may do everything")
    if not set(key.split(",")).isdisjoint(admin_key.split(",")):
        raise ConfigurationError(f"{flag} has a key of --admin-key, which permits everything; choose another")


def _check_agents(settings: Settings) -> None:
    """Raise ConfigurationError for settings of the listener for agents that contradict each other or have no effect."""
    address = settings.agent_address
    if address is None:
        for name in ("agent_host", "agent_max_body_bytes"):
            if getattr(settings, name) is not None:
                raise ConfigurationError(
                    f"{flag_of(name)} has no effect without --agent-port; add it, or leave this out"
                )
        return
    if settings.agent_host is not None:
        checks.check_host(settings.agent_host, "--agent-host", "--agent-port")
    if settings.admin_key is None:
        flag = "--expose" if settings.agent_port is None else "--agent-port"
        raise ConfigurationError(
            f"{flag} needs --admin-key (TOKENGROVE_ADMIN_KEY): without it, whoever reaches the server may use "
            "any session"
        )
    if settings.agent_port:
        for flag, other in (("--port", settings.port), ("--metrics-port", settings.metrics_port)):
            if other == settings.agent_port:
                raise ConfigurationError(f"--agent-port {other} is {flag}; choose another")
    if settings.expose is not None:
        checks.check_expose(settings.expose)
        if settings.public_url is not None:
            raise ConfigurationError("--expose finds the URL of sessions itself; leave --public-url out, or --expose")


def _check_open(settings: Settings) -> None:
    """Raise ConfigurationError for settings that have no effect on a server that takes any key or none."""
    for name in ("require_key", "key_lifetime_s"):
        if getattr(settings, name):
            raise ConfigurationError(
                f"{flag_of(name)} has no effect without --admin-key: the server then takes any key or none; "
                "set TOKENGROVE_ADMIN_KEY, or leave it out"
            )


def _check_workers(settings: Settings) -> None:
    """Raise ConfigurationError unless several processes can share the database and the engine."""
    if settings.models is not None:
        raise ConfigurationError(
            f"--workers {settings.workers} cannot share the models of --models yet; run several servers on one "
            "PostgreSQL database behind a load balancer instead"
        )
    if settings.database_url.startswith("sqlite"):
        raise ConfigurationError(
            f"--workers {settings.workers} cannot share a SQLite file, which one process locks; "
            "give a PostgreSQL database: --database-url postgresql://USER:PASSWORD@HOST/NAME"
        )
    if "//" not in settings.engine and settings.engine not in ("scripted", "mailbox"):
        raise ConfigurationError(
            f"--workers {settings.workers} cannot share --engine {settings.engine}, which belongs to one process; "
            "start engine servers and give their addresses: --engine http://HOST:PORT[,http://HOST:PORT...]"
        )
