"""The settings of one server, read once at startup (`settings.sources`).

Each field of `Settings` is a flag of `tokengrove serve`, an environment variable, a key of the configuration file and a
documented line; a test compares them.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field, fields
from typing import Any

from proxy.settings import checks
from proxy.types import Credit
from tokengrove.errors import ConfigurationError


def _setting(default: Any, help_text: str, *, secret: bool = False) -> Any:
    """`secret`: the value is a key."""
    return field(default=default, metadata={"help": help_text, "secret": secret})


@dataclass(frozen=True, slots=True)
class Settings:
    """How one server runs. Build it with keyword arguments, or with `read_settings`. Raises ConfigurationError."""

    host: str = _setting("127.0.0.1", "Address to listen on. Addresses beyond loopback require --admin-key.")
    port: int = _setting(8080, "Port to listen on; 0 picks a free port.")
    workers: int = _setting(
        1, "Processes that serve the port as one server; more than 1 need PostgreSQL and engine servers."
    )
    public_url: str | None = _setting(
        None, "URL of this server for agents, used in base_url; none: the URL of the request."
    )
    model: str | None = _setting(
        None, "Hugging Face causal model: a local folder, or ORG/NAME[@REVISION] of the hub; none: a tiny random one."
    )
    tokenizer: str | None = _setting(None, "Tokenizer, named like a model; none: the model's.")
    served_model_name: str | None = _setting(None, "Model name in /v1/models; none: that on the hub, or of the folder.")
    engine: str = _setting(
        "auto",
        "auto (sglang with a GPU, else transformers), sglang, transformers, scripted, mailbox, package.module:Class, "
        "or URL[,URL...] of inference servers.",
    )
    engine_arg: tuple[str, ...] = _setting(
        (), "Engine option as key=value, repeatable (variable: separated by ;). SGLang takes its ServerArgs fields."
    )
    family: str | None = _setting(None, "Model family for rendering and parsing; none: from the model's config.json.")
    tool_parser: str | None = _setting(None, "Tool-call format; none: the family's.")
    reasoning_parser: str | None = _setting(None, "Reasoning format; none: the family's.")
    thinking_retention: str = _setting(
        "all", "Reasoning of earlier turns in the prompt: all (kept as sampled) or template (as the template does)."
    )
    database_url: str = _setting("sqlite:///tokengrove.db", "SQLAlchemy URL of the database.")
    migrate: bool | None = _setting(None, "Upgrade an older database schema at startup; none: for SQLite files only.")
    admin_key: str | None = _setting(
        None,
        "Administrator's key, or several separated by commas. Prefer the variable: flags are visible in ps.",
        secret=True,
    )
    metrics_key: str | None = _setting(
        None,
        "Key that /metrics needs, or several separated by commas; the admin key opens it too. None: it is open.",
        secret=True,
    )
    metrics_port: int | None = _setting(
        None, "Port of its own for /metrics, /health and /ready; /metrics is not on --port then. None: it is."
    )
    rewards_by: str | None = _setting(
        None, "Key that sets rewards: control or session; none: session without --admin-key, else control."
    )
    require_key: bool = _setting(False, "Refuse requests that have no key but the secret in the path of base_url.")
    allow_chosen_keys: bool = _setting(False, "Let callers choose session keys even beyond loopback.")
    key_lifetime_s: float | None = _setting(None, "Seconds until a session's keys expire; none: never.")
    forwarded_allow_ips: str | None = _setting(
        None, "Proxies whose X-Forwarded-* headers are trusted: addresses and networks separated by commas, or *."
    )
    allowed_hosts: str | None = _setting(
        None,
        "Names under which the server may be called besides loopback's and the public URL's: NAME or *.SUFFIX, "
        "separated by commas. Checked without --admin-key, or where it is given.",
    )
    allowed_origins: str | None = _setting(
        None,
        "Origins of web pages and webviews that may call the server: https://HOST, https://*.SUFFIX or SCHEME://*, "
        "separated by commas.",
    )
    page: bool = _setting(True, "Serve the page for people, at / (to browsers) and /ui.")
    capacity_control: bool = _setting(False, "Admit only starts granted by /rl/grant_capacity; further ones get 429.")
    max_live_sessions: int | None = _setting(None, "Limit of live sessions; further starts get 429.")
    session_idle_s: float | None = _setting(
        None, "Seconds without use until a session expires (its data stays); none: never."
    )
    max_staleness: int | None = _setting(
        None, "Start a session only if it will be at most this many weight versions old when trained; else 429."
    )
    batch_size: int | None = _setting(
        None, "Sessions that the trainer consumes per weight version; required by --max-staleness."
    )
    max_turns_in_flight: int = _setting(4096, "Limit of turns that run at once; further ones get 429.")
    shared_running_requests: int | None = _setting(
        None,
        "Choices that several senders generate at once before who has many waits in turn; none: as many as the engine "
        "runs, or 256.",
    )
    max_connections: int = _setting(
        8192, "Limit of client connections of a process; less if its limit of open files has no room for them."
    )
    strict_sampling: bool = _setting(
        False, "Refuse sampling fields that the engine takes only as best effort (a seed, if it is not deterministic)."
    )
    max_context_tokens: int | None = _setting(None, "Limit of prompt plus output tokens; none: the model's.")
    max_tokens_per_turn: int | None = _setting(None, "Limit of sampled tokens in one turn.")
    max_body_bytes: int = _setting(32 * 1024 * 1024, "Limit of a request body in bytes; longer ones get 413.")
    max_inflight_body_bytes: int | None = _setting(
        None, "Limit of the request bodies that are held at once, in bytes; none: eight times --max-body-bytes."
    )
    session_memory_bytes: int = _setting(
        512 * 1024 * 1024, "Memory of the sessions that stay loaded while turns run, in bytes; others are read again."
    )
    image_memory_bytes: int = _setting(
        256 * 1024 * 1024, "Memory of the images that were used last, in bytes; others are read from the database."
    )
    max_session_images: int = _setting(10_000, "Limit of the different images in one session.")
    max_session_image_bytes: int = _setting(
        1024 * 1024 * 1024, "Limit of the bytes of all images in one session; equal ones count once."
    )
    max_body_values: int = _setting(
        1_250_000, "Limit of the values in a request body; an array, an object or a key counts as 12."
    )
    max_request_images: int = _setting(
        1000, "Limit of the images of one request, those of its history included; more get 400."
    )
    max_image_bytes: int = _setting(20 * 1024 * 1024, "Limit of an image in bytes, as it is sent; larger ones get 400.")
    max_image_pixels: int = _setting(
        36_000_000, "Limit of an image's width times height, at most 89000000; checked before it is decoded."
    )
    allow_image_urls: bool = _setting(
        False, "Fetch images that a request names by http(s) URL; otherwise they get 400. Data URLs need no permission."
    )
    image_hosts: str | None = _setting(
        None,
        "Hosts that images are fetched from: NAME or *.SUFFIX, separated by commas; a NAME may have a private address. "
        "None: all public hosts.",
    )
    image_url_timeout_s: float = _setting(10.0, "Seconds that fetching an image may take; then 400.")
    engine_timeout_s: float = _setting(600.0, "Seconds to wait for the engine's next token; then 504.")
    stream_interval: int | None = _setting(
        None, "Tokens that SGLang sends in one part of a stream; none: 1, and up to 3 while many streams run."
    )
    pause_timeout_s: float = _setting(
        120.0, "Seconds that a request waits for a paused engine, or for a server; then 503."
    )
    database_wait_s: float = _setting(
        60.0, "Seconds that turns and control calls wait for a database that is away; then 503. 0: not at all."
    )
    shutdown_timeout_s: float = _setting(30.0, "Seconds that running turns may take to finish at shutdown.")
    discount: float = _setting(1.0, "Discount per step of rewards that flow back to earlier turns, 0 to 1.")
    credit: Credit = _setting(Credit.TREE, "How rewards flow back: tree (to ancestors) or linear (to earlier turns).")
    log_level: str = _setting("info", "debug, info, warning or error.")
    log_format: str = _setting("pretty", "pretty (for people) or json (one object a line).")
    log_content: bool = _setting(
        False, "Log the beginning of each turn's new messages and answer, with --log-level debug."
    )

    def __post_init__(self) -> None:
        _check(self)

    @property
    def loopback(self) -> bool:
        """True if only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def weak_key(self) -> str | None:
        """What is said of an admin key that can be guessed; None without such a key."""
        if self.admin_key is None or all(len(key) >= _KEY_LENGTH for key in self.admin_key.split(",")):
            return None
        return (
            f"--admin-key has a key of fewer than {_KEY_LENGTH} characters, which can be guessed; make one with "
            "`openssl rand -hex 32`"
        )

    @property
    def all_body_bytes(self) -> int:
        """How many bytes of request bodies one process holds at once."""
        return self.max_inflight_body_bytes or 8 * self.max_body_bytes

    @property
    def agents_may_reward(self) -> bool:
        """True if the agent's key (on an open server: anybody) may set rewards and end its session."""
        return (self.rewards_by or ("control" if self.admin_key else "session")) == "session"


