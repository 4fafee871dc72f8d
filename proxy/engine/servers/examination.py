"""What engine servers are and can do, for `tokengrove doctor`: read as the pool reads it, with one token sampled."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from proxy.engine.interface import Capability
from proxy.engine.servers.proof import prove
from proxy.engine.servers.remote import RemoteEngine
from proxy.engine.servers.vllm_server import VllmServer
from tokengrove.errors import ProxyError

_WORDS = {
    Capability.GRAMMAR: "forced tools, JSON schemas and other formats",
    Capability.TOP_LOGPROBS: "logprobs of alternatives",
    Capability.PENALTIES: "penalties",
    Capability.LOGIT_BIAS: "logit_bias",
    Capability.MIN_TOKENS: "min_tokens",
    Capability.SEED: "seeds",
    Capability.DETERMINISTIC: "equal tokens for equal seeds",
    Capability.UPDATE_WEIGHTS: "weight updates",
    Capability.RELEASE_MEMORY: "release of memory",
    Capability.STREAMING: "streams",
    Capability.IMAGES: "images",
    Capability.ADAPTERS: "LoRA adapters",
    Capability.PROMPT_LOGPROBS: "logprobs of given tokens",
    Capability.PROMPT_TEMPERATURE: "logprobs of given tokens at other temperatures than 1",
}
_NOT_MISSED = {Capability.IMAGES, Capability.PROMPT_TEMPERATURE}
"""Capabilities whose lack is not named: images have a line of their own, and no server has the other."""

_LOGPROBS = {
    "processed_logprobs": "processed_logprobs: after temperature, penalties and bias (logprobs_of: rule; with top_p, "
    "top_k or min_p: sampled)",
    "raw_logprobs": "raw_logprobs: of temperature 1, before penalties and bias (logprobs_of: model; rule for requests "
    "that have none of these)",
}
_OF_SGLANG = "after temperature, penalties and bias (logprobs_of: rule)"


@dataclass(slots=True)
class ServerFindings:
    """The findings about one server.

    `problem`: the reason why the server cannot be used, else "". `facts`: texts by their names; none if it does not
    answer.
    """

    url: str
    problem: str = ""
    facts: dict[str, str | list[str]] = field(default_factory=dict)


async def examine_servers(
    urls: Sequence[str], connect: Callable[[str], Awaitable[RemoteEngine]], own: str, uncompared: str
) -> list[ServerFindings]:
    """Examine servers one after the other.

    `own`: the flag that names the model to compare with. `uncompared`: why a server may not have been compared.
    """
    return [await _examine(url, connect, (own, uncompared)) for url in urls]


async def _examine(
    url: str, connect: Callable[[str], Awaitable[RemoteEngine]], comparison: tuple[str, str]
) -> ServerFindings:
    found = ServerFindings(url)
    try:
        engine = await connect(url)
    except ProxyError as error:
        found.problem = error.message
        return found
    try:
        found.facts = _described(engine, *comparison)
        if await engine.rests():
            found.facts["paused"] = "yes; requests wait until it is continued"
            return found
        found.facts["paused"] = "no, as far as it tells"
        began = time.monotonic()
        samples = await prove(engine)
        found.facts["samples"] = f"a token in {time.monotonic() - began:.2f} s" if samples else "nothing while paused"
    except ProxyError as error:
        found.problem = error.message
    finally:
        await engine.close()
    return found


def _described(engine: RemoteEngine, own: str, uncompared: str) -> dict[str, str | list[str]]:
    info = engine.info()
    found: dict[str, str | list[str]] = {
        "engine": info.detail.removesuffix(f" at {engine.url}"),
        "model": info.model,
        "tokenizer": f"encodes texts as {own} does" if engine.compared else f"not compared: {uncompared}",
        "context": f"{info.context_length} tokens",
        "weights": f"version {info.weight_version}",
        "can": [_WORDS[each] for each in Capability if each in info.capabilities],
        "cannot": [_WORDS[each] for each in Capability if each not in info.capabilities | _NOT_MISSED],
        "missing": engine.missing,
        "logprobs": _LOGPROBS[engine.logprobs_mode] if isinstance(engine, VllmServer) else _OF_SGLANG,
    }
    if info.max_running_requests is not None:
        found["runs"] = f"{info.max_running_requests} requests at once"
    if engine.blind:
        found["images"] = f"refused: {engine.blind}"
    return found
