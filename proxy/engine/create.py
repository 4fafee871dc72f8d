"""Create the engine that the settings name, and find the model folder.

Heavy packages (torch, transformers, sglang) are imported only for the engine that needs them.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from proxy.engine.arguments import check_known, parse_arguments, seconds
from proxy.engine.interface import Engine, EngineControl
from proxy.hub import check_weights, fetch_weights, folder_of, local, short_name
from proxy.progress import doing, step
from proxy.settings import Settings
from proxy.vision.model_config import is_vision_model, placeholder_ids
from tokengrove.errors import ConfigurationError, InvalidRequest, how_to_get
from tokengrove.options.start import Replay

if TYPE_CHECKING:
    from proxy.engine.expert_layers import ExpertLayers
    from proxy.engine.scripted.acting import Speech
    from proxy.engine.servers.examination import ServerFindings
    from proxy.engine.servers.remote import RemoteEngine
    from proxy.engine.servers.same_model import OwnModel
    from proxy.engine.servers.sent_images import Eyes

EngineMaker = Callable[[int, "Speech | None"], Engine]
"""Creates an engine from the vocabulary size of the tokenizer and the renderer.

A scripted agent needs the renderer, and engine servers are compared with its tokenizer.
"""

_SCRIPTED_CONTEXT = 131_072
_SERVERS_START_S = 120.0
_REMOTE_ARGUMENTS = ("kind", "start_timeout_s", "api_key", "admin_api_key", "check_model")
_ANY_VOCABULARY = 2**31 - 1
BUILTIN_NAME = "tokengrove-tiny"


def model_folder(settings: Settings) -> Path:
    """Return the model folder. Without `--model`, it is the built-in model's, built if missing. ConfigurationError."""
    if settings.model is None:
        from proxy.engine.tiny.model import builtin_model_folder

        return builtin_model_folder()
    folder = folder_of("model", settings.model)
    if not (folder / "config.json").is_file():
        raise ConfigurationError(f"--model {settings.model} has no config.json, so it is no Hugging Face model")
    return folder


def model_name(settings: Settings) -> str:
    """Return the model's name in `/v1/models`: `--served-model-name`, else its name on the hub or its folder's name."""
    source = settings.model or settings.tokenizer
    return settings.served_model_name or (short_name(source) if source else BUILTIN_NAME)


def tokenizer_folder(settings: Settings) -> Path:
    """Return the folder of `--tokenizer`, else the model's folder. Raises ConfigurationError."""
    return folder_of("tokenizer", settings.tokenizer) if settings.tokenizer else model_folder(settings)


def create_engine(settings: Settings, vocab_size: int, speech: Speech | None = None) -> Engine:
    """Create the engine that `--engine` names, without starting it. Raises ConfigurationError.

    The other parameters are those of EngineMaker.
    """
    return prepare_engine(settings)(vocab_size, speech)


def prepare_engine(settings: Settings) -> EngineMaker:
    """Check `--engine`, its arguments and its model, and return the function that creates the engine, not started.

    This loads and builds nothing, so that a wrong flag is rejected immediately. Raises ConfigurationError.
    """
    name = settings.engine
    if name == "sglang" or (name == "auto" and _has_gpu_engine()):
        if importlib.util.find_spec("sglang") is None:
            raise ConfigurationError(f"--engine sglang needs the package sglang: {how_to_get('tokengrove[sglang]')}")
        from proxy.engine.sglang.engine import SglangEngine
        from proxy.engine.sglang.option_names import option_names

        if (names := option_names()) is not None:
            given = (key.replace("-", "_") for key in parse_arguments(settings.engine_arg))
            check_known(given, names, "SGLang")
        _check_model(settings)
        return _with_weights(lambda: SglangEngine(settings, model_folder(settings)), settings)
    if name in ("auto", "transformers"):
        _require("the transformers engine", "transformers", "torch", "llguidance", "psutil")
        from proxy.engine.transformers.engine import TransformersEngine
        from proxy.engine.transformers.loading import parse_options

        parse_options(settings.engine_arg)
        _check_model(settings)
        check_weights(settings.model)
        return _with_weights(lambda: TransformersEngine(settings, model_folder(settings)), settings)
    if name == "scripted":
        from proxy.engine.scripted import arguments

        options = arguments.parse_options(parse_arguments(settings.engine_arg))
        return lambda vocab_size, speech: options.engine(vocab_size, _SCRIPTED_CONTEXT, speech)
    if name == "mailbox":
        from proxy.engine.mailbox import Mailbox

        check_known(parse_arguments(settings.engine_arg), (), "the mailbox")
        return lambda vocab_size, speech: Mailbox(vocab_size, settings.max_context_tokens or _SCRIPTED_CONTEXT)
    if "//" in name:
        return _prepare_pool(settings)
    if ":" in name:
        foreign = _third_party(name, local(settings))
        return lambda vocab_size, speech: foreign
    raise ConfigurationError(
        f"--engine {name} is unknown; give auto, sglang, transformers, scripted, mailbox, package.module:Class, or "
        "the URLs of engine servers (http://HOST:PORT, separated by commas)"
    )


