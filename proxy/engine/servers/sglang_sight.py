"""Images for an SGLang server: a prompt with one placeholder for each, and proof that the server keeps its ids.

SGLang turns the ids of a prompt with images into text and that into ids again, for its processor. Recent versions then
put the ids that they were sent in their place; others run on other ids than ours, though often on as many. So before
the first image, a server is asked for the ids that it made of a prompt that no tokenizer would write. SGLang also keeps
what its weights saw in an image, even when they change, so each weight version gets images of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import orjson

from proxy.engine.requests import GenerateRequest
from proxy.engine.servers.connection import ServerConnection, with_prompt
from proxy.engine.servers.sent_images import SentImages, SentPrompt, collapsed, salted
from proxy.prompt_ids import PromptIds
from proxy.types import Ids, PlacedImage, ids_of
from tokengrove.errors import EngineFailed, UnsupportedParameter

_FIELD = "prompt_token_ids"
ASKS = "return_prompt_token_ids"
"""The field of a request that makes the server say which ids it runs on. Each part of a stream says it again, so only
requests in large pieces have it."""

_ODD_TOKENS = 24
_BY_BYTES = ("qwen3_vl", "kimi_k3", "muse_spark")
"""Beginnings of `model_type` of those whose images SGLang knows by their bytes. It knows others by their pixels."""

_serials = itertools.count()


class SglangSight:
    """How one server gets images. `images`: shared by the servers of a pool. `facts`: what the server says of itself
    and its model."""

    def __init__(self, connection: ServerConnection, images: SentImages, facts: Mapping[str, Any]) -> None:
        self._connection, self._images = connection, images
        by_bytes = str(facts.get("model_type")).startswith(_BY_BYTES) or facts.get("mm_preprocess_cache_size_mb")
        self._by_pixels = not by_bytes
        self._proving = asyncio.Lock()
        self._proven = False
        self._refused = ""

    async def prompt(self, request: GenerateRequest, version: int, headers: Mapping[str, str]) -> SentPrompt:
        """Return the prompt and images of a request that has some, for weights of a version.

        Raises UnsupportedParameter, and what `generate` of the connection raises.
        """
        images = request.images
        assert images is not None
        urls = await self._images.urls(images)
        if not self._proven:
            async with self._proving:
                await self._prove(request.prompt, images.placed[0], urls[0], headers)
        after = _image_data(urls, str(version))
        if self._by_pixels:
            after.append(b',"mm_hashes":' + orjson.dumps([_hash(image, version) for image in images.placed]))
        return SentPrompt(collapsed(request.prompt, images.placed), after)

    async def _prove(self, prompt: PromptIds, image: PlacedImage, url: bytes, headers: Mapping[str, str]) -> None:
        """Have the server sample a token after odd ids and an image, and compare the ids that it ran on."""
        if self._refused:
            raise UnsupportedParameter(self._refused, param="messages")
        if self._proven:
            return
        ids, placed = _odd_prompt(prompt.joined, image)
        body = {
            "rid": f"proof_{next(_serials)}_{random.getrandbits(63):019d}",
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
            ASKS: True,
            "stream": False,
        }
        sent = with_prompt(body, "input_ids", SentPrompt(collapsed(PromptIds(ids), [placed]), _image_data([url], "")))
        answer = await self._connection.generate("/generate", sent, headers)
        told = answer.get(_FIELD) if isinstance(answer, dict) else None
        if told == ids.tolist():
            self._proven = True
            return
        why = (
            "it does not say which ids it runs on; a newer SGLang does"
            if not isinstance(told, list)
            else f"it ran on {len(told)} other ids than the {len(ids)} that it was sent; start it with "
            "SGLANG_MM_AVOID_RETOKENIZE=1, or a newer SGLang"
        )
        self._refused = f"the engine server {self._connection.url} cannot take images: {why}"
        raise UnsupportedParameter(self._refused, param="messages")


def check_ids(parts: Sequence[Any], prompt: PromptIds) -> None:
    """Raise EngineFailed if the server ran on other ids than ours, though on as many. `parts`: those that came now."""
    told = parts[-1].get(_FIELD) if isinstance(parts[-1], dict) else None
    if isinstance(told, list) and told != prompt.joined.tolist():
        raise EngineFailed(
            f"the engine ran on a prompt of {len(told)} other tokens, but was sent one of {len(prompt)} tokens"
        )


def _image_data(urls: Sequence[bytes], salt: str) -> list[bytes]:
    return [b',"image_data":[', *salted(urls, salt), b"]"]


def _hash(image: PlacedImage, version: int) -> str:
    """A name of 64 bits for what weights of a version see in an image."""
    return blake2b(f"{image.digest} {image.detail} {version}".encode(), digest_size=8).hexdigest()


def _odd_prompt(ids: Ids, image: PlacedImage) -> tuple[Ids, PlacedImage]:
    """Ids that no tokenizer would write, then an image between its neighbours, as it stands in `ids`."""
    chance = random.Random(0)
    ceiling = max(ids[image.start] // 2, 2)  # placeholders are among the last tokens of a vocabulary
    odd = ids_of([chance.randrange(ceiling // 16, ceiling) for _ in range(_ODD_TOKENS)])
    first = max(image.start - 1, 0)
    end = image.start + image.length
    return odd + ids[first : end + 1], image._replace(start=len(odd) + image.start - first)
