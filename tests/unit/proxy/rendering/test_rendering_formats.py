"""Every tool-call format reads what its family writes: whole or in pieces, with markers as tokens or as text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from format_samples import EXPECTED, SAMPLES, TOOLS, Reading, joined, parser_for, read
from hypothesis import given, settings
from hypothesis import strategies as st
from rendering_folders import write_folder

from proxy.rendering.deltas import ReasoningDelta, TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from proxy.rendering.reasoning_formats import REASONING_FORMATS, reasoning_format
from proxy.rendering.tokenizer import Tokenizer
from proxy.rendering.tool_calls.harmony_calls import HARMONY_MARKS
from proxy.rendering.tool_calls.known_formats import TOOL_FORMATS, tool_format
from proxy.rendering.tool_calls.tool_format import read_calls, split_marks
from proxy.types import Message, Role, Tool
from tests.wide import CROSSED, few
from tokengrove.errors import ConfigurationError, UnsupportedParameter

quick = settings(max_examples=60)
NAMES = sorted(SAMPLES)
FORMATS = few(NAMES, ("hermes", "gpt-oss", "pythonic"))
"""Every format; a quick run takes three that are marked, framed and written as code."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer. `marked`: it has a token for every marker that has one in some family."""

    tokenizer: Tokenizer
    marked: bool

    def read(self, calls: str | None, text: str, reasoning: str = "none", cuts: Sequence[int] = (), **given_: object):  # type: ignore[no-untyped-def]
        ids = self.tokenizer.encode(text)
        edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
        parser = parser_for(self.tokenizer, calls, reasoning, **given_)  # type: ignore[arg-type]
        return read(parser, (ids[a:b] for a, b in itertools.pairwise(edges)))


