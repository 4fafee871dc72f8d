"""A prompt that was rendered before is not rendered again, and never taken for another one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from proxy.rendering import Renderer, load_renderer
from proxy.rendering.prompt_cache import PromptCache, prompt_key
from proxy.rendering.templates.chat_template import ChatTemplate
from proxy.settings import Settings
from proxy.types import Ids, Message, Role, Tool, ToolCall, ids_of

HI = Message(Role.USER, "Hi")


def tool(parameters: dict[str, Any]) -> tuple[Tool, ...]:
    return (Tool("read", "Read a file.", parameters),)


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What a chat template was asked to render."""
    calls: list[object] = []
    render = ChatTemplate.render

    def count(self: ChatTemplate, *given: Any, **options: Any) -> Ids:
        calls.append(given)
        return render(self, *given, **options)

    monkeypatch.setattr(ChatTemplate, "render", count)
    return calls


@pytest.fixture
def renderer(tiny_folder: Path) -> Renderer:
    return load_renderer(Settings(), tiny_folder)


def test_a_group_that_shares_its_prompt_renders_it_once(renderer: Renderer, rendered: list[object]) -> None:
    first = renderer.render([HI], tool({"type": "object"}), {"enable_thinking": False})
    rendered.clear()
    for _ in range(8):
        again = [Message(Role.USER, "".join(["H", "i"]))]
        assert renderer.render(again, tool({"type": "object"}), {"enable_thinking": False}) == first
    assert rendered == []


def test_nobody_changes_what_is_remembered(renderer: Renderer) -> None:
    first = renderer.render([HI], (), {})
    wanted = first[:]
    first.append(1)
    second = renderer.render([HI], (), {})
    second += ids_of([1, 2])
    assert renderer.render([HI], (), {}) == wanted


def test_what_python_calls_equal_are_different_prompts() -> None:
    conversations: list[tuple[tuple[Message, ...], tuple[Tool, ...], dict[str, Any]]] = [
        ((HI,), tool({"a": 1}), {}),
        ((HI,), tool({"a": 1.0}), {}),
        ((HI,), tool({"a": True}), {}),
        ((HI,), tool({"a": 0.0}), {}),
        ((HI,), tool({"a": -0.0}), {}),
        ((HI,), tool({"a": "1"}), {}),
        ((HI,), tool({"a": 1, "b": 2}), {}),
        ((HI,), tool({"b": 2, "a": 1}), {}),
        ((HI,), (), {}),
        ((HI,), (), {"a": 1}),
        ((HI,), (), {"a": True}),
        ((HI,), (), {"a": 1.0}),
        ((HI, HI), (), {}),
        ((Message(Role.SYSTEM, "Hi"),), (), {}),
        ((Message(Role.USER, "Hi", reasoning="Hi"),), (), {}),
        ((Message(Role.ASSISTANT, "Hi", (ToolCall("a", "b", "c"),)),), (), {}),
        ((Message(Role.ASSISTANT, "Hi", (ToolCall("a", "b", "d"),)),), (), {}),
        ((Message(Role.TOOL, "Hi", tool_call_id="a"),), (), {}),
        ((Message(Role.TOOL, "Hi", name="a"),), (), {}),
    ]
    keys = [prompt_key(*conversation) for conversation in conversations]
    assert all(one != other for one, other in itertools.combinations(keys, 2))
    assert len(set(keys)) == len(keys)


def test_a_schema_that_cannot_be_compared_is_rendered_each_time() -> None:
    assert prompt_key((HI,), tool({"a": object()}), {}) is None


def test_without_a_generation_prompt_it_is_another_rendering(renderer: Renderer) -> None:
    assert renderer.render([HI], (), {}) != renderer.render([HI], (), {}, prompt=False)
    assert renderer.render([HI], (), {}) != renderer.render([HI], (), {}, prompt=False)


def test_templates_that_read_the_clock_are_rendered_each_time(
    published: Callable[[str], Path], rendered: list[object]
) -> None:
    renderer = load_renderer(Settings(), published("gptoss"))
    renderer.render([HI], (), {})
    rendered.clear()
    renderer.render([HI], (), {})
    assert len(rendered) == 1


def test_the_prompts_not_used_for_longest_are_forgotten_first() -> None:
    cache = PromptCache(20 * 100)
    for key in "abcd":
        cache.put(key, ids_of(range(25)))
    assert cache.get("a") == ids_of(range(25))
    cache.put("e", ids_of(range(26)))
    assert [key for key in "abcde" if cache.get(key) is not None] == ["a", "d", "e"]
    cache.put("huge", ids_of(range(101)))
    assert [key for key in ("a", "e", "huge") if cache.get(key) is not None] == []
    cache.put("b", ids_of(range(100)))
    cache.put("b", ids_of(range(100)))
    assert cache.get("b") == ids_of(range(100))


def test_threads_share_it() -> None:
    cache = PromptCache(20 * 50)

    def use(number: int) -> None:
        for step in range(200):
            key = (number + step) % 13
            cache.put(key, ids_of([key] * key))
            found = cache.get((key + 1) % 13)
            assert found is None or set(found) <= {(key + 1) % 13}

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(8)))
    cache.put("last", ids_of(range(50)))
    assert cache.get("last") == ids_of(range(50))
    assert cache.get(12) is None


def test_text_that_the_template_drops_counts_too(renderer: Renderer) -> None:
    renderer._prompts = PromptCache(100_000)
    dropped = 40_000
    for number in range(10):
        answer = Message(Role.ASSISTANT, "a", (ToolCall("i", "n", "{}"),), reasoning=f"{number}" * dropped)
        renderer.render([HI, answer, HI], (), {})
        renderer.render([HI, answer, HI], (), {})
    kept = [messages[1].reasoning for messages, _, _ in renderer._prompts._prompts]  # type: ignore[misc]
    assert kept == ["8" * dropped, "9" * dropped]
