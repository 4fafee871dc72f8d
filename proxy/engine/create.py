"""Which engine and which model folder the settings mean. Heavy packages are imported only for the engine chosen."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from proxy.engine.interface import Engine
from proxy.errors import ConfigurationError, InvalidRequest
from proxy.settings import Settings

if TYPE_CHECKING:
    from proxy.engine.scripted.acting import Speech

_SCRIPTED_CONTEXT = 131_072
_SERVERS_START_S = 120.0
_REMOTE_ARGUMENTS = ("kind", "logprobs_mode", "start_timeout_s", "api_key", "admin_api_key")
BUILTIN_NAME = "tokengrove-tiny"


def model_folder(settings: Settings) -> Path:
    """The folder of the model; without `--model` the built-in one, made on the spot. Raises ConfigurationError."""
    if settings.model is None:
        _require("transformers", "torch")
        from proxy.engine.tiny.model import builtin_model_folder

        return builtin_model_folder()
    folder = Path(settings.model).expanduser()
    if not folder.is_dir():
        raise ConfigurationError(f"--model {settings.model} is not a folder; give a local Hugging Face model folder")
    if not (folder / "config.json").is_file():
        raise ConfigurationError(f"--model {settings.model} has no config.json; it is not a Hugging Face model folder")
    return folder


def model_name(settings: Settings) -> str:
    """The name that /v1/models shows."""
    if settings.served_model_name:
        return settings.served_model_name
    source = settings.model or settings.tokenizer
    return Path(source).expanduser().resolve().name if source else BUILTIN_NAME


def create_engine(settings: Settings, vocab_size: int, speech: Speech | None = None) -> Engine:
    """The engine that `--engine` names; not started yet. `speech`: the renderer, for a scripted engine that acts.

    Raises ConfigurationError.
    """
    name = settings.engine
    if name == "sglang" or (name == "auto" and _has_gpu_engine()):
        if importlib.util.find_spec("sglang") is None:
            raise ConfigurationError("--engine sglang needs the package sglang: pip install 'tokengrove[sglang]'")
        from proxy.engine.sglang.engine import SglangEngine

        return SglangEngine(settings, model_folder(settings))
    if name in ("auto", "transformers"):
        _require("transformers", "torch", "llguidance")
        from proxy.engine.transformers.engine import TransformersEngine

        return TransformersEngine(settings, model_folder(settings))
    if name == "scripted":
        from proxy.engine.scripted.arguments import from_arguments

        return from_arguments(engine_arguments(settings), vocab_size, _SCRIPTED_CONTEXT, speech)
    if name == "mailbox":
        from proxy.engine.mailbox import Mailbox

        if arguments := engine_arguments(settings):
            raise ConfigurationError(f"--engine-arg {min(arguments)}: the mailbox has none")
        return Mailbox(vocab_size, settings.max_context_tokens or _SCRIPTED_CONTEXT)
    if "//" in name:
        return _create_pool(settings, vocab_size)
    if ":" in name:
        return _third_party(name, settings)
    raise ConfigurationError(
        f"--engine {name} is not one of auto, sglang, transformers, scripted, mailbox, package.module:Class, and no "
        "URL of servers (http://HOST:PORT, several with commas)"
    )


def _has_gpu_engine() -> bool:
    if importlib.util.find_spec("sglang") is None or importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def _create_pool(settings: Settings, vocab_size: int) -> Engine:
    """The servers that `--engine` names, whatever they turn out to be. Raises ConfigurationError."""
    from proxy.engine.servers.connection import Keys, server_url
    from proxy.engine.servers.kinds import ServerKind, connect
    from proxy.engine.servers.pool import Pool

    arguments = engine_arguments(settings)
    for key in arguments:
        if key not in _REMOTE_ARGUMENTS:
            raise ConfigurationError(f"--engine-arg {key}: servers know {', '.join(_REMOTE_ARGUMENTS)}")
    kind, mode = arguments.get("kind"), arguments.get("logprobs_mode", "raw_logprobs")
    if kind is not None and kind not in list(ServerKind):
        raise ConfigurationError(f"--engine-arg kind={kind} is not one of {', '.join(ServerKind)}")
    if mode not in ("raw_logprobs", "processed_logprobs"):
        raise ConfigurationError(f"--engine-arg logprobs_mode={mode} is not one of raw_logprobs, processed_logprobs")
    try:
        start_timeout_s = float(arguments.get("start_timeout_s", _SERVERS_START_S))
    except ValueError:
        raise ConfigurationError("--engine-arg start_timeout_s is no number") from None
    try:
        urls = [server_url(url) for url in settings.engine.split(",") if url.strip()]
    except InvalidRequest as error:
        raise ConfigurationError(f"--engine: {error.message}") from None
    keys = Keys(arguments.get("api_key"), arguments.get("admin_api_key"))
    known = _model_vocabulary(settings) or vocab_size
    processed = mode == "processed_logprobs"
    opener = connect(known, ServerKind(kind) if kind else None, processed_logprobs=processed, keys=keys)
    return Pool(urls, opener, start_timeout_s=start_timeout_s)


def _model_vocabulary(settings: Settings) -> int | None:
    """The rows of the model's embedding, where `--model` has a config: servers do not tell, and may die of an id."""
    path = Path(settings.model or "") / "config.json"
    if settings.model is None or not path.is_file():
        return None
    config = json.loads(path.read_text(encoding="utf-8"))
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return int(size) if size else None


def engine_arguments(settings: Settings) -> dict[str, str]:
    """`--engine-arg key=value` as a dict. Raises ConfigurationError for one without `=`."""
    pairs = [argument.partition("=") for argument in settings.engine_arg]
    for key, mark, _ in pairs:
        if not mark or not key:
            raise ConfigurationError(f"--engine-arg {key} is not key=value")
    return {key: value for key, _, value in pairs}


def _require(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ConfigurationError(
                f"the transformers engine needs the package {package}: pip install 'tokengrove[cpu]' (on a GPU with "
                "SGLang: 'tokengrove[sglang]')"
            )


def _third_party(name: str, settings: Settings) -> Engine:
    """Somebody's own engine, made with the settings. Raises ConfigurationError that says what it lacks."""
    kind = _load_class(name)
    try:
        engine = kind(settings)
    except TypeError as error:
        raise ConfigurationError(f"--engine {name} cannot be made as CLASS(settings): {error}") from error
    members = [member for member in vars(Engine) if not member.startswith("_")]
    if missing := [member for member in members if not callable(getattr(engine, member, None))]:
        raise ConfigurationError(f"--engine {name} is no proxy.engine.interface.Engine: it lacks {', '.join(missing)}")
    return cast("Engine", engine)


def _load_class(name: str) -> Any:
    """`package.module:Class`, looked for in the current folder too, as with `python -m`."""
    module_name, _, class_name = name.partition(":")
    if class_name.isdecimal():
        raise ConfigurationError(f"--engine {name}: servers are named with their scheme, http://{name}")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, SyntaxError, AttributeError) as error:
        raise ConfigurationError(f"--engine {name} cannot be loaded: {error}") from None
