"""Which engine and which model folder the settings mean. Heavy packages are imported only for the engine chosen."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy.engine.base import Engine
from proxy.errors import ConfigurationError
from proxy.settings import Settings

if TYPE_CHECKING:
    from proxy.engine.acting import Speech

_SCRIPTED_CONTEXT = 131_072
BUILTIN_NAME = "tokengrove-tiny"


def model_folder(settings: Settings) -> Path:
    """The folder of the model; without `--model` the built-in one, made on the spot. Raises ConfigurationError."""
    if settings.model is None:
        _require("transformers", "torch")
        from proxy.engine.tiny_model import builtin_model_folder

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
    if name in ("auto", "transformers"):
        _require("transformers", "torch", "llguidance")
        from proxy.engine.transformers_engine import TransformersEngine

        return TransformersEngine(settings, model_folder(settings))
    if name == "scripted":
        from proxy.engine import scripted

        return scripted.from_arguments(engine_arguments(settings), vocab_size, _SCRIPTED_CONTEXT, speech)
    if ":" in name and "//" not in name:
        engine: Engine = _load_class(name)(settings)
        return engine
    raise ConfigurationError(
        f"--engine {name} is not one of auto, transformers, scripted, package.module:Class (sglang, servers by URL and "
        "mailbox are not here yet)"
    )


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


def _load_class(name: str) -> Any:
    module_name, _, class_name = name.partition(":")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"--engine {name} cannot be loaded: {error}") from None