@pytest.fixture(scope="session")
def marked(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    marks = {mark for calls in TOOL_FORMATS.values() for mark in (calls.opener, calls.closer, *calls.marks)}
    marks |= {mark for form in REASONING_FORMATS.values() for mark in (form.opener, form.closer, *form.hidden)}
    # No family has tokens for tags with attributes or for a whole header.
    tokens = {mark for mark in marks if mark.endswith((">", "]")) and "<|channel|>analysis" not in mark}
    tokens = {mark for mark in tokens if not mark.startswith(("</f", "</p", "</i", "<f"))} | set(HARMONY_MARKS)
    folder = write_folder(tmp_path_factory.mktemp("marked"), tiny_folder, None, sorted(tokens), ["<|im_end|>"], "qwen3")
    return Vocabulary(Tokenizer.load(folder), True)


@pytest.fixture(scope="session")
def unmarked(tiny_folder: Path) -> Vocabulary:
    return Vocabulary(Tokenizer.load(tiny_folder), False)


@pytest.fixture(params=["marked", "unmarked"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Vocabulary)
    return found


def needs_tokens(name: str, vocabulary: Vocabulary) -> None:
    if name == "gpt-oss" and not vocabulary.marked:
        pytest.skip("harmony's markers are tokens in every vocabulary that has them")


def parsed(calls: Sequence[tuple[str, str]]) -> list[tuple[str, object]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name", NAMES)
def test_the_calls_that_a_family_writes_are_read(name: str, vocabulary: Vocabulary) -> None:
    before = "" if name == "gpt-oss" else "Let me look.\n"
    reading = vocabulary.read(name, before + SAMPLES[name] + "<|im_end|>")
    assert parsed(reading.calls) == EXPECTED
    assert reading.parser.message.content == before.strip()
    assert reading.parser.malformed_calls == 0


@pytest.mark.parametrize("name", NAMES)
def test_read_calls_reads_them_from_a_text(name: str) -> None:
    found = parsed(read_calls(tool_format(name), SAMPLES[name], TOOLS))
    assert found == EXPECTED[: len(found)] and found


def pieces_of(name: str) -> list[str]:
    """Whole samples, their marks, the text between marks, and text that models write around calls."""
    calls, sample = tool_format(name), SAMPLES[name]
    cut = [sample[: len(sample) * part // 7] for part in range(1, 7)]
    pieces = [piece for piece, _ in split_marks(sample, (calls.opener, calls.closer, *calls.marks))]
    around = ["{", "}", "[", '"', "\n", " ", "é🙂", "So.", "<", "</", "<think>", "</think>", "<|im_end|>", "null", ", "]
    return [sample, sample, *cut, *dict.fromkeys(pieces), *around]


@CROSSED
@pytest.mark.parametrize("name", FORMATS)
@quick
@given(data=st.data())
def test_deltas_joined_are_the_message_under_every_chunking(
    name: str, vocabulary: Vocabulary, data: st.DataObject
) -> None:
    needs_tokens(name, vocabulary)
    text = "".join(data.draw(st.lists(st.sampled_from(pieces_of(name)), max_size=6)))
    cuts = data.draw(st.lists(st.integers(0, 200), max_size=8))
    stop = data.draw(st.sampled_from([(), ("So",), ("🙂", "}\n")]))
    reasoning = "gpt-oss" if name == "gpt-oss" else data.draw(st.sampled_from(["none", "think"]))
    opened = reasoning != "none" and data.draw(st.booleans())
    given_ = {"stop": stop, "opened": opened}
    whole = vocabulary.read(name, text, reasoning, **given_)
    for edges in (cuts, range(400)):
        reading = vocabulary.read(name, text, reasoning, edges, **given_)
        assert reading.parser.message == whole.parser.message == joined(reading.deltas)
        assert facts(reading) == facts(whole)


@CROSSED
@pytest.mark.parametrize("name", FORMATS)
@quick
@given(data=st.data())
def test_a_run_that_is_fed_as_text_is_read_like_its_tokens_one_by_one(
    name: str, vocabulary: Vocabulary, data: st.DataObject
) -> None:
    needs_tokens(name, vocabulary)
    ids = vocabulary.tokenizer.encode("".join(data.draw(st.lists(st.sampled_from(pieces_of(name)), max_size=6))))
    stop = data.draw(st.sampled_from([(), ("So",), ("🙂", "}\n")]))
    reasoning = "gpt-oss" if name == "gpt-oss" else data.draw(st.sampled_from(["none", "think"]))
    size = data.draw(st.integers(1, 9))
    one_by_one = read(parser_for(vocabulary.tokenizer, name, reasoning, stop=stop), ([token] for token in ids))
    parser, deltas = parser_for(vocabulary.tokenizer, name, reasoning, stop=stop), []
    for start in range(0, len(ids), size):
        run = ids[start : start + size]
        before = parser.reasoning_tokens
        text = parser.feed_text(run)
        if text is None:
            text = [delta for token in run for delta in parser.feed([token])]
        else:
            assert parser.reasoning_tokens - before in (0, len(run))
            assert all(isinstance(delta, TextDelta | ReasoningDelta) for delta in text)
        deltas += text
    deltas += parser.finish()
    whole = Reading(parser, deltas)
    assert parser.message == one_by_one.parser.message == joined(deltas)
    assert (*facts(whole), parser.kept) == (*facts(one_by_one), one_by_one.parser.kept)


def test_text_after_calls_without_an_opening_marker_is_dropped_under_every_chunking(vocabulary: Vocabulary) -> None:
    call = '{"name": "list", "parameters": {}}'
    for cuts in ([], range(400)):
        message = vocabulary.read("llama3", call + "{" + call, "none", cuts).parser.message
        assert (message.content, [called.name for called in message.tool_calls]) == ("", ["list"])


def facts(reading: Reading) -> tuple[object, ...]:
    parser = reading.parser
    kept = parser.kept if parser.stop_string is None else None  # exact in every chunking, seen by another test
    return parser.malformed_calls, parser.reasoning_tokens, parser.stop_string, kept


@pytest.mark.parametrize("name", NAMES)
def test_a_cut_call_is_text_or_a_call_already_streamed(name: str, marked: Vocabulary) -> None:
    """Wherever the output is cut: no call lacks a start, no text before a start is lost, broken calls are counted."""
    sample = SAMPLES[name]
    for end in range(1, len(sample)):
        reading = marked.read(name, sample[:end])
        message = reading.parser.message
        assert joined(reading.deltas) == message
        for call, (name_, arguments) in zip(message.tool_calls, EXPECTED, strict=False):
            assert call.name == name_
            if call is not message.tool_calls[-1] or not reading.parser.malformed_calls:
                assert json.loads(call.arguments) == arguments


@CROSSED
@pytest.mark.parametrize("name", NAMES)
def test_a_call_inside_closed_reasoning_is_reasoning(name: str, vocabulary: Vocabulary) -> None:
    if name == "gpt-oss":
        pytest.skip("channels say what is reasoning")
    reading = vocabulary.read(name, f"<think>maybe {SAMPLES[name]} no</think>Done.", "think")
    assert reading.parser.message == Message(Role.ASSISTANT, "Done.", reasoning=f"maybe {SAMPLES[name]} no")


@pytest.mark.parametrize("name", NAMES)
def test_a_call_closes_unclosed_reasoning(name: str, vocabulary: Vocabulary) -> None:
    if name == "gpt-oss":
        pytest.skip("channels say what is reasoning")
    reading = vocabulary.read(name, f"maybe {SAMPLES[name]}", "think", opened=True)
    assert reading.parser.message.reasoning == "maybe"
    assert parsed(reading.calls) == EXPECTED


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"pythonic", "lfm2", "gemma4", "functiongemma"}))
def test_a_call_is_streamed_before_it_is_closed(name: str, marked: Vocabulary) -> None:
    ids = marked.tokenizer.encode(SAMPLES[name])
    parser = parser_for(marked.tokenizer, name)
    kinds: list[type] = []
    fragments = 0
    for token in ids:
        for delta in parser.feed((token,)):
            kinds.append(type(delta))
            fragments += isinstance(delta, ToolCallArguments) and ToolCallEnd not in kinds
    assert kinds[0] is ToolCallStart
    assert fragments > 5


@pytest.mark.parametrize("name", ["llama3", "pythonic"])
def test_a_call_without_a_marker_must_name_a_known_tool(name: str, vocabulary: Vocabulary) -> None:
    sample = SAMPLES[name].removeprefix(tool_format(name).opener).removesuffix(tool_format(name).closer)
    assert parsed(vocabulary.read(name, sample).calls) == EXPECTED
    other = (Tool("other"),)
    reading = vocabulary.read(name, sample, tools=other)
    assert (reading.parser.message, reading.parser.malformed_calls) == (Message(Role.ASSISTANT, sample), 0)
    after = vocabulary.read(name, f"Well: {sample}")
    assert after.parser.message == Message(Role.ASSISTANT, f"Well: {sample}")
    assert parsed(vocabulary.read(name, f"<think>a</think>\n{sample}", "think").calls) == EXPECTED


@pytest.mark.parametrize("answer", ['{"answer": 3}', '{"name": "Bob", "age": 3} ok', "[1, 2]", "[Note] yes", "{", "["])
@pytest.mark.parametrize("name", ["llama3", "pythonic"])
def test_an_answer_that_begins_with_a_bracket_is_text(name: str, answer: str, vocabulary: Vocabulary) -> None:
    reading = vocabulary.read(name, answer)
    assert (reading.parser.message, reading.parser.malformed_calls) == (Message(Role.ASSISTANT, answer), 0)


def test_mistrals_compact_calls_are_read(vocabulary: Vocabulary) -> None:
    text = '[TOOL_CALLS]read[ARGS]{"path": "a é.txt", "n": 2}[TOOL_CALLS]list[CALL_ID]123456789[ARGS]{}'
    assert parsed(vocabulary.read("mistral", f"Hm.{text}").calls) == EXPECTED
    assert parsed(vocabulary.read("mistral", '[TOOL_CALLS]list{"a": 1}').calls) == [("list", {"a": 1})]


CODER = "<tool_call>\n<function=read>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("path", "12", "12"),
        ("path", "null", "null"),
        ("path", "  indented\n\nlines \n", "  indented\n\nlines \n"),
        ("path", 'say "é" \\ <b>&</b>', 'say "é" \\ <b>&</b>'),
        ("path", "<parameter=x> <tool_call>", "<parameter=x> <tool_call>"),
        ("n", "12", 12),
        ("n", " 12 ", 12),
        ("n", "twelve", "twelve"),
        ("on", "True", True),
        ("on", "false", False),
        ("any", "True", "True"),
        ("any", "12", 12),
        ("any", '{"a": [1]}', {"a": [1]}),
        ("any", "NaN", "NaN"),
        ("maybe", "12", "12"),
        ("maybe", "null", None),
        ("maybe", "None", None),
        ("list", "[1, 2]", [1, 2]),
        ("list", "None", None),
        ("unknown", "1", 1),
        ("unknown", "text", "text"),
    ],
)
def test_the_schema_gives_the_type_of_an_argument(key: str, value: str, wanted: object, vocabulary: Vocabulary) -> None:
    reading = vocabulary.read("qwen3_coder", CODER.format(key=key, value=value))
    assert parsed(reading.calls) == [("read", {key: wanted})]


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/Text"},
        {"oneOf": [{"type": "string", "maxLength": 3}, {"enum": ["1"]}]},
        {"enum": ["1", "2"]},
        {"const": "1"},
    ],
)
def test_a_schema_that_only_allows_strings_is_seen_through(schema: dict[str, object], vocabulary: Vocabulary) -> None:
    parameters = {"type": "object", "properties": {"key": schema}, "$defs": {"Text": {"type": "string"}}}
    text = CODER.format(key="key", value="1")
    reading = vocabulary.read("qwen3_coder", text, tools=(Tool("read", "", parameters),))
    assert reading.calls == [("read", '{"key": "1"}')]


