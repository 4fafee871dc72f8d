"""Images for a vLLM server over `/inference/v1/generate`: ids in, with one placeholder for each image, and ids out.

This is vLLM's only endpoint that takes both ids and images, in recent versions only. These versions also return the ids
that they run on, which are compared with ours in every turn. `/v1/completions` takes no images, and chat completions
render the messages again. Written to vLLM's sources and tested against a simulated server, not against vLLM.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

from proxy.engine.chunks import TokenChunk
from proxy.engine.requests import GenerateRequest
from proxy.engine.servers.connection import ServerConnection, with_prompt
from proxy.engine.servers.sent_images import SentImages, SentPrompt, collapsed, salted
from proxy.prompt_ids import PromptIds
from proxy.types import ids_of
from tokengrove.errors import EngineFailed, EngineLost, ProxyError
from tokengrove.reasons import FinishReason

PATH = "/inference/v1/generate"
_FIELDS = {"token_ids", "content_parts", "return_token_ids", "sampling_params"}
_FIELD = "prompt_token_ids"
_ID_MARK = "token_id:"
_MINUS_INFINITY = -9999.0
_PART = b'{"type":"image_url","url":'
_OF_SAMPLING = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "stop_token_ids", "ignore_eos", "skip_special_tokens", "logit_bias", "seed", "min_tokens"),
)
_SIDE = 56
"""The side in pixels of the blank image that tests whether a server's model takes images."""


async def blindness(connection: ServerConnection, model: str) -> str:
    """Return the reason why a server takes no images for its model; "" if it does. Raises EngineLost."""
    described = await connection.probe("/openapi.json")
    if described is None:
        return "it has no /openapi.json, which tells whether it takes images; start it without --disable-fastapi-docs"
    schemas = (described.get("components") or {}).get("schemas") or {}
    if PATH not in (described.get("paths") or {}) or not any(
        set(schema.get("properties") or ()) >= _FIELDS for schema in schemas.values()
    ):
        return f"its {PATH} does not take ids together with images ('content_parts'); a newer vLLM does"
    url = f"data:image/png;base64,{b64encode(_blank_png()).decode()}"
    asked = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    try:
        await connection.call("/tokenize", {"model": model, "messages": [asked]})
    except EngineLost:
        raise
    except ProxyError as error:
        return f"it does not encode an image for its model ({error.message})"
    return ""


async def sent(images: SentImages, request: GenerateRequest, completion: Mapping[str, Any]) -> list[bytes]:
    """Return the body of a request with images, in parts. `completion`: its body for `/v1/completions`."""
    assert request.images is not None
    urls = await images.urls(request.images)
    sampling = {name: completion[name] for name in _OF_SAMPLING if name in completion}
    body = {
        "model": completion["model"],
        "sampling_params": {**sampling, "logprobs": max(request.top_logprobs, 1), "detokenize": False},
        "return_token_ids": True,
        "stream": True,
    }
    after = [b',"content_parts":[', *salted(urls, before=_PART, after=b"}"), b"]"]
    return with_prompt(body, "token_ids", SentPrompt(collapsed(request.prompt, request.images.placed), after))


def malformed(error: Exception) -> EngineFailed:
    """The exception for a malformed event. `error`: the exception of reading it."""
    plain = "the engine's answer does not have vLLM's form"
    return EngineFailed(f"{plain}: {type(error).__name__}: {error}").showing(plain)


class SeenReply:
    """Reads the events of a reply. The first event with a choice must have the ids that the server runs on."""

    def __init__(self, prompt: PromptIds, top: int) -> None:
        self._prompt, self._top = prompt, top
        self._checked = False

    def chunks(self, event: Mapping[str, Any]) -> list[TokenChunk]:
        """The chunk of an event, or none without tokens and finish reason. Raises EngineFailed."""
        try:
            if not self._checked and event.get("choices"):
                self._check(event.get(_FIELD))
            return [chunk for choice in event.get("choices") or () for chunk in self._chunk(choice)]
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise malformed(error) from None

    def _check(self, told: Any) -> None:
        ours = self._prompt
        if not isinstance(told, list):
            raise EngineFailed("the engine does not say which ids it runs on; a newer vLLM does")
        if told != ours.joined.tolist():
            raise EngineFailed(
                f"the engine ran on a prompt of {len(told)} tokens, but was sent {len(ours)}: its processor is not ours"
                if len(told) != len(ours)
                else f"the engine ran on a prompt of {len(told)} other tokens than it was sent"
            )
        self._checked = True

    def _chunk(self, choice: Mapping[str, Any]) -> list[TokenChunk]:
        ids, told = choice.get("token_ids") or [], (choice.get("logprobs") or {}).get("content") or []
        if [_token(entry) for entry in told] != ids:
            raise EngineFailed(f"the engine gave {len(told)} logprobs for {len(ids)} tokens, or those of others")
        logprobs = [entry["logprob"] for entry in told]
        if logprobs and min(logprobs) <= _MINUS_INFINITY:
            raise EngineFailed("the engine gave a token the probability 0")
        reason = choice.get("finish_reason")
        if not ids and reason is None:
            return []
        finish = None if reason is None else FinishReason(reason)
        tops = [_ranked(entry, self._top) for entry in told] if self._top else []
        return [TokenChunk(ids_of(ids), array("f", logprobs), 0, finish, tuple(tops))]


def _token(entry: Mapping[str, Any]) -> int:
    """The id of a token: a number in recent versions, `token_id:N` in older ones."""
    return int(entry["token_id"] if "token_id" in entry else entry["token"].removeprefix(_ID_MARK))


def _ranked(entry: Mapping[str, Any], top: int) -> tuple[tuple[int, float], ...]:
    pairs = [(_token(other), float(other["logprob"])) for other in entry.get("top_logprobs") or ()]
    return tuple(sorted(pairs, key=lambda pair: -pair[1])[:top])


def _blank_png() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress((b"\0" + b"\xff" * 3 * _SIDE) * _SIDE)
    head = struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
