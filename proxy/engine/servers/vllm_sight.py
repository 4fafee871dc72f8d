"""Images for a vLLM server over `/inference/v1/generate`: ids in, with one placeholder for each image, and ids out.

This is vLLM's only endpoint that takes both ids and images, in recent versions only. These versions also return the ids
that they run on, which are compared with ours in every turn. `/v1/completions` takes no images, and chat completions
render the messages again.
"""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode

from proxy.engine.requests import GenerateRequest
from proxy.engine.servers.connection import ServerConnection
from proxy.engine.servers.sent_images import SentImages, SentPrompt, collapsed, salted
from proxy.engine.servers.vllm_wire import GENERATE
from tokengrove.errors import EngineLost, ProxyError

_FIELDS = {"token_ids", "content_parts", "return_token_ids", "sampling_params"}
_PART = b'{"type":"image_url","url":'
_SIDE = 56
"""The side in pixels of the blank image that tests whether a server's model takes images."""


async def blindness(connection: ServerConnection, model: str) -> str:
    """Return the reason why a server takes no images for its model; "" if it does. Raises EngineLost."""
    described = await connection.probe("/openapi.json")
    if described is None:
        return "it has no /openapi.json, which tells whether it takes images; start it without --disable-fastapi-docs"
    schemas = (described.get("components") or {}).get("schemas") or {}
    if GENERATE not in (described.get("paths") or {}) or not any(
        set(schema.get("properties") or ()) >= _FIELDS for schema in schemas.values()
    ):
        return f"its {GENERATE} does not take ids together with images ('content_parts'); a newer vLLM does"
    url = f"data:image/png;base64,{b64encode(_blank_png()).decode()}"
    asked = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    try:
        await connection.call("/tokenize", {"model": model, "messages": [asked]})
    except EngineLost:
        raise
    except ProxyError as error:
        return f"it does not encode an image for its model ({error.message})"
    return ""


async def sent_prompt(images: SentImages, request: GenerateRequest) -> SentPrompt:
    """Return the prompt of a request with its images. Raises InvalidRequest for an image that is not found."""
    assert request.images is not None
    urls = await images.urls(request.images)
    after = [b',"content_parts":[', *salted(urls, before=_PART, after=b"}"), b"]"]
    return SentPrompt(collapsed(request.prompt, request.images.placed), after)


def _blank_png() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress((b"\0" + b"\xff" * 3 * _SIDE) * _SIDE)
    head = struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