@CROSSED
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<tool_call>\n<function=re ad>\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\nread\n</tool_call>"),
        ("qwen3_coder", '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>'),
        ("glm45", "<tool_call>two words</tool_call>"),
        ("glm45", "<tool_call></tool_call>"),
        ("glm45", "<tool_call>read<arg_value>1</arg_value></tool_call>"),
        ("minimax-m2", "<minimax:tool_call>\n</minimax:tool_call>"),
        ("minimax-m2", "<minimax:tool_call><invoke name=read></invoke></minimax:tool_call>"),
        ("kimi_k2", "<|tool_calls_section_begin|> <|tool_calls_section_end|>"),
        ("mistral", "[TOOL_CALLS] I would rather not."),
        ("mistral", "[TOOL_CALLS][1]"),
        ("llama3", "<|python_tag|>print(1)"),
        ("pythonic", "<|python_start|>[read('a')]<|python_end|>"),
        ("pythonic", "<|python_start|>[read(a=b)]<|python_end|>"),
        ("gemma4", "<|tool_call>read{}<tool_call|>"),
        ("cohere", "<|START_ACTION|>[]<|END_ACTION|>"),
        ("deepseekv31", "<\uff5ctool\u2581calls\u2581begin\uff5c>read{}<\uff5ctool\u2581calls\u2581end\uff5c>"),
    ],
)
def test_a_malformed_call_stays_visible_and_is_counted(name: str, text: str, vocabulary: Vocabulary) -> None:
    reading = vocabulary.read(name, f"Look: {text}")
    assert reading.parser.message == Message(Role.ASSISTANT, f"Look: {text}")
    assert reading.parser.malformed_calls == 1


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "read", "arguments": {"a": NaN}}</tool_call> b', '{"a": '),
        ("hermes", '<tool_call>{"name": "read", "arguments": {}} trailing</tool_call> b', "{}"),
        ("hermes", '<tool_call>{"name": "read", "arguments": {"a": 1}', '{"a": 1}'),
        ("qwen3_coder", "<tool_call><function=read><parameter=path>\nab</tool_call> b", '{"path": "ab'),
        ("kimi_k2", SAMPLES["kimi_k2"].partition("2}")[0] + "2 oops", '{"path": "a é.txt", "n": 2 '),
        ("mistral", '[TOOL_CALLS][{"name": "read", "arguments": {"a": nope', '{"a": n'),
    ],
)
def test_a_call_malformed_after_its_start_stays_a_call(
    name: str, text: str, arguments: str, vocabulary: Vocabulary
) -> None:
    reading = vocabulary.read(name, f"Look: {text}")
    assert reading.calls == [("read", arguments)]
    assert (reading.parser.message.content, reading.parser.malformed_calls) == ("Look:", 1)