def _check_model(settings: Settings) -> None:
    """Raise ConfigurationError unless there is a model to load. The built-in model is not built for this check."""
    if settings.model is not None:
        model_folder(settings)
    elif settings.tokenizer is not None:
        raise ConfigurationError(
            f"--tokenizer {settings.tokenizer} does not fit the built-in model, which has a vocabulary of its own; "
            "give --model too"
        )


def _with_weights(create: Callable[[], Engine], settings: Settings) -> EngineMaker:
    """Return a function that fetches the weights and creates the engine.

    Fetching takes long, so it happens only after the tokenizer has been checked.
    """

    def make(vocab_size: int, speech: Speech | None) -> Engine:
        fetch_weights(settings.model)
        return create()

    return make


def _has_gpu_engine() -> bool:
    if importlib.util.find_spec("sglang") is None or importlib.util.find_spec("torch") is None:
        return False
    with doing("importing torch, to see whether there is a GPU"):
        import torch

        return bool(torch.cuda.is_available())


def _prepare_pool(settings: Settings) -> EngineMaker:
    """Return the function that creates a pool of the servers that `--engine` names. Raises ConfigurationError."""
    from proxy.engine.servers.pool import Pool

    servers = _servers(settings)

    def make(vocab_size: int, speech: Speech | None) -> Engine:
        if settings.model is None and settings.tokenizer is None:
            step(f"without --model, prompts are encoded with the tokenizer of {_named(settings)}")
        return Pool(
            servers.urls,
            servers.opener(vocab_size, speech),
            start_timeout_s=servers.start_timeout_s,
            engine_timeout_s=settings.engine_timeout_s,
            replay=frozenset(map(Replay, settings.replay)),
        )

    return make


async def examine_engine(settings: Settings, speech: Speech | None) -> list[ServerFindings]:
    """Examine the servers that `--engine` names. `speech`: the renderer of the model to compare them with; None: none.

    Raises ConfigurationError for settings that no pool of servers accepts.
    """
    from proxy.engine.servers.examination import examine_servers

    servers = _servers(settings)
    opener = servers.opener(_ANY_VOCABULARY, speech)
    if speech is None:
        uncompared = "give --model or --tokenizer"
    elif servers.checks:
        uncompared = "it has no /tokenize that encodes texts"
    else:
        uncompared = "check_model=false"
    return await examine_servers(servers.urls, opener, _named(settings), uncompared)


@dataclass(frozen=True, slots=True)
class _Servers:
    """The servers that `--engine` names.

    `checks`: they are compared with the model. `opener`: connects to them; from the parameters of EngineMaker.
    """

    urls: list[str]
    start_timeout_s: float
    checks: bool
    opener: Callable[[int, Speech | None], Callable[[str], Awaitable[RemoteEngine]]]


