"""What tests and examples need of the server without a process of its own: tiny models, and a server in this process.

The server (`proxy`) is imported inside of functions: importing this module works without it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokengrove.server_part import server_part

App = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]
]
"""An ASGI 3 application."""


def write_tiny_model(folder: Path, seed: int = 0) -> None:
    """Write a model of random weights with its tokenizer and chat template, in the format of Hugging Face, to `folder`.

    Equal seeds give equal weights. The model is what `tokengrove serve` serves without `--model`.
    """
    server_part("app").write_tiny_model(folder, seed)


def write_tiny_vision_model(folder: Path, seed: int = 0) -> None:
    """Write a model of random weights that sees (Qwen2.5-VL), with its processor, to `folder`."""
    server_part("engine.tiny.vision").build_tiny_vision_model(folder, seed=seed)


def build_app(**settings: Any) -> App:
    """The server as an ASGI application, for `tokengrove.Client(app=...)`.

    `settings`: those of `tokengrove serve` by name (`max_body_bytes=1000`); variables do not apply. Raises
    ConfigurationError that names the setting.
    """
    app: App = server_part("app").build_app(_settings(settings))
    return app


@contextmanager
def serving(**settings: Any) -> Iterator[str]:
    """Serve in a thread of this process while the block runs; yields the URL. `settings`: as those of `build_app`."""
    with server_part("serving.server").serving(_settings(settings)) as url:
        yield url


def _settings(given: dict[str, Any]) -> Any:
    values = server_part("settings.kinds").convert_named(
        {name: value for name, value in given.items() if value is not None}
    )
    return server_part("settings").Settings(**values)
