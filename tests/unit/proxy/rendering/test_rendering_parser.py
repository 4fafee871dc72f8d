"""The output parser: joined deltas give the message under every chunking, and `renderers` reads the same message."""

from __future__ import annotations

import gc
import itertools
import json
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from format_samples import library_reading
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.rendering import OutputParser, Renderer, load_renderer
from proxy.rendering.deltas import Delta, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from proxy.rendering.templates.library_template import LibraryTemplate
from proxy.settings import Settings
from proxy.types import Message, Role, Tool, ToolChoice, ToolChoiceMode, ids_of

TOOLS = (Tool("read", "Read a file.", {"type": "object", "properties": {"path": {"type": "string"}}}),)
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
OPEN = "<|im_start|>assistant\n<think>\n"
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
quick = settings(max_examples=150)

FRAGMENTS = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "\n",
        " ",
        "\n\n",
        "Sure.",
        "héllo 🙂",
        "<thi",
        "nk>",
        "{",
        CALL,
        '<tool_call>{"name": "list", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "none"}</tool_call>',
        "<tool_call>{'name': 1}</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        "<think>\nhm\n</think>\n\n",
    ]
)


def parser_of(renderer: Renderer, prompt: str = PROMPT, **given_: object) -> OutputParser:
    counter = itertools.count()
    tools = given_.pop("tools", TOOLS)
    choice = given_.pop("tool_choice", ToolChoice())
    return renderer.parser(tools, choice, renderer.encode(prompt), call_id=lambda: f"call_{next(counter)}", **given_)  # type: ignore[arg-type]


def parse(renderer: Renderer, text: str, prompt: str = PROMPT, **given_: object) -> OutputParser:
    parser = parser_of(renderer, prompt, **given_)
    parser.feed(renderer.encode(text))
    parser.finish()
    return parser


def joined(deltas: Iterable[Delta]) -> Message:
    """Join deltas as a client does."""
    text, reasoning, calls = "", "", {}
    for delta in deltas:
        match delta:
            case TextDelta(piece):
                text += piece
            case ReasoningDelta(piece):
                reasoning += piece
            case ToolCallStart(index, call_id, name):
                assert index == len(calls)
                calls[index] = [call_id, name, ""]
            case ToolCallArguments(index, fragment):
                calls[index][2] += fragment
            case ToolCallEnd(index):
                json.loads(calls[index][2])
    listed = [[*call] for call in calls.values()]
    return Message.from_json(
        {"role": "assistant", "content": text, "reasoning": reasoning or None, "tool_calls": listed}
    )


