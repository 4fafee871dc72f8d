"""A tokenizer over HTTP appends to an answer what a turn would, with every published template."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.rendering import load_renderer
from proxy.settings import Settings
from tests.support import says, serving, user
from tests.unit.proxy.rendering.rendering_folders import FAMILIES
from tokengrove.client import Client
from tokengrove.errors import InvalidRequest
from tokengrove.verl import ServerTokenizer

RESULTS = [
    {"role": "tool", "content": "sunny", "name": "weather"},
    {"role": "tool", "content": "rainy", "name": "wind"},
]


@pytest.mark.parametrize("name", FAMILIES)
async def test_tool_results_behind_the_prefix_are_what_follows_an_answer(
    published: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    renderer = load_renderer(Settings(), published(name))

    def check(client: Client) -> None:
        tokenizer = ServerTokenizer(client)
        prefix = tokenizer.apply_chat_template([{}], add_generation_prompt=False, tokenize=True)
        asked = tokenizer.apply_chat_template([user("hi")], add_generation_prompt=True, tokenize=True)
        assert asked == client.tokenize([user("hi")])
        assert asked[: len(prefix)] == prefix
        end = tokenizer._template.end
        assert set(end) & set(renderer.stop_token_ids)
        for results in (RESULTS[:1], RESULTS):
            named = [{**result, "tool_call_id": f"call_{at}"} for at, result in enumerate(results)]
            calls = [
                {"id": each["tool_call_id"], "type": "function", "function": {"name": each["name"], "arguments": "{}"}}
                for each in named
            ]
            answer = {"role": "assistant", "content": "", "tool_calls": calls}
            known = {"messages": 2, "token_ids": asked + end, "output_tokens": len(end)}
            try:
                follows = client.tokenize([user("hi"), answer, *named], continue_from=known)
            except InvalidRequest as error:
                assert "cannot express" in error.message
                pytest.skip(error.message)
            found = tokenizer.apply_chat_template(results, add_generation_prompt=True, tokenize=True)
            assert found[len(prefix) :] == follows[len(asked) + len(end) :]

    async with serving(tmp_path, says(), renderer) as server:
        await asyncio.to_thread(check, Client(app=server.app))
