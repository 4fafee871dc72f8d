"""The bridge keeps the tokens that the model saw and appends only new ones, at a cost independent of the history."""

from __future__ import annotations

import datetime
import json
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendering_folders import ENDS, QUICK, write_folder

from proxy.rendering import Renderer, load_renderer
from proxy.rendering.bridge import Bridge
from proxy.rendering.reasoning_formats import reasoning_format
from proxy.rendering.templates import jinja2_template
from proxy.rendering.templates.chat_template import ChatTemplate
from proxy.rendering.templates.library_template import LibraryTemplate
from proxy.rendering.templates.message_dicts import to_dicts
from proxy.rendering.tokenizer import Tokenizer
from proxy.settings import Settings
from proxy.types import Ids, ImagePart, Message, Role, Tool, ToolCall, ids_of
from tests import golden
from tests.wide import CROSSED, few
from tokengrove.errors import InvalidRequest

TOOLS = (Tool("read", "Read a file.", {"type": "object", "properties": {"path": {"type": "string"}}}),)


def user(text: str) -> Message:
    return Message(Role.USER, text)


def assistant(text: str, *calls: ToolCall, reasoning: str | None = None) -> Message:
    return Message(Role.ASSISTANT, text, calls, reasoning=reasoning)


def result(text: str, call_id: str) -> Message:
    return Message(Role.TOOL, text, (), call_id)


CALLS = (ToolCall("call_0", "read", '{"path": "a"}'), ToolCall("call_1", "read", '{"path": "b"}'))
CONTINUATIONS = {
    "user": (user("Again?"),),
    "nothing": (),
    "two users": (user("a"), user("b")),
    "system": (Message(Role.SYSTEM, "Be brief."), user("x")),
    "results": (result("1", "call_0"), result("2", "call_1")),
    "results and user": (result("1", "call_0"), result("2", "call_1"), user("ok")),
    "foreign answer": (user("a"), assistant("b"), user("c")),
    "foreign answer first": (assistant("b"), user("c")),
    "foreign call": (user("a"), assistant("", CALLS[0]), result("1", "call_0")),
}


def text_of(renderer: Renderer, prompt: Ids, output: Ids, answer: Message, new: tuple[Message, ...]) -> str:
    suffix = renderer.bridge(prompt, output, answer, new, TOOLS, {})
    assert suffix is not None
    return renderer.decode(suffix)


@pytest.mark.parametrize("which", ["tiny", "qwen3"])
def test_without_reasoning_the_second_prompt_equals_the_full_template(
    which: str, request: pytest.FixtureRequest
) -> None:
    renderer: Renderer = request.getfixturevalue(which)
    history = [Message(Role.SYSTEM, "Be brief."), user("Hi")]
    prompt = renderer.render(history, TOOLS, {})
    output = renderer.encode("Hello there.<|im_end|>")
    suffix = renderer.bridge(prompt, output, assistant("Hello there."), [user("More")], TOOLS, {})
    assert suffix is not None
    assert prompt + output + suffix == renderer.render([*history, assistant("Hello there."), user("More")], TOOLS, {})


def test_with_calls_the_second_prompt_equals_the_full_template(qwen3: Renderer) -> None:
    history, new = [user("Read both")], [result("1", "call_0"), result("2", "call_1")]
    prompt = qwen3.render(history, TOOLS, {})
    calls = "\n".join(f'<tool_call>\n{{"name": "read", "arguments": {{"path": "{p}"}}}}\n</tool_call>' for p in "ab")
    output = qwen3.encode(calls + "<|im_end|>")
    suffix = qwen3.bridge(prompt, output, assistant("", *CALLS), new, TOOLS, {})
    assert suffix is not None
    assert prompt + output + suffix == qwen3.render([*history, assistant("", *CALLS), *new], TOOLS, {})


def test_a_cut_turn_is_closed_once_as_context(tiny: Renderer) -> None:
    prompt = tiny.render([user("Hi")], (), {})
    cut = text_of(tiny, prompt, tiny.encode("Hel"), assistant("Hel"), (user("Go on"),))
    assert cut == "<|im_end|>\n<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\n"


def test_a_rewritten_answer_has_one_assistant_header(tiny: Renderer) -> None:
    prompt, output = tiny.render([user("Hi")], (), {}), tiny.encode("A1<|im_end|>")
    new = (user("U2"), assistant("A2x"), user("U3"))
    assert text_of(tiny, prompt, output, assistant("A1"), new) == (
        "\n<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\nA2x<|im_end|>\n"
        "<|im_start|>user\nU3<|im_end|>\n<|im_start|>assistant\n"
    )


