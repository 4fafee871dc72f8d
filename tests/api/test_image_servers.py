"""Conversations with images over engine servers: what a client sends is what the server's model sees."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.app import build_app
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.servers.kinds import connect
from proxy.engine.servers.pool import Pool
from proxy.engine.servers.sent_images import Eyes, SentImages
from proxy.rendering.renderer import Renderer
from proxy.settings import Settings
from proxy.vision.model_config import placeholder_ids
from tests.engines.scripts import model_like
from tests.engines.wire import CONTEXT, Wire, serving_wire
from tests.support import JSON, Server, default_url
from tests.vision import image_url, png, text_part

VOCABULARY = 1000
FIRST, SECOND = png(84, 56, 1), png(56, 56, 2)


@contextlib.asynccontextmanager
async def serving(
    kind: str, folder: Path, model: Path, renderer: Renderer, *, sees: bool = True
) -> AsyncIterator[tuple[Server, Wire]]:
    """An app over a simulated server of the tiny model."""
    async with serving_wire(kind) as (url, wire):
        wire.sees, (wire.placeholder, *_) = sees, placeholder_ids(model)
        wire.engine = ScriptedEngine(model_like(), vocab_size=VOCABULARY, context_length=CONTEXT)
        opener = connect(VOCABULARY, None, eyes=Eyes(SentImages(), placeholder_ids(model)))
        pool: Any = Pool([url], opener, start_timeout_s=5.0)
        app = build_app(Settings(database_url=default_url(folder)), engine=pool, renderer=renderer)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://t", headers=JSON)
        async with app.router.lifespan_context(app), client as http:
            yield Server(app, http, pool), wire


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_the_ids_that_are_stored_are_those_that_the_model_of_the_server_gets(
    kind: str, tmp_path: Path, vision_folder: Path, vision_renderer: Renderer
) -> None:
    async with serving(kind, tmp_path, vision_folder, vision_renderer) as (server, wire):
        asked: list[Any] = [{"role": "user", "content": [text_part("Look: "), image_url(FIRST), text_part("What?")]}]
        answer = await server.answer(asked, max_tokens=6)
        asked += [answer, {"role": "user", "content": [image_url(SECOND), text_part("And this?")]}]
        await server.answer(asked, max_tokens=6)
        ran = [list(request.input_ids) for request in wire.engine.requests][-2:]
        samples = await server.export(layout="individual")
        assert [sample["input_ids"][: len(ids)] for sample, ids in zip(samples, ran, strict=True)] == ran
        assert [ids.count(wire.placeholder) for ids in ran] == [6, 6 + 4]
        assert wire.pictures[-2].startswith(FIRST) and wire.pictures[-1].startswith(SECOND)
        [one, two] = samples[-1]["images"]
        assert (one["length"], two["length"]) == (6, 4)


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_a_server_that_does_not_see_refuses_images_and_goes_on_with_texts(
    kind: str, tmp_path: Path, vision_folder: Path, vision_renderer: Renderer
) -> None:
    async with serving(kind, tmp_path, vision_folder, vision_renderer, sees=False) as (server, wire):
        content = [text_part("Look: "), image_url(FIRST)]
        body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
        refused = await server.post("/s/v1/chat/completions", body)
        assert refused.status_code == 400 and repr(kind) in refused.json()["error"]["message"]
        assert await server.answer([{"role": "user", "content": "Hello"}], max_tokens=4)
        assert not wire.pictures


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_a_server_whose_processor_gives_other_tokens_fails_the_turn_with_both_counts(
    kind: str, tmp_path: Path, vision_folder: Path, vision_renderer: Renderer
) -> None:
    async with serving(kind, tmp_path, vision_folder, vision_renderer) as (server, wire):
        asked = [{"role": "user", "content": [image_url(FIRST)]}]
        await server.answer(asked, max_tokens=4)
        length = len(wire.engine.requests[-1].input_ids)
        wire.encodes = lambda ids: [*ids, 1]
        failed = await server.post("/t/v1/chat/completions", {"model": "m", "messages": asked, "max_tokens": 4})
        assert failed.status_code == 502
        assert {length, length + 1} <= set(map(int, re.findall(r"\d+", failed.json()["error"]["message"])))