def split(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


@quick
@given(parts=st.lists(FRAGMENTS, max_size=8), cuts=st.lists(st.integers(0, 80), max_size=8), opened=st.booleans())
def test_deltas_joined_are_the_message_under_every_chunking(
    tiny: Renderer, parts: list[str], cuts: list[int], opened: bool
) -> None:
    ids = tiny.encode("".join(parts))
    whole = parse(tiny, "".join(parts), OPEN if opened else PROMPT)
    parser = parser_of(tiny, OPEN if opened else PROMPT)
    deltas = [delta for chunk in split(ids, cuts) for delta in parser.feed(chunk)]
    deltas += parser.finish()
    assert parser.message == whole.message == joined(deltas)
    assert (parser.malformed_calls, parser.reasoning_tokens) == (whole.malformed_calls, whole.reasoning_tokens)
    assert parser.kept == len(ids)


@quick
@given(parts=st.lists(FRAGMENTS, max_size=8), end=st.sampled_from(["", "<|im_end|>"]), opened=st.booleans())
def test_the_renderers_package_reads_the_same_message(
    tiny: Renderer, oracle: LibraryTemplate, parts: list[str], end: str, opened: bool
) -> None:
    prompt = OPEN if opened else PROMPT
    ids = tiny.encode("".join(parts) + end)
    agree(oracle, parse(tiny, "".join(parts) + end, prompt), ids.tolist(), tiny.encode(prompt).tolist())


@quick
@given(ids=st.lists(st.integers(0, 639), max_size=40))
def test_noise_is_read_as_renderers_reads_it(tiny: Renderer, oracle: LibraryTemplate, ids: list[int]) -> None:
    parser = parser_of(tiny)
    parser.feed(ids_of(ids))
    parser.finish()
    agree(oracle, parser, ids, tiny.encode(PROMPT).tolist())


@pytest.fixture(scope="session")
def oracle(tiny: Renderer) -> LibraryTemplate:
    return LibraryTemplate("qwen3", tiny._tokenizer)


def agree(oracle: LibraryTemplate, parser: OutputParser, ids: list[int], prompt: list[int]) -> None:
    """Compare with the library's reading. Two things may differ: trailing white space of unclosed reasoning, which
    a stream cannot take back, and malformed calls, which the library drops and we keep visible."""
    expected = library_reading(oracle, ids, prompt, TOOLS)
    message = parser.message
    calls = [(call.name, call.arguments or {}) for call in expected.tool_calls if call.status == "ok"]
    assert message.reasoning == ((expected.reasoning_content or "").strip() or None)
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == calls
    assert parser.malformed_calls == len(expected.tool_calls) - len(calls)
    if parser.malformed_calls:
        assert message.content.startswith(expected.content)
        assert "<tool_call>" in message.content
    else:
        assert message.content == expected.content


@quick
@given(
    text=st.text(alphabet="ab \nSTOPé🙂", max_size=40),
    stop=st.lists(st.sampled_from(["STOP", "TO", "ab", "\n\n", "P", "🙂", "é"]), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 60), max_size=6),
)
def test_a_stop_string_ends_the_text_and_keeps_the_token_that_completes_it(
    tiny: Renderer, text: str, stop: list[str], cuts: list[int]
) -> None:
    ids = tiny.encode(text)
    parser = parser_of(tiny, stop=stop)
    deltas = [delta for chunk in split(ids, cuts) for delta in parser.feed(chunk)]
    deltas += parser.finish()
    shown = tiny.decode(ids).lstrip()
    found = [(shown.find(word) + len(word), -len(word), word) for word in stop if word in shown]
    assert joined(deltas) == parser.message
    if not found:
        assert (parser.stop_string, parser.kept, parser.message.content) == (None, len(ids), shown.rstrip())
        return
    end, back, word = min(found)
    assert parser.stop_string == word
    assert parser.message.content == shown[: end + back].rstrip()
    completes = next(k for k in range(len(ids) + 1) if any(s in tiny.decode(ids[:k]).lstrip() for s in stop))
    assert parser.kept == completes


def test_a_stop_string_that_ends_with_a_replacement_character_is_found_in_broken_bytes(tiny: Renderer) -> None:
    ids = ids_of([*tiny.encode("ab"), *tiny.encode("🙂")[:1], *tiny.encode("cd ef gh ij")])
    parser = parser_of(tiny, stop=["b\ufffd"])
    parser.feed(ids)
    assert (parser.stop_string, parser.kept) == ("b\ufffd", len(tiny.encode("ab")) + 2)


def test_reasoning_text_and_calls_are_distinguished(tiny: Renderer) -> None:
    parser = parse(tiny, f"<think>\nhm\n</think>\n\nSure.\n{CALL}\n{CALL}<|im_end|>")
    assert parser.message.reasoning == "hm"
    assert parser.message.content == "Sure."
    assert [(call.id, call.name) for call in parser.message.tool_calls] == [("call_0", "read"), ("call_1", "read")]
    assert parser.message.tool_calls[0].arguments == '{"path": "a"}'


def test_text_goes_out_as_tokens_arrive(tiny: Renderer) -> None:
    parser = parser_of(tiny)
    seen = [parser.feed((token,)) for token in tiny.encode("one two")]
    assert joined(itertools.chain(*seen)).content == "one two"


def test_a_character_split_over_tokens_is_held_back(tiny: Renderer) -> None:
    ids = tiny.encode("🙂")
    assert len(ids) > 1
    parser = parser_of(tiny)
    assert all(parser.feed((token,)) == [] for token in ids[:-1])
    assert parser.feed(ids[-1:]) == [TextDelta("🙂")]
    cut = parser_of(tiny)
    cut.feed(ids[:-1])
    assert cut.finish() == [TextDelta("\ufffd")]