def test_results_after_one_turn_are_one_user_turn(tiny: Renderer) -> None:
    prompt, output = tiny.render([user("Hi")], TOOLS, {}), tiny.encode("<|im_end|>")
    assert text_of(tiny, prompt, output, assistant("", *CALLS), CONTINUATIONS["results"]) == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_reasoning_stays_as_sampled_where_the_template_would_strip_it(tiny: Renderer) -> None:
    prompt = tiny.render([user("Hi")], (), {})
    output = tiny.encode("<think>\nsecret\n</think>\n\nYo.<|im_end|>")
    answer = assistant("Yo.", reasoning="secret")
    assert "secret" not in tiny.decode(tiny.render([user("Hi"), answer, user("More")], (), {}))
    assert text_of(tiny, prompt, output, answer, (user("More"),)).startswith("\n<|im_start|>user\nMore")


def test_marker_text_of_a_user_has_the_ids_of_the_template(qwen3: Renderer) -> None:
    new = user("Is <tool_call> or <|im_end|> special?")
    prompt, output = qwen3.render([user("Hi")], (), {}), qwen3.encode("Yo.<|im_end|>")
    suffix = qwen3.bridge(prompt, output, assistant("Yo."), [new], (), {})
    assert suffix is not None
    assert prompt + output + suffix == qwen3.render([user("Hi"), assistant("Yo."), new], (), {})
    assert 151657 in suffix


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>"])
def test_a_sampled_end_token_is_not_repeated(tiny: Renderer, end: str) -> None:
    prompt = tiny.render([user("Hi")], (), {})
    assert text_of(tiny, prompt, tiny.encode(f"Yo.{end}"), assistant("Yo."), (user("x"),)).startswith("\n<|im_start|>")


def test_tokens_after_an_end_token_are_kept_and_the_turn_is_closed_after_them(tiny: Renderer) -> None:
    prompt = tiny.render([user("Hi")], (), {})
    suffix = text_of(tiny, prompt, tiny.encode("Yo.<|im_end|>abc"), assistant("Yo."), (user("x"),))
    assert suffix == "<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


@CROSSED
@pytest.mark.parametrize("new", CONTINUATIONS.values(), ids=CONTINUATIONS)
@pytest.mark.parametrize("output", ["", "Yo", "<think>\nhm", f"<think>hm</think>{'x' * 50}", " \n" * 40 + "<think>hm"])
def test_a_cut_turn_is_closed_and_open_reasoning_before_it(
    tiny: Renderer, output: str, new: tuple[Message, ...]
) -> None:
    prompt = tiny.render([user("Hi")], TOOLS, {})
    suffix = text_of(tiny, prompt, tiny.encode(output), assistant("", *CALLS), new)
    opened = "<think>" in output and "</think>" not in output
    assert suffix.startswith("</think><|im_end|>\n" if opened else "<|im_end|>\n")
    assert suffix.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_reasoning_that_a_call_closed_is_not_closed_again(tiny: Renderer) -> None:
    prompt = tiny.render([user("Hi")], TOOLS, {})
    output = tiny.encode('<think>hm<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>')
    answer, new = assistant("", CALLS[0], reasoning="hm"), (result("1", "call_0"),)
    assert text_of(tiny, prompt, output, answer, new).startswith("<|im_end|>\n")


@pytest.mark.parametrize("case", golden.load("boundaries"))
def test_a_bridge_begins_with_the_ids_that_the_family_writes_after_an_end_of_turn(
    qwen3: Renderer, case: dict[str, Any]
) -> None:
    sampled = ids_of(case["sampled"])
    suffix = qwen3.bridge(qwen3.render([user("Hi")], (), {}), sampled, assistant("x"), [user("y")], (), {})
    assert suffix is not None
    assert suffix[:3].tolist() == [*case["appended"], 151644, 872]


def test_disabled_thinking_prefills_every_generation_prompt(tiny: Renderer) -> None:
    options = {"enable_thinking": False}
    prompt = tiny.render([user("Hi")], (), options)
    for new in CONTINUATIONS.values():
        suffix = tiny.bridge(prompt, tiny.encode("Yo.<|im_end|>"), assistant("", *CALLS), new, TOOLS, options)
        assert suffix is not None
        assert tiny.decode(suffix).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


texts = st.text(alphabet="ab \n<>é🙂", max_size=12)
turns = st.lists(
    st.one_of(texts.map(user), texts.map(lambda t: Message(Role.SYSTEM, t)), texts.map(lambda t: result(t, "call_0"))),
    min_size=1,
    max_size=5,
)


