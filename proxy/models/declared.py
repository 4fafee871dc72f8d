"""The declared models of a server: the tables `[models.NAME]`, read and checked before anything is loaded."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import orjson

from proxy.settings import Settings
from proxy.settings.kinds import convert_named, did_you_mean
from tokengrove.errors import ConfigurationError
from tokengrove.options.model import ModelOptions, RouteKind, UpstreamApi
from tokengrove.options.option import options_of
from tokengrove.options.values import read_value

ENGINE_SETTINGS = (
    *("engine", "engine_arg", "model", "tokenizer", "served_model_name", "family", "tool_parser", "reasoning_parser"),
    *("thinking_retention", "max_context_tokens", "max_tokens_per_turn", "engine_timeout_s", "stream_interval"),
)
"""The settings of a server that a table may set for an engine of its own."""
_OPTIONS = options_of(ModelOptions)
_OF_UPSTREAM = ("url", "api", "upstream_model", "key", "key_variable", "timeout_s")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,199}")


class Upstream(NamedTuple):
    """An external API. `url`: up to and including `/v1`. `model`: the `model` of requests to it. `key`: None: none."""

    url: str
    api: UpstreamApi
    model: str
    key: str | None
    timeout_s: float

    def __repr__(self) -> str:
        return f"Upstream({self.url}, {self.api}, {self.model})"  # the key is in no log


@dataclass(frozen=True, slots=True)
class DeclaredModel:
    """A table of models.

    `own`: the settings of an engine of its own; empty: the server's engine, or an external API. `upstream`: that API.
    `lora`: it serves adapters only. `restricted`: only sessions that name it at their start may use it. `max_turns`,
    `max_total_tokens`: limits of a session on this route.
    """

    name: str
    kind: RouteKind = RouteKind.POLICY
    own: tuple[tuple[str, Any], ...] = ()
    upstream: Upstream | None = None
    lora: bool = False
    restricted: bool = False
    max_turns: int | None = None
    max_total_tokens: int | None = None

    @property
    def of_server(self) -> bool:
        """Whether the server's own engine serves it."""
        return self.upstream is None and not self.own

    def settings(self, server: Settings) -> Settings:
        """The settings of its engine: the server's, with its own."""
        own = dict(self.own)
        if "model" in own and "tokenizer" not in own:
            own["tokenizer"] = None
        if "engine" in own and "engine_arg" not in own:
            own["engine_arg"] = ()
        return replace(server, models=None, **own) if own else server


def read_models(text: str | None, environ: Mapping[str, str] | None = None) -> tuple[DeclaredModel, ...]:
    """The declared models of `--models`: a TOML file, or a JSON object; () for None. Raises ConfigurationError."""
    if text is None:
        return ()
    environ = os.environ if environ is None else environ
    models = tuple(read_model(name, table, environ) for name, table in _tables(text).items())
    _check_together(models)
    return models


def _tables(text: str) -> Mapping[str, Any]:
    if text.lstrip().startswith("{"):
        try:
            tables = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise ConfigurationError(f"--models is not JSON: {error}") from None
    else:
        path = Path(text)
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"--models {path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ConfigurationError(f"--models {path} is not TOML: {error}") from None
        tables = tables.get("models", tables)
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigurationError("--models must have a table for each name, such as [models.policy]")
    if not tables:
        raise ConfigurationError("--models has no table; declare at least [models.policy]")
    return tables


