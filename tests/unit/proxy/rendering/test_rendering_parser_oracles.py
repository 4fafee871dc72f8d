"""Our parsers read outputs like those of the `renderers` package, and like SGLang's if it is installed.

These differences are intended; the fields of `Family` say where they apply ("theirs" are those of `renderers`):
- Values of tagged arguments keep their white space, as in SGLang, because indentation is part of code. Theirs strip it.
- `drafts`: in every family, a call closes reasoning that nothing else closes, and a call before the end of reasoning is
  part of it. Their GLM ends reasoning at any call, their DeepSeek never does.
- `sections`: ours read every section of calls and count one without a call as malformed. Theirs read the first.
- `forced`: their GLM treats every answer as reasoning unless thinking is off. Ours looks at the tokens.
- `after`: text after a call is not part of the message. Their GLM and Gemma put it before the calls.
- An unclosed or broken call becomes text or, once a client has seen its beginning, a call. Theirs drop it. Both count
  it as malformed.
- A call of an unknown tool is still a call. Their GLM and Gemma report UNKNOWN_TOOL.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from format_samples import SAMPLES, TOOLS, library_reading, parser_for, read
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rendering_folders import write_folder

from proxy.rendering.templates.library_template import LibraryTemplate
from proxy.rendering.tokenizer import Tokenizer
from proxy.rendering.tool_calls.harmony_calls import HARMONY_MARKS
from proxy.rendering.tool_calls.known_formats import TOOL_FORMATS, tool_format
from proxy.rendering.tool_calls.tool_format import split_marks
from proxy.types import Message

quick = settings(max_examples=80)


@dataclass(frozen=True)
class Family:
    """A library renderer, our names for its formats, and how its prompt opens an answer."""

    library: str
    calls: str
    reasoning: str
    header: str
    drafts: bool = True
    after: bool = True
    sections: bool = False
    forced: bool = False
    end: str = "<|im_end|>"


FAMILIES = (
    Family("qwen3", "hermes", "qwen3", "<|im_start|>assistant\n"),
    Family("qwen3.5", "qwen3_coder", "qwen3", "<|im_start|>assistant\n"),
    Family("nemotron-3", "qwen3_coder", "nemotron_3", "<|im_start|>assistant\n"),
    Family("glm-4.5", "glm45", "glm45", "<|assistant|>", drafts=False, after=False, forced=True, end="<|user|>"),
    Family("minimax-m2", "minimax-m2", "minimax", "]~b]ai\n", end="[e~["),
    Family(
        "deepseek-v3",
        "deepseekv3",
        "deepseek-v3",
        "<\uff5cAssistant\uff5c>",
        drafts=False,
        sections=True,
        end="<\uff5cend\u2581of\u2581sentence\uff5c>",
    ),
    Family("kimi-k2", "kimi_k2", "kimi_k2", "<|im_assistant|>assistant<|im_middle|>", sections=True),
)
_OTHER_MARKERS = (
    "<|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|endoftext|> <|vision_start|> <|vision_end|> "
    "<|image_pad|> <|video_pad|> <tool_response> </tool_response> [gMASK] <sop> <|system|> <|user|> <|assistant|> "
    "<|observation|> /nothink ]~!b[ ]~b] [e~[ <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> "
    "<|end_of_text|> <|eom_id|> <\uff5cUser\uff5c> <\uff5cAssistant\uff5c> <\uff5ctool\u2581outputs\u2581begin\uff5c> "
    "<\uff5ctool\u2581outputs\u2581end\uff5c> <\uff5ctool\u2581output\u2581begin\uff5c> "
    "<\uff5ctool\u2581output\u2581end\uff5c> <\uff5cbegin\u2581of\u2581sentence\uff5c> "
    "<\uff5cend\u2581of\u2581sentence\uff5c> <|tool_response> <tool_response|> <|turn> <turn|> <bos> <eos> <|think|> "
    '<|tool> <tool|> <|image> <|image|> <image|> <|audio> <|audio|> <audio|> <|video|> <|"|>'
)


@pytest.fixture(scope="session")
def tokenizer(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    marks = {mark for calls in TOOL_FORMATS.values() for mark in (calls.opener, calls.closer, *calls.marks)}
    tokens = {mark for mark in marks if mark.endswith((">", "]")) and not mark.startswith(("</f", "</p", "</i", "<f"))}
    tokens |= {*_OTHER_MARKERS.split(), *HARMONY_MARKS}
    folder = write_folder(tmp_path_factory.mktemp("all"), tiny_folder, None, sorted(tokens), ["<|im_end|>"], "x")
    return Tokenizer.load(folder)


@pytest.fixture(scope="session", params=FAMILIES, ids=lambda family: family.library)
def family(request: pytest.FixtureRequest) -> Family:
    assert isinstance(request.param, Family)
    return request.param


@pytest.fixture(scope="session")
def oracle(family: Family, tokenizer: Tokenizer) -> LibraryTemplate:
    return LibraryTemplate(family.library, tokenizer)


def both(
    family: Family, oracle: LibraryTemplate, tokenizer: Tokenizer, text: str, opened: bool = False
) -> tuple[Message, int, Any]:
    """Return our reading and theirs."""
    prompt = tokenizer.encode(f"{family.header}<think>\n" if opened else family.header).tolist()
    end = [tokenizer.token_id(family.end)]
    ids = tokenizer.encode(text).tolist()
    parser = parser_for(tokenizer, family.calls, family.reasoning, opened=opened)
    reading = read(parser, [ids])
    theirs = library_reading(oracle, [*ids, *end], prompt, TOOLS)  # type: ignore[list-item]
    return reading.parser.message, reading.parser.malformed_calls, theirs


def calls_of(message: Message) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


def their_calls(theirs: Any) -> list[tuple[str, Any]]:
    return [(call.name, call.arguments or {}) for call in theirs.tool_calls if call.status == "ok"]


def check(message: Message, malformed: int, theirs: Any) -> None:
    assert message.reasoning == ((theirs.reasoning_content or "").strip() or None)
    assert calls_of(message) == their_calls(theirs)
    assert malformed == len(theirs.tool_calls) - len(their_calls(theirs))
    if not malformed:
        assert message.content == theirs.content.strip()


@pytest.mark.parametrize("opened", [False, True], ids=["", "opened"])
@pytest.mark.parametrize("text", ["{}", "Hm.\n\n{}", "<think>a</think>{}", "a</think>b{}", "<think>a</think>\nb\n{}\n"])
def test_calls_are_read_as_the_library_reads_them(
    family: Family, oracle: LibraryTemplate, tokenizer: Tokenizer, text: str, opened: bool
) -> None:
    if opened and "</think>" not in text and not family.drafts:
        pytest.skip("a call closes reasoning, for every family alike")
    if family.forced and not opened and not text.startswith("<think>"):
        pytest.skip("theirs does not look whether reasoning was opened")
    check(*both(family, oracle, tokenizer, text.format(SAMPLES[family.calls]), opened))


@quick
@given(data=st.data(), opened=st.booleans())
def test_random_outputs_are_read_as_the_library_reads_them(
    family: Family, oracle: LibraryTemplate, tokenizer: Tokenizer, data: st.DataObject, opened: bool
) -> None:
    calls = tool_format(family.calls)
    words = ["<think>", "</think>", "\n", " ", "Sure.", "é🙂", "{", "<b>", "}"]
    broken = [f"{calls.opener}{word}{calls.closer}" for word in ("", "{1}", "two words", "<x>")]
    pieces = data.draw(st.lists(st.sampled_from([*words, *broken[1:], SAMPLES[family.calls]]), max_size=6))
    text = "".join(pieces)
    before, _, after = text.partition("</think>")
    if not family.drafts:
        reasons = opened or before.lstrip().startswith("<think>")
        assume(not (reasons and calls.opener in before))
    if not family.after:
        assume(not text.rpartition(calls.closer)[2].strip() or calls.opener not in text)
        assume(text.count(calls.opener) < 2 or SAMPLES[family.calls] in text)
        assume("<think>" not in after and "</think>" not in after and not any(word in text for word in broken))
        assume("</think>" not in text or before.lstrip().startswith("<think>") or opened)
        between = text.partition(calls.opener)[2].replace(SAMPLES[family.calls], "")
        assume(not between.split(calls.closer)[-1].strip())
    assume(not family.forced or opened or text.lstrip().startswith("<think>"))
    assume(not family.sections or (text.count(calls.opener) < 2 and not any(word in text for word in broken)))
    check(*both(family, oracle, tokenizer, text, opened))


CODE = "  if x:\n    pass"


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (FAMILIES[1], f"<tool_call>\n<function=read>\n<parameter=path>\n{CODE}\n</parameter>\n</function></tool_call>"),
        (FAMILIES[3], f"<tool_call>read\n<arg_key>path</arg_key>\n<arg_value>{CODE}</arg_value>\n</tool_call>"),
    ],
    ids=["qwen3.5", "glm-4.5"],
)  # fmt: skip
def test_indentation_of_tagged_arguments_is_kept_where_the_library_strips_it(
    family: Family, text: str, tokenizer: Tokenizer
) -> None:
    message, _, theirs = both(family, LibraryTemplate(family.library, tokenizer), tokenizer, text)
    assert calls_of(message) == [("read", {"path": CODE})]
    assert their_calls(theirs) == [("read", {"path": CODE.strip()})]


def test_llama_calls_are_read_as_the_library_reads_them(tokenizer: Tokenizer) -> None:
    from renderers.parsing import parse_llama_3

    for text in (
        '{"name": "read", "parameters": {"path": "a", "n": [1, null]}}',
        ' \n{"name": "list", "parameters": {}}\n',
        '{"name": "list"}',
        '{"answer": 1}',
        "{",
        "Hello {",
        '{"name": "read", "parameters": {"path": "a"}',
    ):
        reading = read(parser_for(tokenizer, "llama3"), [tokenizer.encode(text).tolist()])
        theirs = parse_llama_3(_Converted(tokenizer), tokenizer.encode(text).tolist(), stop_ids=set())
        if reading.parser.malformed_calls:
            continue  # a client has seen its beginning
        assert calls_of(reading.parser.message) == their_calls(theirs)
        assert reading.parser.message.content == theirs.content


@quick
@given(data=st.data())
def test_gpt_oss_outputs_are_read_as_the_library_reads_them(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Theirs needs the header that the prompt begins. The outputs have no unclosed calls, no text outside messages and
    no messages without a channel, because theirs drops all three."""
    from renderers.parsing import parse_gpt_oss

    head = "<|start|>assistant"
    blocks = [
        "<|channel|>analysis<|message|>think é🙂 <|end|>",
        "<|channel|>final<|message|>Yes.\n<|end|>",
        "<|channel|>commentary<|message|>Look:<|end|>",
        '<|channel|>commentary to=functions.read <|constrain|>json<|message|>{"path": "a"}<|call|>',
        ' to=functions.list<|channel|>commentary json<|message|>{"n": [1, 2]}<|call|>',
        "<|channel|>commentary to=browser.find<|message|>{}<|end|>",
        "<|channel|>analysis to=functions.list<|message|>{}<|end|>",
    ]
    text = head.join(data.draw(st.lists(st.sampled_from(blocks), min_size=1, max_size=5)))
    mark = {
        name: tokenizer.token_id(f"<|{name}|>") for name in ("return", "call", "start", "end", "channel", "message")
    }
    theirs = parse_gpt_oss(
        _Converted(tokenizer),
        tokenizer.encode(head + text).tolist(),
        constrain_id=tokenizer.token_id("<|constrain|>"),
        **{f"{name}_id": token for name, token in mark.items()},
    )
    reading = read(parser_for(tokenizer, "gpt-oss", "gpt-oss"), [tokenizer.encode(text).tolist()])
    check(reading.parser.message, reading.parser.malformed_calls, theirs)