@settings(max_examples=100)
@given(
    history=st.lists(texts, max_size=4),
    output=st.sampled_from(["", "Yo", "Yo<|im_end|>", "<think>hm", "<think>hm</think>Yo<|im_end|>", "<|endoftext|>"]),
    new=turns,
    thinking=st.booleans(),
)
def test_the_bridge_appends_what_the_library_bridge_appends_to_the_whole_history(
    tiny: Renderer, history: list[str], output: str, new: list[Message], thinking: bool
) -> None:
    options = {} if thinking else {"enable_thinking": False}
    messages = [user("Hi")]
    for text in history:
        messages += [assistant(text, reasoning="r"), user(text)]
    prompt, sampled = tiny.render(messages, TOOLS, options), tiny.encode(output)
    library = LibraryTemplate("qwen3", tiny._tokenizer)._renderer(options)
    whole = library.bridge_to_next_turn(prompt.tolist(), sampled.tolist(), to_dicts(new))
    suffix = tiny.bridge(prompt, sampled, assistant("", CALLS[0]), new, TOOLS, options)
    assert suffix is not None
    if whole is not None:
        assert (prompt + sampled + suffix).tolist() == whole.token_ids


@pytest.mark.parametrize("name", few(sorted(ENDS.keys() - {"gptoss"}), ("glm4moe", *QUICK[1:3])))
def test_every_published_template_is_extended_as_it_would_have_rendered_the_new_turn(
    published: Callable[[str], Path], name: str
) -> None:
    renderer = load_renderer(Settings(), published(name))
    prompt = renderer.render([user("Hi")], (), {})
    output = renderer.encode("Yo") + ids_of(renderer.stop_token_ids[:1])
    suffix = renderer.bridge(prompt, output, assistant("Yo"), [user("Again")], (), {})
    assert suffix is not None
    full = renderer.render([user("Hi"), assistant("Yo"), user("Again")], (), {})
    assert full[len(full) - len(suffix) :] == suffix


