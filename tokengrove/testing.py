"""Helpers for tests and examples without a separate server process: tiny models, and a server in this process.

Functions import the server (`proxy`), so this module can be imported without it.
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
    """Write a model with random weights, its tokenizer and chat template, in Hugging Face's format, to `folder`.

    Equal seeds give equal weights. It is the model that `tokengrove serve` serves without `--model`.
    """
    server_part("app").write_tiny_model(folder, seed)


def write_tiny_vision_model(folder: Path, seed: int = 0) -> None:
    """Write a vision model with random weights (Qwen2.5-VL), with its processor, to `folder`."""
    server_part("engine.tiny.vision").build_tiny_vision_model(folder, seed=seed)


def build_app(**settings: Any) -> App:
    """The server as an ASGI application, for `tokengrove.Client(app=...)`.

    `settings`: the settings of `tokengrove serve` by name (`max_body_bytes=1000`). Environment variables do not apply.
    Raises ConfigurationError, with the name of the setting.
    """
    app: App = server_part("app").build_app(_settings(settings))
    return app


@contextmanager
def serving(**settings: Any) -> Iterator[str]:
    """Serve in a thread of this process while the block runs; yields the URL. `settings`: as for `build_app`."""
    with server_part("serving.server").serving(_settings(settings)) as url:
        yield url


def _settings(given: dict[str, Any]) -> Any:
    values = server_part("settings.kinds").convert_named(
        {name: value for name, value in given.items() if value is not None}
    )
    return server_part("settings").Settings(**values)