class _Converted:
    """The two tokenizer methods that SGLang's functions call."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(ids)

    def convert_tokens_to_ids(self, text: str) -> int | None:
        return self._tokenizer.token_id(text)


def test_gemma_arguments_are_read_as_the_library_reads_them(tokenizer: Tokenizer) -> None:
    from renderers.gemma4 import _ArgumentParser

    quote = '<|"|>'
    for body in (
        "{}",
        "{n:2}",
        f"{{path:{quote}a, b: {{}}{quote},on:true}}",
        f"{{any:[1,2.5,{quote}x{quote},null],{quote}odd key{quote}:{{a:-1e3}}}}",
        "{path:bare words,n: 3 }",
    ):
        text = f"<|tool_call>call:read{body}<tool_call|>"
        reading = read(parser_for(tokenizer, "gemma4"), [tokenizer.encode(text).tolist()])
        assert calls_of(reading.parser.message) == [("read", _ArgumentParser(body).parse())]


SGLANG = {
    "hermes": "qwen25",
    "qwen3_coder": "qwen3_coder",
    "glm45": "glm45",
    "minimax-m2": "minimax-m2",
    "deepseekv3": "deepseekv3",
    "deepseekv31": "deepseekv31",
    "kimi_k2": "kimi_k2",
    "mistral": "mistral",
    "llama3": "llama3",
    "pythonic": "pythonic",
}


@pytest.mark.parametrize("name", sorted(SGLANG))
def test_sglang_reads_the_same_calls(name: str, tokenizer: Tokenizer) -> None:
    pytest.importorskip("sglang", reason="SGLang is not installed here", exc_type=ImportError)
    from sglang.srt.entrypoints.openai.protocol import Function
    from sglang.srt.entrypoints.openai.protocol import Tool as SglangTool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    tools = [
        SglangTool(type="function", function=Function(name=tool.name, parameters=dict(tool.parameters) or None))
        for tool in TOOLS
    ]
    # SGLang's Mistral parser requires the space that the family's first template wrote.
    sample = SAMPLES[name].replace("[TOOL_CALLS][", "[TOOL_CALLS] [")
    text = "Look.\n" * (name not in ("llama3", "pythonic")) + sample
    _, found = FunctionCallParser(tools, SGLANG[name]).parse_non_stream(text)
    reading = read(parser_for(tokenizer, name), [tokenizer.encode(text).tolist()])
    assert calls_of(reading.parser.message) == [(call.name, json.loads(call.parameters)) for call in found]


def test_every_mark_of_a_sample_is_found(family: Family) -> None:
    """The samples are whole: each has its opening marker and, if the format has one, its closing marker."""
    calls = tool_format(family.calls)
    marks = [piece for piece, mark in split_marks(SAMPLES[family.calls], (calls.opener, calls.closer)) if mark]
    assert marks == list(itertools.islice(itertools.cycle((calls.opener, calls.closer)), len(marks)))