def test_a_template_that_rewrites_its_history_is_not_extended(
    published: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    renderer = load_renderer(Settings(), published("deepseekv3"))
    prompt, output = renderer.render([user("Hi")], (), {}), renderer.encode("Yo<\uff5cend\u2581of\u2581sentence\uff5c>")
    new = [Message(Role.SYSTEM, "To the head."), user("x")]
    for _ in range(2):
        assert renderer.bridge(prompt, output, assistant("Yo"), new, (), {}) is None
    assert [record.levelname for record in caplog.records if "append-only" in record.message] == ["WARNING"]


def test_glm_keeps_the_sampled_opener_of_the_next_role(published: Callable[[str], Path]) -> None:
    renderer = load_renderer(Settings(), published("glm4moe"))
    prompt = renderer.render([user("Hi")], TOOLS, {})
    same = text_of(renderer, prompt, renderer.encode("Yo<|user|>"), assistant("Yo"), (user("x"),))
    assert same == "\nx<|assistant|>"
    called = assistant("", CALLS[0])
    seen = text_of(renderer, prompt, renderer.encode("Yo<|observation|>"), called, (result("1", "call_0"),))
    assert seen == "\n<tool_response>\n1\n</tool_response><|assistant|>"
    other = text_of(renderer, prompt, renderer.encode("Yo<|user|>"), called, (result("1", "call_0"),))
    assert other == "<|observation|>\n<tool_response>\n1\n</tool_response><|assistant|>"


@pytest.mark.parametrize(
    ("family", "markers", "end", "header", "tail"),
    [
        (
            "minimax-m2",
            ["]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>"],
            "[e~[",
            "]~b]ai\n<think>\n",
            "\n]~b]user\nx[e~[\n]~b]ai\n<think>\n",
        ),
        (
            "glm-4.5",
            [
                "[gMASK]",
                "<sop>",
                "<|system|>",
                "<|user|>",
                "<|assistant|>",
                "<|observation|>",
                "<arg_key>",
                "</arg_key>",
                "<arg_value>",
                "</arg_value>",
                "/nothink",
            ],
            "<|user|>",
            "<|assistant|>",
            "\nx<|assistant|>",
        ),
    ],
)
def test_boundaries_of_library_families(
    tiny_folder: Path, tmp_path: Path, family: str, markers: list[str], end: str, header: str, tail: str
) -> None:
    folder = write_folder(tmp_path, tiny_folder, None, markers, [end], "x")
    tokenizer = Tokenizer.load(folder)
    library = LibraryTemplate(family, tokenizer)
    bridge = Bridge(tokenizer, library, library.stop_token_ids, reasoning_format("think"), None)
    prompt = ids_of(library.render([user("Hi")], (), {}))
    assert tokenizer.decode(prompt).endswith(header)
    output = tokenizer.encode(f"hm</think>Yo{end}")
    suffix = bridge.suffix(prompt, output, assistant("Yo"), [user("x")], (), {})
    assert suffix is not None
    assert tokenizer.decode(suffix) == tail
    silent = bridge.suffix(prompt, output, assistant("Yo"), [user("x")], (), {}, generation_prompt=False)
    assert silent is not None
    assert tokenizer.decode(silent) + header == tail


class OnlyTheTail(array):  # type: ignore[type-arg]
    """Token ids of a long history that only allow slicing, so that a test fails if the bridge reads them all."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("the whole history was read")

    def tolist(self) -> NoReturn:
        raise AssertionError("the whole history was copied")

    def __contains__(self, _: object) -> NoReturn:
        raise AssertionError("the whole history was searched")


@CROSSED
@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "gptoss", "llama3_1"])
@pytest.mark.parametrize("end", [True, False], ids=["ended", "cut"])
def test_no_more_than_the_tail_of_the_history_is_read(published: Callable[[str], Path], name: str, end: bool) -> None:
    renderer = load_renderer(Settings(), published(name))
    prompt = renderer.render([user("Hi")], (), {})
    long = OnlyTheTail("i", (prompt * 1000).tobytes())
    output = renderer.encode("Yo") + ids_of(renderer.stop_token_ids[:1] if end else ())
    suffix = renderer.bridge(long, output, assistant("Yo"), [user("x")], (), {})
    assert suffix == renderer.bridge(prompt, output, assistant("Yo"), [user("x")], (), {})


def test_template_retention_renders_in_full_only_at_a_user_message(tiny_folder: Path) -> None:
    renderer = load_renderer(Settings(thinking_retention="template"), tiny_folder)
    prompt, output = renderer.render([user("Hi")], TOOLS, {}), renderer.encode("Yo<|im_end|>")
    answer = assistant("", *CALLS)
    assert renderer.bridge(prompt, output, answer, [user("x")], TOOLS, {}) is None
    assert renderer.bridge(prompt, output, answer, [result("1", "call_0")], TOOLS, {}) is not None


def test_an_image_is_refused_when_bridging_too(tiny: Renderer) -> None:
    prompt, output = tiny.render([user("Hi")], (), {}), tiny.encode("Yo<|im_end|>")
    with pytest.raises(InvalidRequest, match="no images"):
        tiny.bridge(prompt, output, assistant("Yo"), [Message(Role.USER, "x", images=(ImagePart("d"),))], (), {})


@pytest.mark.parametrize("call", [False, True], ids=["answer", "tool call"])
def test_a_later_bridge_of_the_same_kind_renders_once(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, call: bool
) -> None:
    renderer, rendered = load_renderer(Settings(), tiny_folder), []
    render = ChatTemplate.render
    monkeypatch.setattr(ChatTemplate, "render", lambda *a, **k: rendered.append(1) or render(*a, **k))  # type: ignore[func-returns-value]
    prompt, output = renderer.render([user("Hi")], TOOLS, {}), renderer.encode("Yo<|im_end|>")
    for turn in range(3):
        rendered.clear()
        called = ToolCall(f"call_{turn}", "read", f'{{"path": "{turn}"}}')
        answer, new = assistant("", called) if call else assistant("Yo"), result("1", called.id) if call else user("x")
        suffix = renderer.bridge(prompt, output, answer, [new], TOOLS, {})
        assert suffix is not None
        assert len(rendered) == (2 if turn == 0 else 1)
        shown = "<tool_response>\n1\n</tool_response>" if call else "x"
        assert renderer.decode(suffix) == f"\n<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_writes_the_date_is_bridged_on_the_next_day(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = json.loads((tiny_folder / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    dated = "{{ '<|im_start|>system\n' + strftime_now('%d') + '<|im_end|>\n' }}" + source
    renderer = load_renderer(Settings(), write_folder(tmp_path, tiny_folder, dated, [], ["<|im_end|>"], "qwen3"))
    prompt, output = renderer.render([user("Hi")], (), {}), renderer.encode("Yo<|im_end|>")
    first = renderer.bridge(prompt, output, assistant("Yo"), [user("x")], (), {})
    monkeypatch.setattr(jinja2_template, "datetime", _Tomorrow)
    assert renderer.render([user("Hi")], (), {}) != prompt
    assert renderer.bridge(prompt, output, assistant("Yo"), [user("x")], (), {}) == first


class _Tomorrow(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _Tomorrow:
        return super().now(tz) + datetime.timedelta(days=1)
