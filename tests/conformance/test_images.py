"""Unmodified clients that send screenshots: Anthropic's computer-use loop, the OpenAI SDK, browser-use with a browser.

What each turn saw is what its agent sent; every sampled token is trained once; a tree forks only where the agent edits
its history, and the fork says so.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.conformance import loop
from tests.conformance.packages import package
from tests.conformance.screens import HEIGHT, WIDTH, base64_screenshot, screenshot
from tests.conformance.served import MODEL, Served, assert_one_chain, assert_trained_once

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
STEPS = 6
LOOK = {"name": "computer", "arguments": {"action": "screenshot"}}
PLAN = [{"say": f"Look {number}.", "calls": [LOOK]} for number in range(STEPS)] + [{"say": "I saw it all."}]
TASK = loop.message("Use the computer.", PLAN)


def digests(*numbers: int) -> list[str]:
    """The digests of screenshots, by which the server knows them."""
    return [hashlib.sha256(screenshot(number)).hexdigest() for number in numbers]


def seen(served: Served, session: str) -> list[list[str]]:
    """The digests of the images of each prompt, in order."""
    return [[image["digest"] for image in turn["tokens"]["images"]] for turn in turns(served, session, "tokens")]


def turns(served: Served, session: str, include: str) -> list[Any]:
    """The turns of a session, each with what `include` names."""
    return [
        served.read(f"/rl/sessions/{session}/interactions/{node['id']}?include={include}")
        for node in served.tree(session)
    ]


class ComputerUse:
    """The loop of Anthropic's computer-use reference: marks for prompt caching, and a filter that drops old images.

    `keep`: how many of the newest images stay (None: all of them); `at_least`: they are dropped in such portions, so
    that the cached prompt changes rarely.
    """

    def __init__(self, client: Any, keep: int | None = None, at_least: int = 1) -> None:
        self.client, self.keep, self.at_least = client, keep, at_least
        self.screenshots = 0

    def run(self, task: str) -> list[str]:
        """Call the model and its tools until it calls no more; return what it said."""
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": task}]}]
        said = []
        while True:
            self._mark(messages)
            if self.keep is not None:
                self._drop(messages, self.keep)
            answer = self._ask(messages)
            said += [block["text"] for block in answer if block["type"] == "text"]
            messages.append({"role": "assistant", "content": answer})
            results = [self._result(block) for block in answer if block["type"] == "tool_use"]
            if not results:
                return said
            messages.append({"role": "user", "content": results})

    def _ask(self, messages: list[Any]) -> list[Any]:
        system = {"type": "text", "text": "You use a computer.", "cache_control": {"type": "ephemeral"}}
        computer = {
            "type": "computer_20250124",
            "name": "computer",
            "display_width_px": WIDTH,
            "display_height_px": HEIGHT,
            "display_number": 1,
        }
        editor = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}
        raw = self.client.beta.messages.with_raw_response.create(
            max_tokens=1000,
            messages=copy.deepcopy(messages),
            model=MODEL,
            system=[system],
            tools=[computer, editor, {"type": "bash_20250124", "name": "bash"}],
            betas=["computer-use-2025-01-24", "prompt-caching-2024-07-31"],
        )
        return [block.model_dump(exclude_none=True) for block in raw.parse().content]

    def _result(self, call: Any) -> dict[str, Any]:
        assert call["input"] == LOOK["arguments"]
        number, self.screenshots = self.screenshots, self.screenshots + 1
        source = {"type": "base64", "media_type": "image/png", "data": base64_screenshot(number)}
        content = [{"type": "text", "text": f"Screenshot {number}."}, {"type": "image", "source": source}]
        return {"type": "tool_result", "tool_use_id": call["id"], "content": content, "is_error": False}

    def _mark(self, messages: list[Any]) -> None:
        """Mark the last block of the three newest user messages, and none before them."""
        for place, message in enumerate(reversed([one for one in messages if one["role"] == "user"])):
            if place < 3:
                message["content"][-1]["cache_control"] = {"type": "ephemeral"}
            else:
                message["content"][-1].pop("cache_control", None)

    def _drop(self, messages: list[Any], keep: int) -> None:
        results = [
            block
            for message in messages
            if message["role"] == "user"
            for block in message["content"]
            if block["type"] == "tool_result"
        ]
        spare = sum(part["type"] == "image" for result in results for part in result["content"]) - keep
        spare -= spare % self.at_least
        for result in results:
            kept = []
            for part in result["content"]:
                if part["type"] == "image" and spare > 0:
                    spare -= 1
                else:
                    kept.append(part)
            result["content"] = kept


def computer_use(seeing: Served, session: str, **options: Any) -> None:
    client = package("anthropic").Anthropic(base_url=seeing.anthropic(session), api_key="any")
    assert ComputerUse(client, **options).run(TASK) == [step["say"] for step in PLAN]


def test_computer_use_that_keeps_its_images_is_one_chain(seeing: Served) -> None:
    session = "computer-use"
    computer_use(seeing, session)
    assert_one_chain(seeing, session, turns=STEPS + 1)
    assert seen(seeing, session) == [digests(*range(number)) for number in range(STEPS + 1)]


def test_computer_use_that_drops_images_forks_where_it_drops_them(seeing: Served) -> None:
    session, keep = "computer-use-drops", 3
    computer_use(seeing, session, keep=keep)
    prompts = [digests(*range(max(0, number - keep), number)) for number in range(STEPS + 1)]
    assert seen(seeing, session) == prompts
    # From where the first image is dropped, each turn drops one more: it goes on from the first turn, whose prompt has
    # no image yet. Answers between that one and its own were sampled in other contexts.
    assert_trained_once(seeing, session, keep + 1, *[2] * (STEPS - keep))
    told = turns(seeing, session, "compared")
    assert [turn["reason"] for turn in told[1 : keep + 1]] == ["continued"] * keep
    for number, turn in enumerate(told[keep + 1 :]):
        message = turn["compared"]["message"]
        assert (turn["reason"], turn["compared"]["why"]) == ("branched", "images"), turn["compared"]
        assert (message["role"], message["index"]) == ("tool", 3 + 2 * number)


def test_images_that_are_dropped_in_portions_fork_once_a_portion(seeing: Served) -> None:
    session = "computer-use-portions"
    computer_use(seeing, session, keep=2, at_least=3)
    assert [len(images) for images in seen(seeing, session)] == [0, 1, 2, 3, 4, 2, 3]
    told = turns(seeing, session, "compared")
    assert [turn["compared"]["why"] for turn in told if turn["reason"] == "branched"] == ["images"]
    sampled = sum(node["output_tokens"] for node in seeing.tree(session))
    assert sum(sum(sample["loss_mask"]) for sample in seeing.samples(session)) == sampled


TOOL = {
    "type": "function",
    "name": "computer",
    "parameters": {"type": "object", "properties": {"action": {"type": "string"}}},
}


@pytest.mark.parametrize("whole", [False, True], ids=["previous_response_id", "whole"])
def test_the_openai_sdk_sends_screenshots_as_results_of_calls(seeing: Served, whole: bool) -> None:
    session = f"responses-screens-{whole}"
    client = package("openai").OpenAI(base_url=seeing.openai(session), api_key="any")
    first = {"type": "input_image", "image_url": url(0), "detail": "high"}
    history: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": TASK}, first]}]
    new, previous, number = history, None, 1
    while True:
        more = {} if whole or previous is None else {"previous_response_id": previous}
        reply = client.responses.create(model=MODEL, input=history if whole else new, tools=[TOOL], **more)
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            break
        parts = [
            {"type": "input_text", "text": f"Screenshot {number}."},
            {"type": "input_image", "image_url": url(number)},
        ]
        new = [{"type": "function_call_output", "call_id": calls[0].call_id, "output": parts}]
        history += [*[item.model_dump(exclude_none=True) for item in reply.output], *new]
        previous, number = reply.id, number + 1
    assert reply.output_text == PLAN[-1]["say"]
    assert_one_chain(seeing, session, turns=STEPS + 1)
    assert seen(seeing, session) == [digests(*range(number + 1)) for number in range(STEPS + 1)]


def url(number: int, compression: int = 9) -> str:
    return f"data:image/png;base64,{base64_screenshot(number, compression)}"


def test_a_picture_that_is_encoded_anew_is_a_rewrite_that_says_so(seeing: Served) -> None:
    session = "chat-encoded-anew"
    client = package("openai").OpenAI(base_url=seeing.openai(session), api_key="any")

    def ask(picture: str, *more: Any) -> Any:
        content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": picture}}]
        messages: list[Any] = [{"role": "user", "content": content}, *more]
        return client.chat.completions.create(model=MODEL, messages=messages).choices[0].message

    answer = ask(url(0))
    ask(url(0), answer, {"role": "user", "content": "Sure?"})
    ask(url(0, compression=1), answer, {"role": "user", "content": "Sure?"})
    told = turns(seeing, session, "compared")
    assert [turn["reason"] for turn in told] == ["first", "continued", "new_root"]
    assert told[2]["compared"]["why"] == "encoded_anew"


PAGE = b"""<!doctype html><title>Shop</title><body style="background: #cde"><h1>Orders</h1>
<button onclick="document.body.style.background = '#fdb'; this.textContent = 'Ordered'">Order</button>"""


class Shop(BaseHTTPRequestHandler):
    """A page whose colour changes when its button is pressed."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def shop() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Shop)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


