"""Blocks and tools of the Messages API beyond text and functions, sent by Anthropic's SDK and its tool runner: each
conversation is one chain with exact tokens.
"""

from __future__ import annotations

import json
import shutil
from base64 import b64encode
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import anthropic
import httpx2
import pytest
from anthropic.lib.tools import BetaAsyncBuiltinFunctionTool
from anthropic.tools.browser import (
    BetaAsyncAbstractBrowserToolset20260801,
    BetaBrowserNavigateResult,
    BetaBrowserState,
)
from anthropic.tools.computer import BetaAsyncAbstractComputerToolset20260801, BetaScreenshotResult
from anthropic.types.beta import BetaBrowserStateTabEntryParam

from proxy.engine.create import model_folder
from proxy.rendering.renderer import Renderer, load_renderer
from proxy.settings import Settings
from tests.support import Server, call_text, says, serving
from tests.vision import png

DOCUMENT: dict[str, Any] = {
    "type": "document",
    "title": "Plums",
    "source": {"type": "text", "media_type": "text/plain", "data": "Plums are blue."},
}
FOUND: dict[str, Any] = {
    "type": "search_result",
    "title": "Fruit",
    "source": "https://plums",
    "content": [{"type": "text", "text": "Plums are sour."}],
}
TAB: BetaBrowserStateTabEntryParam = {"tab_id": "t1", "title": "Plums", "url": "https://plums", "active": True}


def sdk(server: Server) -> anthropic.AsyncAnthropic:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=server.app))
    return anthropic.AsyncAnthropic(base_url="http://t/s", api_key="any", http_client=http, max_retries=0)


class Computer(BetaAsyncAbstractComputerToolset20260801):
    """Notes what it is told, and shows another picture after each action."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[Any] = []

    async def left_click(self, context: Any, input: Any) -> None:
        self.done.append(("left_click", input.coordinate))

    async def screenshot(self, context: Any, input: Any) -> BetaScreenshotResult:
        self.done.append("screenshot")
        return BetaScreenshotResult(data=b64encode(png(seed=len(self.done))).decode())


class Browser(BetaAsyncAbstractBrowserToolset20260801):
    def __init__(self) -> None:
        super().__init__(url_policy=lambda context, url: None)
        self.done: list[Any] = []

    async def _browser_state(self, context: Any) -> BetaBrowserState:
        return BetaBrowserState(tabs=[TAB])

    async def navigate(self, context: Any, input: Any) -> BetaBrowserNavigateResult:
        self.done.append(("navigate", input.url))
        return BetaBrowserNavigateResult(url=input.url, title="Plums")

    async def left_click(self, context: Any, input: Any) -> None:
        self.done.append(("left_click", input.target.ref))


class Builtin(BetaAsyncBuiltinFunctionTool):
    """A tool that Anthropic defines by type alone."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__()
        self.kind, self.title, self.done = kind, name, list[Any]()

    @property
    def name(self) -> str:
        return self.title

    def to_dict(self) -> Any:
        return {"type": self.kind, "name": self.title}

    async def call(self, input: object) -> Any:
        self.done.append(input)
        return [DOCUMENT, FOUND]


async def run(server: Server, tools: list[Any], *, stream: bool) -> Any:
    """Let the SDK's tool runner play the conversation, and return the last message."""
    runner: Any = sdk(server).beta.messages.tool_runner(
        model="m", max_tokens=300, messages=[{"role": "user", "content": "go"}], tools=tools, stream=stream
    )
    last = None
    async for turn in runner:
        last = await turn.get_final_message() if stream else turn
    return last


async def images(server: Server) -> list[Any]:
    found = server.engine.requests[-1].images
    return [] if found is None else list(await found.read())


async def one_chain(server: Server) -> str:
    """Check that the session is one aligned sample, and return its text."""
    tree = await server.tree()
    assert [turn["reason"] for turn in tree] == ["first", *["continued"] * (len(tree) - 1)]
    (sample,) = await server.export(include=["text"])
    assert len(sample["interaction_ids"]) == len(tree)
    prompt = server.prompts()[-1]
    assert sample["input_ids"][: len(prompt)] == prompt
    return str(sample["text"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_computer_toolset_is_played_by_the_tool_runner(
    tmp_path: Path, vision_renderer: Renderer, stream: bool
) -> None:
    click = call_text("computer_left_click", '{"coordinate": [3, 4]}')
    answers = [call_text("computer_screenshot", "{}"), click, "done"]
    async with serving(tmp_path, says(*answers), vision_renderer) as server:
        computer = Computer()
        last = await run(server, [computer], stream=stream)
        assert last.content[-1].text == "done"
        assert computer.done == ["screenshot", ("left_click", [3, 4])]
        assert len(await images(server)) == 1
        await one_chain(server)


@pytest.mark.parametrize("stream", [False, True])
async def test_two_toolsets_with_members_of_one_name_are_told_apart(tmp_path: Path, stream: bool) -> None:
    answers = [
        call_text("browser_navigate", '{"url": "https://plums"}'),
        call_text("browser_left_click", '{"target": {"type": "ref", "ref": "ref_7"}}'),
        call_text("computer_left_click", "{}"),
        "done",
    ]
    async with serving(tmp_path, says(*answers)) as server:
        computer, browser = Computer(), Browser()
        await run(server, [computer, browser], stream=stream)
        assert browser.done == [("navigate", "https://plums"), ("left_click", "ref_7")]
        assert computer.done == [("left_click", None)]
        text = await one_chain(server)
        assert "Open tabs:\n- t1: Plums https://plums (active)" in text


@pytest.mark.parametrize("stream", [False, True])
async def test_bash_and_the_text_editor_return_documents_and_search_results(tmp_path: Path, stream: bool) -> None:
    view = {"command": "view", "path": "/plums"}
    answers = [call_text("bash", '{"command": "ls"}'), call_text("edit", json.dumps(view)), "done"]
    async with serving(tmp_path, says(*answers)) as server:
        bash, editor = Builtin("bash_20250124", "bash"), Builtin("text_editor_20250728", "edit")
        await run(server, [bash, editor], stream=stream)
        assert (bash.done, editor.done) == ([{"command": "ls"}], [view])
        text = await one_chain(server)
        assert text.count("<title>Plums</title>\n<content>\nPlums are blue.\n</content>") == 2
        assert text.count("<source>https://plums</source>\n<content>\nPlums are sour.\n</content>") == 2


async def test_a_conversation_about_a_document_is_one_chain(tmp_path: Path) -> None:
    async with serving(tmp_path, says("blue", "sour")) as server:
        messages: list[Any] = [
            {"role": "user", "content": [DOCUMENT, FOUND, {"type": "text", "text": "Which colour?"}]}
        ]
        reply = await sdk(server).messages.create(model="m", max_tokens=9, messages=messages)
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "And the taste?"}]
        await sdk(server).messages.create(model="m", max_tokens=9, messages=messages)
        assert "Plums are blue." in await one_chain(server)


