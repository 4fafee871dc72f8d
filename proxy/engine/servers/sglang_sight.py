"""Images for an SGLang server: prompts with one placeholder per image, and proof that the server keeps the ids.

SGLang decodes the ids of a prompt with images into text for its processor, and encodes the text again. Recent versions
then restore the ids that they were sent; other versions run on different ids than ours, though often as many. So before
the first image, a server is asked for the ids of a prompt that no tokenizer would produce. SGLang also caches the
features of an image even when the weights change, so each weight version gets its own images.
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
"""The field of a request that makes the server return the ids that it runs on. Each part of a stream repeats them, so
only requests in large pieces have this field."""

_ODD_TOKENS = 24
_BY_BYTES = ("qwen3_vl", "kimi_k3", "muse_spark")
"""Prefixes of the `model_type` of models whose images SGLang identifies by bytes. It identifies others by pixels."""

_serials = itertools.count()


class SglangSight:
    """Sends images to one server. `images`: shared by the servers of a pool. `facts`: the facts that the server reports
    about itself and its model."""

    def __init__(self, connection: ServerConnection, images: SentImages, facts: Mapping[str, Any]) -> None:
        self._connection, self._images = connection, images
        by_bytes = str(facts.get("model_type")).startswith(_BY_BYTES) or facts.get("mm_preprocess_cache_size_mb")
        self._by_pixels = not by_bytes
        self._proving = asyncio.Lock()
        self._proven = False
        self._refused = ""

    async def prompt(self, request: GenerateRequest, version: int, headers: Mapping[str, str]) -> SentPrompt:
        """Return the prompt and images of a request with images, for the weights of `version`.

        Raises UnsupportedParameter, and the errors of the connection's `generate`.
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
        """Make the server sample a token after odd ids and an image, and compare the ids that it ran on."""
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
    """Raise EngineFailed if the server ran on other ids than ours. `parts`: the parts that arrived together."""
    told = parts[-1].get(_FIELD) if isinstance(parts[-1], dict) else None
    if isinstance(told, list) and told != prompt.joined.tolist():
        raise EngineFailed(
            f"the engine ran on a prompt of {len(told)} other tokens, but was sent one of {len(prompt)} tokens"
        )


def _image_data(urls: Sequence[bytes], salt: str) -> list[bytes]:
    return [b',"image_data":[', *salted(urls, salt), b"]"]


def _hash(image: PlacedImage, version: int) -> str:
    """A 64-bit hash of an image for the weights of a version."""
    return blake2b(f"{image.digest} {image.detail} {version}".encode(), digest_size=8).hexdigest()


def _odd_prompt(ids: Ids, image: PlacedImage) -> tuple[Ids, PlacedImage]:
    """Ids that no tokenizer would produce, followed by an image of `ids` with its neighbouring tokens."""
    chance = random.Random(0)
    ceiling = max(ids[image.start] // 2, 2)  # placeholders are among the last tokens of a vocabulary
    odd = ids_of([chance.randrange(ceiling // 16, ceiling) for _ in range(_ODD_TOKENS)])
    first = max(image.start - 1, 0)
    end = image.start + image.length
    return odd + ids[first : end + 1], image._replace(start=len(odd) + image.start - first)
