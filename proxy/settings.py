"""One frozen `Settings`, read once. A flag wins over its TOKENGROVE_* variable, a variable over the default.

Each field below is a flag of `tokengrove serve`, a variable and a line of the README; a test proves that these agree.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from proxy.errors import ConfigurationError
from proxy.types import Credit


def _setting(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, slots=True)
class Settings:
    """How one server runs. Build with keyword arguments, or with `from_environment`."""

    host: str = _setting("127.0.0.1", "Address to listen on; beyond loopback an admin key is required.")
    port: int = _setting(8080, "Port to listen on; 0 takes a free one.")
    public_url: str | None = _setting(None, "URL under which agents reach this server, for base_url answers.")
    model: str | None = _setting(None, "Folder of a Hugging Face causal model; none: a tiny built-in random model.")
    tokenizer: str | None = _setting(None, "Folder of the tokenizer, where it is not the model's.")
    served_model_name: str | None = _setting(None, "Name that /v1/models shows; default: the folder's name.")
    engine: str = _setting(
        "auto", "auto, sglang, transformers, scripted, mailbox, package.module:Class, or URL[,URL...] of servers."
    )
    engine_arg: tuple[str, ...] = _setting((), "Option of the engine as key=value; may be given several times.")
    family: str | None = _setting(None, "Renderer family, where the model's own config does not tell it.")
    tool_parser: str | None = _setting(None, "Tool-call format, where it is not the family's own.")
    reasoning_parser: str | None = _setting(None, "Reasoning format, where it is not the family's own.")
    thinking_retention: str = _setting("all", "Reasoning of earlier turns: all (stays as sampled) or template.")
    database_url: str = _setting("sqlite:///tokengrove.db", "SQLAlchemy URL of the database.")
    migrate: bool | None = _setting(None, "Upgrade an older database at the start; default: SQLite files only.")
    admin_key: str | None = _setting(None, "Key of the administrator, or several with commas; needed beyond loopback.")
    rewards_by: str | None = _setting(None, "Who may reward: control or session; default: session when open.")
    require_key: bool = _setting(False, "Refuse the key-less capability path.")
    allow_chosen_keys: bool = _setting(False, "Let callers choose session keys beyond loopback.")
    key_lifetime_s: float | None = _setting(None, "How long a session's keys are good; none: as long as it lives.")
    forwarded_allow_ips: str | None = _setting(None, "Proxies whose X-Forwarded-* headers are believed, or *.")
    capacity_control: bool = _setting(False, "Let start_session take what /grant_capacity gave, else refuse: 429.")
    max_live_sessions: int | None = _setting(None, "Most sessions that live at once; further starts get 429.")
    session_idle_s: float | None = _setting(None, "Seal sessions as expired that are unused for so long; none: never.")
    max_staleness: int | None = _setting(None, "Start only sessions that will be at most so many versions old.")
    batch_size: int | None = _setting(None, "Sessions that the trainer takes a version; needed by --max-staleness.")
    max_turns_in_flight: int = _setting(4096, "Most turns that run at once; further ones get 429.")
    max_context_tokens: int | None = _setting(None, "Upper bound of prompt plus output, below the model's own.")
    max_tokens_per_turn: int | None = _setting(None, "Upper bound of sampled tokens in one turn.")
    max_body_bytes: int = _setting(64 * 1024 * 1024, "Longest request body.")
    engine_timeout_s: float = _setting(600.0, "Longest wait for the next token of the engine.")
    pause_timeout_s: float = _setting(120.0, "Longest wait of a request for a paused engine; then 503.")
    shutdown_timeout_s: float = _setting(30.0, "Longest wait for running generations at the end.")
    discount: float = _setting(1.0, "Discount of rewards through the tree, 0 to 1.")
    credit: Credit = _setting(Credit.TREE, "How rewards flow back: tree or linear.")
    log_level: str = _setting("info", "debug, info, warning or error.")

    def __post_init__(self) -> None:
        _check(self)

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def agents_may_reward(self) -> bool:
        """Whether a session's own key (or none, when open) may set rewards and end the session."""
        return (self.rewards_by or ("control" if self.admin_key else "session")) == "session"