async def test_pages_of_a_document_are_read_as_text_and_images_by_a_vision_model(
    tmp_path: Path, vision_renderer: Renderer
) -> None:
    picture = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": b64encode(png()).decode()},
    }
    pages = {"type": "content", "content": [{"type": "text", "text": "See:"}, picture]}
    async with serving(tmp_path, says("a plum"), vision_renderer) as server:
        content: list[Any] = [{"type": "document", "source": pages}]
        await sdk(server).messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": content}])
        assert len(await images(server)) == 1
        await one_chain(server)


async def test_a_pdf_is_refused_by_name(tmp_path: Path) -> None:
    source = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    content: list[Any] = [{"type": "document", "source": source}]
    async with serving(tmp_path, says()) as server:
        with pytest.raises(
            anthropic.BadRequestError, match="the model reads no PDF; send its text in a source of type"
        ):
            await sdk(server).messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": content}])


async def test_a_tool_that_the_clients_search_found_is_called_in_a_conversation_that_begins_with_it(
    tmp_path: Path,
) -> None:
    search = {"name": "ToolSearch", "input_schema": {"type": "object"}}
    later = {"name": "weather", "description": "of a city", "input_schema": {"type": "object"}, "defer_loading": True}
    answers = [call_text("ToolSearch", "{}"), call_text("weather", '{"city": "Oslo"}'), "Rain."]
    found = [[{"type": "tool_reference", "tool_name": "weather"}], "rain"]
    async with serving(tmp_path, says(*answers)) as server:
        messages: list[Any] = [{"role": "user", "content": "How is Oslo?"}]
        ask: Any = sdk(server).beta.messages.create
        for result in [*found, None]:
            reply = await ask(model="m", max_tokens=99, messages=messages, tools=[search, later])
            messages.append({"role": "assistant", "content": reply.content})
            if result is not None:
                used = {"type": "tool_result", "tool_use_id": reply.content[-1].id, "content": result}
                messages.append({"role": "user", "content": [used]})
        assert reply.content[-1].text == "Rain."
        assert [turn["reason"] for turn in await server.tree()] == ["first", "tools_changed", "continued"]
        first, last = await server.export(include=["text"])
        assert ("of a city" in first["text"], "of a city" in last["text"]) == (False, True)


@pytest.fixture(scope="module")
def choosy(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """The built-in model with a chat template that refuses the effort `high`, like Qwen3.8's."""
    folder = tmp_path_factory.mktemp("choosy")
    shutil.copytree(model_folder(Settings()), folder, dirs_exist_ok=True)
    file = folder / "tokenizer_config.json"
    told = json.loads(file.read_text("utf-8"))
    refusal = "{%- if reasoning_effort == 'high' %}{{ raise_exception('not high') }}{%- endif %}"
    told["chat_template"] = refusal + told["chat_template"]
    file.write_text(json.dumps(told), "utf-8")
    return load_renderer(Settings(), folder)


async def test_an_effort_that_the_template_refuses_is_ignored_by_name(tmp_path: Path, choosy: Renderer) -> None:
    async with serving(tmp_path, says("one", "two", "three", "four"), choosy) as server:
        body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        high, low = ({**body, "output_config": {"effort": effort}} for effort in ("high", "low"))
        plain = await server.post("/s/v1/messages", body)
        answer = await server.post("/s/v1/messages", high)
        assert answer.status_code == plain.status_code == 200, answer.text
        assert answer.headers["x-tokengrove-ignored"] == "output_config.effort"
        counted = [await server.post("/s/v1/messages/count_tokens", each) for each in (body, high)]
        assert counted[0].json() == counted[1].json()
        known = await server.post("/s/v1/messages", low)
        assert known.status_code == 200 and "x-tokengrove-ignored" not in known.headers
        config = {"thinkingConfig": {"thinkingLevel": "HIGH"}}
        google = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}], "generationConfig": config}
        answer = await server.post("/t/v1beta/models/m:generateContent", google)
        assert answer.status_code == 200, answer.text
        named = unquote(answer.headers["x-tokengrove-ignored"])
        assert named == "generationConfig.thinkingConfig.thinkingLevel"
        chat = {"model": "m", "messages": body["messages"], "reasoning_effort": "high"}
        answer = await server.post("/u/v1/chat/completions", chat)
        assert answer.status_code == 400 and "not high" in answer.json()["error"]["message"]