def test_arguments_keep_their_text_as_sampled(tiny: Renderer) -> None:
    body = '{"arguments" : {"b":1,  "a": [1e2, "\\u00e9"]} , "name":"read"}'
    assert parse(tiny, f"<tool_call>{body}</tool_call>").message.tool_calls[0].arguments == (
        '{"b":1,  "a": [1e2, "\\u00e9"]}'
    )


def test_arguments_encoded_twice_are_the_inner_object(tiny: Renderer) -> None:
    body = '{"name": "read", "arguments": "{\\"path\\": 1}"}'
    assert parse(tiny, f"<tool_call>{body}</tool_call>").message.tool_calls[0].arguments == '{"path": 1}'


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        '{"name": ""}',
        '{"name": 3, "arguments": {}}',
        '{"name": "read", "arguments": [1]}',
        '{"name": "read", "arguments": null}',
        '{"name": "read", "arguments": "x"}',
        '{"name": "read", "arguments": NaN}',
        '{"name": "read", "arguments": {a: 1}}',
        '{"name": "\\ud800", "arguments": {}}',
        "{'name': 'read', 'arguments': {}}",
        "[" * 3000,
    ],
)
def test_a_malformed_call_stays_visible_and_is_counted(tiny: Renderer, body: str) -> None:
    parser = parse(tiny, f"Look: <tool_call>{body}</tool_call>")
    assert parser.message.content == f"Look: <tool_call>{body}</tool_call>"
    assert parser.message.tool_calls == ()
    assert parser.malformed_calls == 1


def test_a_call_that_is_never_closed_stays_visible(tiny: Renderer) -> None:
    parser = parse(tiny, "a <tool_call>\n{")
    assert (parser.message.content, parser.malformed_calls) == ("a <tool_call>\n{", 1)


def test_an_unknown_tool_name_is_still_a_call(tiny: Renderer) -> None:
    body = '{"name": "nobody", "arguments": {}}'
    assert parse(tiny, f"<tool_call>{body}</tool_call>").message.tool_calls[0].name == "nobody"


@pytest.mark.parametrize("prompt", [PROMPT, OPEN])
def test_a_call_inside_reasoning_is_reasoning(tiny: Renderer, prompt: str) -> None:
    opener = "" if prompt == OPEN else "<think>"
    parser = parse(tiny, f"{opener}maybe {CALL} no</think>Done.<|im_end|>", prompt)
    assert parser.message == Message(Role.ASSISTANT, "Done.", reasoning=f"maybe {CALL} no")
    assert parser.malformed_calls == 0


def test_a_call_closes_unclosed_reasoning(tiny: Renderer) -> None:
    message = parse(tiny, f"<think>hm {CALL}<|im_end|>").message
    assert (message.reasoning, len(message.tool_calls)) == ("hm", 1)


def test_reasoning_opened_by_the_prompt_is_recognised(tiny: Renderer) -> None:
    parser = parse(tiny, "hm</think>\n\nYes.", OPEN)
    assert (parser.message.reasoning, parser.message.content) == ("hm", "Yes.")
    closed = parse(tiny, "Yes.", PROMPT + "<think>\n\n</think>\n\n")
    assert (closed.message.reasoning, closed.message.content) == (None, "Yes.")


def test_a_family_that_always_reasons_needs_no_opener(tiny_folder: Path) -> None:
    """Like DeepSeek-R1's first template: neither the prompt nor the model writes `<think>`."""
    renderer = load_renderer(Settings(reasoning_parser="deepseek-r1"), tiny_folder)
    message = parse(renderer, "hm</think>\n\nYes.").message
    assert (message.reasoning, message.content) == ("hm", "Yes.")
    message = parse(renderer, "<think>hm</think>\n\nYes.").message
    assert (message.reasoning, message.content) == ("hm", "Yes.")
    closed = parse(renderer, "Yes.", PROMPT + "<think>\n\n</think>\n\n").message
    assert (closed.reasoning, closed.content) == (None, "Yes.")