def test_a_call_without_a_marker_that_breaks_after_its_start_is_counted(vocabulary: Vocabulary) -> None:
    reading = vocabulary.read("llama3", '{"name": "read", "parameters": {"a": NaN}}')
    assert (reading.calls, reading.parser.malformed_calls) == ([("read", '{"a": ')], 1)


def test_a_call_after_a_malformed_one_of_a_format_without_closing_marker_is_read(vocabulary: Vocabulary) -> None:
    text = '[TOOL_CALLS] I would rather not. [TOOL_CALLS][{"name": "read", "arguments": {}}]'
    reading = vocabulary.read("mistral", text)
    assert (reading.calls, reading.parser.malformed_calls) == ([("read", "{}")], 1)


def test_gpt_oss_channels_are_distinguished(marked: Vocabulary) -> None:
    text = (
        "<|channel|>analysis<|message|>Hm <tool_call>.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look.<|end|><|start|>assistant to=functions.read<|channel|>commentary json<|message|>"
        '{"path": "a"}<|im_end|>'
    )
    reading = marked.read("gpt-oss", text, "gpt-oss")
    assert reading.parser.message.content == "I look."
    assert reading.parser.message.reasoning == "Hm <tool_call>."
    assert reading.calls == [("read", '{"path": "a"}')]
    opened = marked.read(
        "gpt-oss", "Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.", "gpt-oss", opened=True
    )
    assert opened.parser.message == Message(Role.ASSISTANT, "Yes.", reasoning="Hm")