def _servers(settings: Settings) -> _Servers:
    from proxy.engine.servers.connection import Keys, server_url
    from proxy.engine.servers.kinds import ServerKind, connect

    arguments = parse_arguments(settings.engine_arg)
    check_known(arguments, _REMOTE_ARGUMENTS, "an engine server")
    kind = arguments.get("kind")
    if kind is not None and kind not in list(ServerKind):
        raise ConfigurationError(f"--engine-arg kind={kind} must be one of {', '.join(ServerKind)}")
    start_timeout_s = seconds("start_timeout_s", arguments.get("start_timeout_s", str(_SERVERS_START_S)))
    if (checks := arguments.get("check_model", "true")) not in ("true", "false"):
        raise ConfigurationError(f"--engine-arg check_model={checks} must be true or false")
    try:
        urls = [server_url(url) for url in settings.engine.split(",") if url.strip()]
    except InvalidRequest as error:
        raise ConfigurationError(f"--engine: {error.message}") from None
    keys = Keys(arguments.get("api_key"), arguments.get("admin_api_key"))
    known, eyes, layers = _model_vocabulary(settings), _eyes(settings), _expert_layers(settings)

    def opener(vocab_size: int, speech: Speech | None) -> Callable[[str], Awaitable[RemoteEngine]]:
        return connect(
            known or vocab_size,
            ServerKind(kind) if kind else None,
            keys=keys,
            interval=settings.stream_interval,
            eyes=eyes,
            own=_own_model(settings, speech) if speech is not None and checks == "true" else None,
            layers=layers,
        )

    return _Servers(urls, start_timeout_s, checks == "true", opener)


def _own_model(settings: Settings, speech: Speech) -> OwnModel:
    """What engine servers are compared with."""
    from proxy.engine.servers.same_model import own_model

    folder = None if settings.model is None else folder_of("model", settings.model)
    return own_model(_named(settings), speech.encode, folder)


def _named(settings: Settings) -> str:
    """The flag that names the tokenizer, with its value."""
    if settings.tokenizer:
        return f"--tokenizer {settings.tokenizer}"
    return f"--model {settings.model}" if settings.model else f"the built-in model {BUILTIN_NAME}"


def _eyes(settings: Settings) -> Eyes | None:
    """The images that engine servers of a vision model need; None for other models.

    The folder of the tokenizer, which also renders images, determines this.
    """
    if settings.model is None and settings.tokenizer is None:
        return None
    folder = tokenizer_folder(settings)
    if not is_vision_model(folder):
        return None
    from proxy.engine.servers.sent_images import Eyes, SentImages

    return Eyes(SentImages(), placeholder_ids(folder))


def _expert_layers(settings: Settings) -> ExpertLayers | None:
    """The expert layers of the model that engine servers serve, if its config is here."""
    from proxy.engine.expert_layers import expert_layers

    return None if settings.model is None and settings.tokenizer is None else expert_layers(_config_folder(settings))


def _config_folder(settings: Settings) -> Path:
    return tokenizer_folder(settings) if settings.model is None else folder_of("model", settings.model)


def _model_vocabulary(settings: Settings) -> int | None:
    """The vocabulary size in the config of `--model`, if any. Servers do not report it, and may crash on larger ids."""
    path = None if settings.model is None else folder_of("model", settings.model) / "config.json"
    if path is None or not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return int(size) if size else None


def _require(what: str, *packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ConfigurationError(
                f"{what} needs the package {package}: {how_to_get('tokengrove[cpu]')} (on a GPU with SGLang: "
                "'tokengrove[sglang]'); --engine scripted, mailbox or the URLs of engine servers do without"
            )


def _third_party(name: str, settings: Settings) -> Engine:
    """Create a third-party engine as CLASS(settings). Raises ConfigurationError naming the methods that it lacks."""
    kind = _load_class(name)
    try:
        engine = kind(settings)
    except TypeError as error:
        raise ConfigurationError(f"--engine {name} cannot be created as CLASS(settings): {error}") from error
    members = [member for member in (*vars(Engine), *vars(EngineControl)) if not member.startswith("_")]
    if missing := [member for member in members if not callable(getattr(engine, member, None))]:
        raise ConfigurationError(
            f"--engine {name} does not implement proxy.engine.interface.Engine: it lacks {', '.join(missing)}"
        )
    return cast("Engine", engine)


def _load_class(name: str) -> Any:
    """Import `package.module:Class`, also from the current folder, as `python -m` does."""
    module_name, _, class_name = name.partition(":")
    if class_name.isdecimal():
        raise ConfigurationError(f"--engine {name} lacks the scheme of a server's URL: write http://{name}")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, SyntaxError, AttributeError) as error:
        raise ConfigurationError(f"--engine {name} cannot be loaded: {error}") from None