def acting(*actions: dict[str, Any]) -> str:
    """An answer of a model to browser-use."""
    return json.dumps({"evaluation_previous_goal": "Good.", "memory": "None.", "next_goal": "On.", "action": actions})


@pytest.mark.parametrize("api", ["chat", "messages"])
async def test_browser_use_with_a_browser(seeing: Served, shop: str, api: str) -> None:
    """Each of its steps sends a new message with all that it knows and the newest screenshot, so each is a sample."""
    browser_use = package("browser_use")
    llm, session = package("browser_use.llm"), f"browser-use-{api}"
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    says = (
        [{"navigate": {"url": shop, "new_tab": False}}],
        [{"evaluate": {"code": "(() => document.querySelector('button').click())()"}}],
        [{"wait": {"seconds": 1}}],
        [{"done": {"text": "Ordered.", "success": True}}],
    )
    plan: list[Any] = [{"say": acting(*actions)} for actions in says]
    if api == "messages":
        plan = [{"calls": [{"name": "AgentOutput", "arguments": json.loads(step["say"])}]} for step in plan]
    plan[0] |= {"bare": True, "counted": "<step>"}
    if api == "chat":
        model = llm.ChatOpenAI(model=MODEL, base_url=seeing.openai(session), api_key="any")
    else:
        model = llm.ChatAnthropic(model=MODEL, base_url=seeing.anthropic(session), api_key="any")
    window = {"width": 640, "height": 400}
    browser = browser_use.Browser(
        executable_path=chromium,
        headless=True,
        chromium_sandbox=False,
        enable_default_extensions=False,
        viewport=window,
    )
    agent = browser_use.Agent(
        task=loop.message("Order it.", plan),
        llm=model,
        browser=browser,
        use_judge=False,
        use_thinking=False,
        directly_open_url=False,
        enable_signal_handler=False,
    )
    history = await agent.run(max_steps=6)
    assert history.is_done() and history.final_result() == "Ordered.", history.errors()
    assert_trained_once(seeing, session, *[1] * len(says))
    images = [
        [image for message in turn["messages"] for image in message.get("images", ())]
        for turn in turns(seeing, session, "messages")
    ]
    assert [len(each) for each in images] == [0, 1, 1, 1]
    files = [seeing.content(f"/rl/sessions/{session}/images/{each[0]['digest']}") for each in images[1:]]
    assert all(data.startswith(b"\x89PNG") and data[16:24] == (640).to_bytes(4) + (400).to_bytes(4) for data in files)
    taken = [base64.b64decode(shot) for shot in history.screenshots() if shot]
    assert files == taken[-len(files) :]
    assert len({each[0]["digest"] for each in images[1:]}) > 1  # the page changed
    assert {turn["reason"] for turn in seeing.tree(session)[1:]} == {"new_root"}