def test_gpt_oss_without_any_header_is_text(marked: Vocabulary) -> None:
    assert marked.read("gpt-oss", "to be sure", "gpt-oss").parser.message.content == "to be sure"


def test_gpt_oss_unrequested_calls_stay_text(marked: Vocabulary) -> None:
    reading = marked.read(None, SAMPLES["gpt-oss"], "gpt-oss")
    assert reading.parser.message.content == '{"path": "a é.txt", "n": 2}{}'


def test_gpt_oss_malformed_calls_stay_visible(marked: Vocabulary) -> None:
    text = "<|channel|>commentary to=functions.read<|message|>path=a"
    reading = marked.read("gpt-oss", f"{text}<|end|>", "gpt-oss")
    assert (reading.parser.message.content, reading.parser.malformed_calls) == (text, 1)


@pytest.mark.parametrize(
    ("name", "text", "reasoning"),
    [
        ("think", "<think>\nhm\n</think>\n\nYes.", "hm"),
        ("kimi", "\u25c1think\u25b7hm\u25c1/think\u25b7Yes.", "hm"),
        ("mistral", "[THINK]hm[/THINK]Yes.", "hm"),
        ("gemma4", "<|channel>thought\nhm<channel|>Yes.", "hm"),
        ("gemma4", "<|channel>thou<channel|>Yes.", "thou"),
        ("gemma4", "<|channel>other<channel|>Yes.", "other"),
        ("cohere", "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>", "hm"),
        ("seed_oss", "<seed:think>hm</seed:think>Yes.", "hm"),
        ("gpt-oss", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.", "hm"),
    ],
)
def test_reasoning_is_distinguished_from_the_answer(name: str, text: str, reasoning: str, marked: Vocabulary) -> None:
    for cuts in ((), range(100)):
        reading = marked.read(None, text, name, cuts)
        assert reading.parser.message == Message(Role.ASSISTANT, "Yes.", reasoning=reasoning) == joined(reading.deltas)


def test_none_leaves_reasoning_in_the_text(marked: Vocabulary) -> None:
    assert marked.read(None, "<think>a</think>b", "none").parser.message.content == "<think>a</think>b"


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigurationError, match=r"--tool-parser nope is not one of hermes, .*kimi_k2"):
        tool_format("nope")
    with pytest.raises(ConfigurationError, match=r"--reasoning-parser nope is not one of think, .*gpt-oss.*none"):
        reasoning_format("nope")


# The parser names of SGLang 0.5.5 and verl 0.6 that stand for a format of their own.
SGLANG_TOOLS = (
    "deepseekv3 deepseekv31 glm glm45 gpt-oss kimi_k2 llama3 mistral pythonic qwen qwen25 qwen3_coder minimax-m2"
)
SGLANG_REASONING = "deepseek-r1 deepseek-v3 glm45 gpt-oss kimi kimi_k2 qwen3 qwen3-thinking minimax step3 nemotron_3"


# The parsers of verl 0.9 (multi_turn.format), and what SGLang and vLLM call the same formats.
VERL_TOOLS = {
    **{"hermes": "qwen25", "gpt-oss": "openai", "qwen3_coder": "qwen3_xml", "glm": "glm45", "seed": "seed_oss"},
    **{"minimax": "minimax_m2", "kimi": "kimi_k2", "deepseek_v4": "deepseekv4", "gemma4": "gemma4"},
}


def test_the_names_of_sglang_and_verl_are_known() -> None:
    assert {*SGLANG_TOOLS.split(), *VERL_TOOLS} <= TOOL_FORMATS.keys()
    for name, own in VERL_TOOLS.items():
        assert TOOL_FORMATS[name] is TOOL_FORMATS[own]
    assert set(SGLANG_REASONING.split()) <= REASONING_FORMATS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_forced_call_is_read_back_or_refused_by_name(name: str) -> None:
    calls = tool_format(name)
    try:
        parts = calls.forced(TOOLS[0])
    except UnsupportedParameter as error:
        assert f"format {calls.name} cannot be forced" in str(error)
        assert name in (
            "qwen3_coder",
            "seed_oss",
            "glm45",
            "minimax-m2",
            "gemma4",
            "functiongemma",
            "lfm2",
            "pythonic",
        ) or (name.startswith("deepseekv") and name not in ("deepseekv3", "deepseekv31"))
        return
    text = "".join('{"path": "a"}' if part.schema is not None else part.text for part in parts)
    end = "<|call|>" if name == "gpt-oss" else ""
    assert read_calls(calls, text + end, TOOLS) == [("read", '{"path": "a"}')]