_KEY_LENGTH = 16
# Above it Pillow takes an image for a decompression bomb.
_MOST_PIXELS = 89_000_000
_POSITIVE = (
    *("max_context_tokens", "max_tokens_per_turn", "max_body_bytes", "engine_timeout_s", "key_lifetime_s"),
    *(
        "max_live_sessions",
        "session_idle_s",
        "max_turns_in_flight",
        "shared_running_requests",
        "batch_size",
        "stream_interval",
        "workers",
    ),
    *("max_inflight_body_bytes", "max_body_values", "session_memory_bytes", "image_memory_bytes", "max_connections"),
    *("max_session_images", "max_session_image_bytes"),
    *("max_request_images", "max_image_bytes", "max_image_pixels", "image_url_timeout_s"),
)


def _check(settings: Settings) -> None:
    """Raise ConfigurationError for the first setting that is not valid."""
    for spec in fields(settings):
        value = getattr(settings, spec.name)
        if isinstance(value, str):
            checks.check_text(_flag(spec.name), value)
        elif isinstance(value, float):
            checks.check_finite(_flag(spec.name), value)
    checks.check_host(settings.host)
    if not settings.loopback and not settings.admin_key:
        raise ConfigurationError(
            f"--host {settings.host} is reachable from other machines: set TOKENGROVE_ADMIN_KEY (or --admin-key), "
            "or listen on 127.0.0.1"
        )
    if not 0 <= settings.port <= 65535:
        raise ConfigurationError(f"--port {settings.port} must be between 0 and 65535")
    if settings.metrics_port is not None and not 1 <= settings.metrics_port <= 65535:
        raise ConfigurationError(f"--metrics-port {settings.metrics_port} must be between 1 and 65535")
    if settings.metrics_port == settings.port:
        raise ConfigurationError(f"--metrics-port {settings.port} is --port; choose another, or leave it out")
    if not 0.0 <= settings.discount <= 1.0:
        raise ConfigurationError(f"--discount {settings.discount} must be between 0 and 1")
    checks.check_choice("--rewards-by", settings.rewards_by, ("control", "session", None))
    checks.check_choice("--thinking-retention", settings.thinking_retention, ("all", "template"))
    checks.check_choice("--log-level", settings.log_level, ("debug", "info", "warning", "error"))
    checks.check_choice("--log-format", settings.log_format, ("pretty", "json"))
    if settings.log_content and settings.log_level != "debug":
        raise ConfigurationError("--log-content has no effect without --log-level debug; add it, or leave this out")
    checks.check_key("--admin-key", settings.admin_key)
    if not settings.loopback and settings.weak_key:
        raise ConfigurationError(f"--host {settings.host} is reachable from other machines: {settings.weak_key}")
    checks.check_key("--metrics-key", settings.metrics_key)
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
    if settings.image_hosts is not None and not settings.allow_image_urls:
        raise ConfigurationError("--image-hosts has no effect without --allow-image-urls; add it, or leave this out")
    if settings.max_image_pixels > _MOST_PIXELS:
        raise ConfigurationError(
            f"--max-image-pixels {settings.max_image_pixels} must be at most {_MOST_PIXELS}: no larger image is decoded"
        )
    for name in _POSITIVE:
        value = getattr(settings, name)
        if value is not None and value <= 0:
            raise ConfigurationError(f"{_flag(name)} {value} is not positive; give a number above 0")
    for name in ("shutdown_timeout_s", "pause_timeout_s", "database_wait_s", "max_staleness"):
        if (getattr(settings, name) or 0) < 0:
            raise ConfigurationError(f"{_flag(name)} {getattr(settings, name)} is negative; give 0 or more")
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


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_open(settings: Settings) -> None:
    """Raise ConfigurationError for what has no effect on a server that takes any key or none."""
    for name in ("require_key", "key_lifetime_s"):
        if getattr(settings, name):
            raise ConfigurationError(
                f"{_flag(name)} has no effect without --admin-key: the server then takes any key or none; "
                "set TOKENGROVE_ADMIN_KEY, or leave it out"
            )


def _check_workers(settings: Settings) -> None:
    """Raise ConfigurationError unless several processes can share the database and the engine."""
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
