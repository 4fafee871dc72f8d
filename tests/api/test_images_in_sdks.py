"""Screenshots as agents send them with the real SDKs of OpenAI and Anthropic: history, tool results, edits."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from proxy.rendering.renderer import Renderer
from tests.support import Server, call_text, function_tool, says, serving
from tests.vision import data_url, png, text_part

LOOK = function_tool("look")


def openai_client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://t/s/v1", api_key="any", http_client=server.http, max_retries=0)


def claude_client(server: Server) -> anthropic.AsyncAnthropic:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=server.app))
    return anthropic.AsyncAnthropic(base_url="http://t/s", api_key="any", http_client=http, max_retries=0)


async def images(server: Server) -> list[bytes]:
    found = server.engine.requests[-1].images
    return [] if found is None else [file.data for file in await found.read()]


async def reasons(server: Server) -> list[str]:
    return [turn["reason"] for turn in await server.tree()]


async def test_openai_chat_a_screenshot_after_each_action(tmp_path: Path, vision_renderer: Renderer) -> None:
    answers = [call_text("look", "{}")] * 3 + ["done"]
    async with serving(tmp_path, says(*answers), vision_renderer) as server:
        client = openai_client(server)
        messages: list[Any] = [{"role": "user", "content": "go"}]
        for step in range(4):
            reply = await client.chat.completions.create(model="m", messages=messages, tools=[LOOK])
            said = reply.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            for call in said.tool_calls or ():
                part = {"type": "image_url", "image_url": {"url": data_url(png(seed=step)), "detail": "auto"}}
                messages.append({"role": "tool", "tool_call_id": call.id, "content": [part]})
        assert await images(server) == [png(seed=step) for step in range(3)]
        assert await reasons(server) == ["first", *["continued"] * 3]


async def test_openai_responses_continue_by_id_with_new_images(tmp_path: Path, vision_renderer: Renderer) -> None:
    async with serving(tmp_path, says("a", "b"), vision_renderer) as server:
        client = openai_client(server)
        content = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": data_url(png(seed=1))}]
        first = await client.responses.create(model="m", input=[{"role": "user", "content": content}])
        content = [{"type": "input_image", "image_url": data_url(png(seed=2)), "detail": "low"}]
        await client.responses.create(
            model="m", previous_response_id=first.id, input=[{"role": "user", "content": content}]
        )
        assert await images(server) == [png(seed=1), png(seed=2)]
        assert await reasons(server) == ["first", "continued"]


async def test_anthropic_screenshots_in_tool_results_and_old_ones_removed(
    tmp_path: Path, vision_renderer: Renderer
) -> None:
    """Anthropic's computer-use loop keeps the latest screenshots only: it takes old ones out of the history."""
    answers = [call_text("look", "{}")] * 2 + ["done"]
    async with serving(tmp_path, says(*answers), vision_renderer) as server:
        client = claude_client(server)
        tool = {"name": "look", "description": "does look", "input_schema": LOOK["function"]["parameters"]}
        messages: list[Any] = [{"role": "user", "content": "go"}]
        for step in range(3):
            reply = await client.messages.create(model="m", max_tokens=50, messages=messages, tools=[tool])
            messages.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
            results = []
            for block in reply.content:
                if block.type == "tool_use":
                    data = b64encode(png(seed=step)).decode()
                    source = {"type": "base64", "media_type": "image/png", "data": data}
                    content = [text_part("ok"), {"type": "image", "source": source}]
                    results.append({"type": "tool_result", "tool_use_id": block.id, "content": content})
            if step == 1:
                messages[2]["content"][0]["content"].pop()
            if results:
                messages.append({"role": "user", "content": results})
        assert await images(server) == [png(seed=1)]
        assert (await reasons(server))[:2] == ["first", "continued"]
        assert (await reasons(server))[2] not in ("first", "continued")
        counted = await client.messages.count_tokens(model="m", messages=messages[:-1], tools=[tool])
        assert counted.input_tokens == len(server.prompts()[-1])


async def test_the_sdks_raise_bad_request_for_a_broken_image(tmp_path: Path, vision_renderer: Renderer) -> None:
    async with serving(tmp_path, says("a"), vision_renderer) as server:
        broken: list[Any] = [{"type": "image_url", "image_url": {"url": data_url(png()[:60])}}]
        with pytest.raises(openai.BadRequestError) as caught:
            asked: list[Any] = [{"role": "user", "content": broken}]
            await openai_client(server).chat.completions.create(model="m", messages=asked)
        assert caught.value.param == "messages[0].content[0].image_url.url"
        source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]\.source\.data"):
            content: list[Any] = [{"type": "image", "source": source}]
            asked = [{"role": "user", "content": content}]
            await claude_client(server).messages.create(model="m", max_tokens=5, messages=asked)