def test_a_call_is_streamed_as_it_is_sampled(tiny: Renderer) -> None:
    parser = parser_of(tiny)
    assert parser.feed(tiny.encode('<tool_call>\n{"name": "read", "arguments": {')) == []
    assert parser.feed(tiny.encode('"path": "a')) == [
        ToolCallStart(0, "call_0", "read"),
        ToolCallArguments(0, '{"path": "a'),
    ]
    assert parser.feed(tiny.encode('b"}')) == [ToolCallArguments(0, 'b"}')]
    assert parser.feed(tiny.encode("}\n")) == []
    assert parser.feed(tiny.encode("</tool_call>")) == [ToolCallEnd(0)]


def test_reasoning_tokens_count_the_markers(tiny: Renderer) -> None:
    inside = len(tiny.encode("hm"))
    assert parse(tiny, "<think>hm</think>Yes.").reasoning_tokens == inside + 2


@pytest.mark.parametrize(
    ("tools", "choice"), [(TOOLS, ToolChoice(ToolChoiceMode.NONE)), ((), ToolChoice())], ids=["none", "no tools"]
)
def test_unrequested_calls_stay_text(tiny: Renderer, tools: tuple[Tool, ...], choice: ToolChoice) -> None:
    parser = parse(tiny, f"x {CALL}", tools=tools, tool_choice=choice)
    assert parser.message == Message(Role.ASSISTANT, f"x {CALL}")
    assert parser.malformed_calls == 0


def test_the_end_token_is_no_text_and_nothing_after_it_counts(tiny: Renderer) -> None:
    parser = parse(tiny, "Yes.<|im_end|>more <tool_call>")
    assert parser.message.content == "Yes."
    assert parser.kept == len(tiny.encode("Yes.<|im_end|>"))


def test_a_stop_string_inside_the_third_of_five_tokens_keeps_three(tiny: Renderer) -> None:
    ids = [tiny.encode(letter)[0] for letter in "abcde"]
    parser = parser_of(tiny, stop=["c"])
    deltas = [delta for token in ids for delta in parser.feed((token,))]
    assert joined(deltas).content == parser.message.content == "ab"
    assert (parser.kept, parser.stop_string) == (3, "c")


def test_stop_strings_do_not_look_into_reasoning_or_calls(tiny: Renderer) -> None:
    parser = parse(tiny, f"<think>path</think>ok {CALL}<|im_end|>", stop=["path"])
    assert parser.stop_string is None
    assert (parser.message.content, len(parser.message.tool_calls)) == ("ok", 1)


def test_the_start_of_a_stop_string_is_held_back_until_it_is_none(tiny: Renderer) -> None:
    parser = parser_of(tiny, stop=["STOP"])
    assert joined(parser.feed(tiny.encode("ab STO"))).content == "ab"
    assert joined(parser.feed(tiny.encode("RE"))).content == " STORE"


def test_markers_spelled_with_ordinary_tokens_are_text_where_the_vocabulary_has_markers(tiny: Renderer) -> None:
    ids = [token for piece in ("<", "tool", "_call", ">") for token in tiny.encode(piece)]
    parser = parser_of(tiny)
    parser.feed(ids_of(ids))
    parser.finish()
    assert parser.message.content == "<tool_call>"


@pytest.mark.parametrize("calls", [f"\n\n{CALL}", f"\n\n{CALL}\n{CALL[:-20]}", ""], ids=["called", "cut", "text"])
def test_a_parser_is_freed_without_the_garbage_collector(tiny: Renderer, calls: str) -> None:
    gc.disable()  # what is freed now is freed by the count of its references
    try:
        parser = parser_of(tiny)
        parser.feed(ids_of(tiny.encode(f"<think>\nhm\n</think>\n\nSure.{calls}")))
        parser.finish()
        assert parser.message.content == "Sure." and bool(parser.message.tool_calls) == bool(calls)
        freed = weakref.ref(parser)
        del parser
        assert freed() is None
    finally:
        gc.enable()