def read_model(name: str, table: Mapping[str, Any], environ: Mapping[str, str]) -> DeclaredModel:
    """A declared model from its table. Raises ConfigurationError naming the key."""
    place = f"models.{name}."
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"models.{name}: a name has letters, digits and . _ : / - only, and at most 200")
    for key in table:
        if key not in _OPTIONS and key not in ENGINE_SETTINGS:
            known = (*_OPTIONS, *ENGINE_SETTINGS)
            raise ConfigurationError(f"{place}{key} is no option of a model{did_you_mean(key, known)}")
    values = {key: _value(place, key, value) for key, value in table.items() if key in _OPTIONS}
    options = ModelOptions(**values)
    own = convert_named({key: value for key, value in table.items() if key not in _OPTIONS}, place)
    upstream = None
    if options.kind is RouteKind.EXTERNAL:
        if own or options.lora:
            raise ConfigurationError(
                f"{place}{next(iter(own), 'lora')} is an option of engines, and {name} is external"
            )
        upstream = _upstream(place, name, options, environ)
    elif given := [key for key in _OF_UPSTREAM if key in table]:
        raise ConfigurationError(f'{place}{given[0]} is an option of external models; set kind = "external"')
    elif own and not own.keys() & {"engine", "model"}:
        raise ConfigurationError(
            f"{place}{next(iter(own))} is an option of an engine of its own: give `engine` or `model` too, or set "
            f"--{next(iter(own)).replace('_', '-')} for the server's own engine"
        )
    if options.kind is RouteKind.FROZEN:
        if options.lora:
            raise ConfigurationError(f"{place}lora: a frozen model gets no adapters; name its folder as `model`")
        if not own:
            raise ConfigurationError(
                f"models.{name} is frozen, so it needs an engine of its own: give `engine` or `model`"
            )
    return DeclaredModel(
        name,
        options.kind,
        tuple(own.items()),
        upstream,
        options.lora,
        options.restricted,
        options.max_turns,
        options.max_total_tokens,
    )


def _value(place: str, key: str, value: Any) -> Any:
    try:
        found = read_value(_OPTIONS[key], value)
    except ValueError as error:
        raise ConfigurationError(f"{place}{key} must be {error}") from None
    if (fault := _OPTIONS[key].fault(found)) is not None:
        raise ConfigurationError(f"{place}{key} {fault}")
    return found


def _upstream(place: str, name: str, options: ModelOptions, environ: Mapping[str, str]) -> Upstream:
    if options.url is None:
        raise ConfigurationError(f"{place}url is missing: an external model needs the URL of its API")
    try:
        parts = urlsplit(options.url)
        port = parts.port
    except ValueError:
        raise ConfigurationError(f"{place}url is no valid URL") from None
    if port == 0 or " " in options.url or not options.url.isprintable():
        raise ConfigurationError(f"{place}url is no valid URL")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(f"{place}url must begin with http:// or https:// and name a host")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigurationError(f"{place}url must have no user, password, query or fragment; give `key_variable`")
    key = options.key
    if options.key_variable is not None:
        if key is not None:
            raise ConfigurationError(f"{place}key and key_variable are both given; keep one")
        if not (key := environ.get(options.key_variable)):
            raise ConfigurationError(f"{place}key_variable: the variable {options.key_variable} is not set")
    return Upstream(
        options.url.rstrip("/"),
        options.api or UpstreamApi.CHAT,
        options.upstream_model or name,
        key,
        options.timeout_s,
    )


def engine_urls(engine: str) -> frozenset[str]:
    """The URLs of engine servers in a value of `--engine`."""
    return frozenset(url.strip().rstrip("/") for url in engine.split(",") if "//" in url)


def check_engines(models: Sequence[DeclaredModel], settings: Settings) -> None:
    """Raise ConfigurationError if two models are served by one engine server: its weights are those of one of them."""
    seen = dict.fromkeys(engine_urls(settings.engine), "--engine")
    for each in models:
        if each.of_server or each.upstream is not None:
            continue
        if "engine" not in dict(each.own) and engine_urls(settings.engine):
            raise ConfigurationError(
                f"models.{each.name} names no `engine`, and the server's own is engine servers, which serve another "
                "model: give `engine`"
            )
        for url in sorted(engine_urls(each.settings(settings).engine)):
            if url in seen:
                raise ConfigurationError(
                    f"models.{each.name}.engine names a server that {seen[url]} has too ({url}); give each its own"
                )
            seen[url] = f"models.{each.name}"


def _check_together(models: tuple[DeclaredModel, ...]) -> None:
    served = [each.name for each in models if each.of_server]
    if len(served) != 1:
        told = f", not {', '.join(served)}" if served else ""
        raise ConfigurationError(
            "--models: exactly one table is served by the server's own engine (--engine, --model): a policy without "
            f"`engine` and `model`{told}"
        )
