"""The check that an engine server serves the model of the proxy: the ids of a few texts, and the sizes in its config.

Ids of another tokenizer would be other words to the server, without an error. Only servers that encode texts at
`/tokenize` can be compared; newer SGLang and vLLM do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from proxy.engine.expert_layers import expert_layers
from proxy.engine.servers.connection import ServerConnection
from proxy.types import Ids
from tokengrove.errors import EngineUnavailable, ProxyError

_TEXTS = (
    "The quick brown fox doesn't jump.",
    "3.14159 and 2048",
    "def f(x):\n    return x != 0",
    "Grüße, Ελλάδα, мир",
    "你好世界 こんにちは שלום",
    "🙂🏳️",
)
"""None spells a special token: servers and libraries differ in whether they encode its text as the token."""

_LIMIT_S = 5.0
_MOST_IDS = 12
_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")


class OtherModel(EngineUnavailable):
    """The server serves another model than the proxy's, so it can never join."""


@dataclass(frozen=True, slots=True)
class OwnModel:
    """The model that servers are compared with.

    `named`: the flag that names it, with its value. `spelling`: texts with their ids. `sizes`: sizes in its config.
    `dense`: its config says that it has no experts.
    """

    named: str
    spelling: tuple[tuple[str, Ids], ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    dense: bool = False


def own_model(named: str, encode: Callable[[str], Ids], folder: Path | None) -> OwnModel:
    """The model with the tokenizer `encode`. `folder`: the folder of the model, if any. The rest as in OwnModel."""
    spelling = tuple((text, encode(text)) for text in _TEXTS)
    if folder is None:
        return OwnModel(named, spelling)
    layers = expert_layers(folder)
    return OwnModel(named, spelling, sizes_in(folder), layers is not None and layers.dense)


def sizes_in(folder: Path) -> dict[str, int]:
    """The sizes in the config of a model; empty if it cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    texts = config.get("text_config")
    found = {**(texts if isinstance(texts, Mapping) else {}), **config}
    return {name: found[name] for name in _SIZES if isinstance(found.get(name), int)}


async def is_same(connection: ServerConnection, own: OwnModel, names: Mapping[str, str], model: str, path: str) -> bool:
    """Return True if the server encodes texts as `own` does, False if it encodes none. Raises OtherModel.

    `names`: further fields of a request to encode. `model`: the name of the server's model. `path`: its folder in the
    file system of the server, which may also exist here.
    """
    theirs = sizes_in(Path(path)) if Path(path).is_absolute() else {}
    for size in own.sizes.keys() & theirs.keys():
        if own.sizes[size] != theirs[size]:
            _refuse(connection, own, model, f"has {size} {theirs[size]} in {path}", str(own.sizes[size]))
    for text, ids in own.spelling:
        told = await _encoded(connection, {**names, "prompt": text, "add_special_tokens": False})
        if told is None:
            return False
        if told != list(ids):
            _refuse(connection, own, model, f"encodes {text!r} as {_shown(told)}", f"as {_shown(list(ids))}")
    return True


def _refuse(connection: ServerConnection, own: OwnModel, model: str, theirs: str, ours: str) -> None:
    raise OtherModel(
        f"the server {connection.url} {theirs}, {own.named} {ours}: it serves another model ({model}); give --model "
        "that model, or --engine-arg check_model=false if it is the same one"
    )


async def _encoded(connection: ServerConnection, body: Mapping[str, Any]) -> list[int] | None:
    """The ids of a text at the server. None if it does not encode it, for whatever reason."""
    try:
        async with asyncio.timeout(_LIMIT_S):  # as a sampling request, since this needs no admin key
            answer = await connection.generate("/tokenize", [orjson.dumps(body)], {})
    except (ProxyError, TimeoutError):  # a server that is lost is noticed by the next call
        return None
    told = answer.get("tokens") if isinstance(answer, Mapping) else None
    return told if isinstance(told, list) and all(isinstance(token, int) for token in told) else None


def _shown(ids: list[int]) -> str:
    return str(ids) if len(ids) <= _MOST_IDS else f"[{', '.join(map(str, ids[:_MOST_IDS]))}, ...]"