VARIABLE_PREFIX = "TOKENGROVE_"
_POSITIVE = (
    *("max_context_tokens", "max_tokens_per_turn", "max_body_bytes", "engine_timeout_s", "key_lifetime_s"),
    *("max_live_sessions", "session_idle_s", "max_turns_in_flight", "batch_size"),
)


def from_environment(given: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Settings:
    """Settings from flags (None means not given) and variables. Raises ConfigurationError naming the bad one."""
    hints = get_type_hints(Settings)
    values: dict[str, Any] = {}
    for spec in fields(Settings):
        if given.get(spec.name) not in (None, ()):
            values[spec.name] = given[spec.name]
        elif (text := environ.get(VARIABLE_PREFIX + spec.name.upper())) is not None:
            values[spec.name] = _parse(spec.name, text, hints[spec.name])
    return Settings(**values)


def _parse(name: str, text: str, kind: Any) -> Any:
    try:
        if kind in (bool, bool | None):
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]
        if kind in (int, int | None):
            return int(text)
        if kind in (float, float | None):
            return float(text)
        if kind is Credit:
            return Credit(text)
        if kind == tuple[str, ...]:
            return tuple(part for part in text.split(";") if part)
    except (ValueError, KeyError):
        raise ConfigurationError(f"{VARIABLE_PREFIX}{name.upper()}={text!r} is not {_described(kind)}") from None
    return text


def _described(kind: Any) -> str:
    if kind in (bool, bool | None):
        return "true or false (1, true, yes, 0, false, no)"
    if kind is Credit:
        return " or ".join(Credit)
    return "an integer" if kind in (int, int | None) else "a number"


def _check(settings: Settings) -> None:
    """Raise ConfigurationError for the first setting that is not valid."""
    if not settings.loopback and not settings.admin_key:
        raise ConfigurationError(
            f"--host {settings.host} is reachable from other machines: set TOKENGROVE_ADMIN_KEY (or --admin-key), "
            "or listen on 127.0.0.1"
        )
    if not 0 <= settings.port <= 65535:
        raise ConfigurationError(f"--port {settings.port} is not between 0 and 65535")
    if not 0.0 <= settings.discount <= 1.0:
        raise ConfigurationError(f"--discount {settings.discount} is not between 0 and 1")
    _check_choice("--rewards-by", settings.rewards_by, ("control", "session", None))
    _check_choice("--thinking-retention", settings.thinking_retention, ("all", "template"))
    _check_choice("--log-level", settings.log_level, ("debug", "info", "warning", "error"))
    _check_admin_key(settings.admin_key)
    _check_proxies(settings.forwarded_allow_ips)
    for name in _POSITIVE:
        value = getattr(settings, name)
        if value is not None and value <= 0:
            raise ConfigurationError(f"--{name.replace('_', '-')} {value} is not positive; give a number above 0")
    for name in ("shutdown_timeout_s", "pause_timeout_s", "max_staleness"):
        if (getattr(settings, name) or 0) < 0:
            raise ConfigurationError(
                f"--{name.replace('_', '-')} {getattr(settings, name)} is negative; give 0 or more"
            )
    if (settings.max_staleness is None) != (settings.batch_size is None):
        raise ConfigurationError("--max-staleness and --batch-size work only together: give both or neither")
    if settings.tokenizer is not None and not Path(settings.tokenizer).is_dir():
        raise ConfigurationError(
            f"--tokenizer {settings.tokenizer} is not a folder; give one with a tokenizer.json or tokenizer_config.json"
        )


def _check_admin_key(key: str | None) -> None:
    if key is not None and not all(part.strip() == part and part for part in key.split(",")):
        raise ConfigurationError(
            "--admin-key is empty or has white space around a key; separate several keys by commas without spaces"
        )


def _check_proxies(text: str | None) -> None:
    for name in (text or "").split(","):
        try:
            if name.strip() not in ("", "*"):
                ipaddress.ip_network(name.strip(), strict=False)
        except ValueError:
            raise ConfigurationError(
                f"--forwarded-allow-ips {name.strip()!r} is not an IP address, a network such as 10.0.0.0/8, or *"
            ) from None


def _check_choice(flag: str, value: str | None, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{flag} {value} is not one of {', '.join(c for c in choices if c)}")
