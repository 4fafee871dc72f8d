"""The renderer: choice of family, full renderings equal to the chat template's, refusals by name, forced calls."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from probe_conversations import probe_conversations
from transformers import AutoTokenizer

from proxy.rendering import Renderer, load_renderer
from proxy.rendering.templates.chat_template import ChatTemplate
from proxy.rendering.templates.message_dicts import Arguments, to_dicts, tool_dicts
from proxy.settings import Settings
from proxy.types import ImagePart, Message, Role, Tool, ToolCall, ToolChoice, ToolChoiceMode
from tests.unit.proxy.rendering.rendering_folders import FAMILIES
from tokengrove.errors import ConfigurationError, InvalidRequest, UnsupportedParameter

TOOLS = (
    Tool("read", "Read.", {"type": "object", "properties": {"path": {"type": "string"}}}),
    Tool("list", "List."),
)
USER = Message(Role.USER, "Hi")


@pytest.mark.parametrize("name", FAMILIES)
def test_full_renders_equal_the_chat_template(published: Callable[[str], Path], name: str) -> None:
    renderer = load_renderer(Settings(), published(name))
    hugging_face = AutoTokenizer.from_pretrained(published(name))
    style = Arguments.STRING if name == "deepseekv3" else Arguments.OBJECT
    compared = 0
    for messages, tools, prompt in probe_conversations():
        if not prompt:
            continue
        try:
            ids = renderer.render(messages, tools, {})
        except InvalidRequest:
            continue
        text = hugging_face.apply_chat_template(
            to_dicts(messages, style), tools=tool_dicts(tools), tokenize=False, add_generation_prompt=True
        )
        assert ids.tolist() == hugging_face(text, add_special_tokens=False)["input_ids"]
        compared += 1
    assert compared >= 4


@pytest.mark.parametrize("name", ["tiny", "gptoss"])
def test_loading_never_opens_a_connection(
    name: str, tiny_folder: Path, published: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder if name == "tiny" else published(name)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a renderer went looking outside")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    renderer = load_renderer(Settings(), folder)
    assert renderer.render([USER], TOOLS, {})


@pytest.mark.parametrize("which", ["tiny", "qwen3"])
def test_qwen3_is_found_by_its_configuration(which: str, request: pytest.FixtureRequest) -> None:
    renderer: Renderer = request.getfixturevalue(which)
    assert renderer.family == "qwen3"
    assert [renderer.decode([token]) for token in renderer.stop_token_ids] == ["<|im_end|>", "<|endoftext|>"]


def test_qwen3_is_found_by_parity_where_the_configuration_is_silent(tiny_folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_folder / name, tmp_path / name)
    assert load_renderer(Settings(), tmp_path).family == "qwen3"


def test_another_template_of_the_same_model_type_is_another_family(published: Callable[[str], Path]) -> None:
    renderer = load_renderer(Settings(), published("qwen3_instruct_2507"))
    assert renderer.family == "qwen3-instruct"


def test_marker_text_in_a_message_has_the_ids_of_the_template(qwen3: Renderer, qwen3_folder: Path) -> None:
    message = Message(Role.USER, "<tool_call> and <|im_start|>assistant\n<think>")
    text = AutoTokenizer.from_pretrained(qwen3_folder).apply_chat_template(
        [{"role": "user", "content": message.content}], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert qwen3.render([message], (), {}).tolist() == text


def test_template_options_reach_the_template_and_unknown_ones_do_no_harm(tiny: Renderer) -> None:
    plain = tiny.render([USER], (), {})
    assert tiny.decode(tiny.render([USER], (), {"enable_thinking": False})) == (
        tiny.decode(plain) + "<think>\n\n</think>\n\n"
    )
    assert tiny.render([USER], (), {"colour": "red"}) == plain


def test_a_wrong_option_is_refused_by_name(tiny: Renderer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tiny.render([USER], (), {"enable_thinking": "perhaps"})
    assert caught.value.param == "chat_template_kwargs"


def test_a_template_that_refuses_the_value_of_an_option_says_so(published: Callable[[str], Path]) -> None:
    renderer = load_renderer(Settings(), published("qwen3_8"))
    assert renderer.render([USER], (), {"reasoning_effort": "low"})
    with pytest.raises(
        InvalidRequest, match=r"with the options {'reasoning_effort': 'high'}: .*xhigh .default., medium, and"
    ):
        renderer.render([USER], (), {"reasoning_effort": "high"})


def test_options_that_would_replace_the_template_are_refused(published: Callable[[str], Path]) -> None:
    renderer = load_renderer(Settings(), published("qwen2_5"))
    with pytest.raises(InvalidRequest, match="'chat_template' in 'chat_template_kwargs' is not"):
        renderer.render([USER], (), {"chat_template": "{{ 1 }}"})


@pytest.mark.parametrize(
    ("name", "messages", "tools", "match"),
    [
        ("gemma3", [USER, USER], (), "two user messages"),
        ("gemma3", [USER], TOOLS, "tools"),
        ("phi3", [USER, Message(Role.TOOL, "1", (), "c")], (), "tool results"),
        ("gemma3", [USER, Message(Role.ASSISTANT, "", (ToolCall("c", "read", "{}"),))], (), "assistant tool calls"),
        ("qwen3_8", [USER, Message(Role.SYSTEM, "x"), USER], (), "a system message after the first"),
        (
            "llama3_1",
            [USER, Message(Role.ASSISTANT, "", (ToolCall("a", "read", "{}"), ToolCall("b", "read", "{}")))],
            (),
            "several tool calls",
        ),
    ],
)
def test_parts_that_a_template_cannot_express_are_refused_by_name(
    published: Callable[[str], Path], name: str, messages: list[Message], tools: tuple[Tool, ...], match: str
) -> None:
    with pytest.raises(InvalidRequest, match=match):
        load_renderer(Settings(), published(name)).render(messages, tools, {})


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("deepseekv3", "string"), ("glm4moe", "object"), ("nemotron_3_nano", "object"), ("qwen3_8", "object")],
)
def test_the_form_of_arguments_is_found(published: Callable[[str], Path], name: str, arguments: str) -> None:
    template = load_renderer(Settings(), published(name))._template
    assert isinstance(template, ChatTemplate)
    assert template.capabilities.arguments == arguments


@pytest.mark.parametrize(
    "messages", [[], [Message(Role.USER, "x", images=(ImagePart("digest"),))]], ids=["no messages", "an image"]
)
def test_empty_messages_and_images_are_refused(tiny: Renderer, messages: list[Message]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tiny.render(messages, (), {})
    assert caught.value.param == "messages"


def test_a_folder_without_a_chat_template_gives_a_one_line_error(tiny_folder: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_folder / "tokenizer.json", tmp_path / "tokenizer.json")
    config = json.loads((tiny_folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ConfigurationError, match="no chat template"):
        load_renderer(Settings(), tmp_path)
    assert load_renderer(Settings(family="qwen3"), tmp_path).family == "qwen3"


@pytest.mark.parametrize(
    ("given", "known"),
    [
        (Settings(family="qwen9"), "qwen3"),
        (Settings(tool_parser="qwen9"), "hermes"),
        (Settings(reasoning_parser="qwen9"), "think"),
    ],
)
def test_an_unknown_name_lists_the_known_ones(tiny_folder: Path, given: Settings, known: str) -> None:
    with pytest.raises(ConfigurationError, match=known):
        load_renderer(given, tiny_folder)


def test_a_family_that_does_not_fit_the_vocabulary_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not fit family minimax-m2"):
        load_renderer(Settings(family="minimax-m2"), tiny_folder)


def test_names_of_other_systems_choose_the_formats(published: Callable[[str], Path]) -> None:
    renderer = load_renderer(Settings(tool_parser="qwen25", reasoning_parser="deepseek-r1"), published("phi3"))
    text = '<think>hm</think>\n<tool_call>{"name": "list", "arguments": {}}</tool_call><|end|>'
    parser = renderer.parser(TOOLS, ToolChoice(), renderer.encode("x"))
    parser.feed(renderer.encode(text))
    parser.finish()
    assert (parser.message.reasoning, parser.message.tool_calls[0].name) == ("hm", "list")


def test_markers_that_are_no_tokens_are_found_in_the_text(tiny_folder: Path, tmp_path: Path) -> None:
    """Like fine-tunes that write Hermes calls with a vocabulary without its markers."""
    spelled = json.loads((tiny_folder / "tokenizer.json").read_text(encoding="utf-8"))
    spelled["added_tokens"] = [token for token in spelled["added_tokens"] if token["special"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spelled), encoding="utf-8")
    shutil.copy(tiny_folder / "tokenizer_config.json", tmp_path)
    renderer = load_renderer(Settings(), tmp_path)
    assert (renderer.family, renderer.encode("<tool_call>").tolist() != [634]) == ("qwen3", True)
    text = '<think>a <b</think>Sure <t> \n<tool_call>\n{"name": "list", "arguments": {}}\n</tool_call><|im_end|>'
    for step in (1, 3, 100):
        parser = renderer.parser(TOOLS, ToolChoice(), renderer.render([USER], TOOLS, {}))
        ids = renderer.encode(text)
        for at in range(0, len(ids), step):
            parser.feed(ids[at : at + step])
        parser.finish()
        assert (parser.message.reasoning, parser.message.content) == ("a <b", "Sure <t>")
        assert [call.name for call in parser.message.tool_calls] == ["list"]
        assert parser.reasoning_tokens > 0


def test_a_required_call_is_one_of_the_tools_and_parses_as_a_call(tiny: Renderer) -> None:
    grammar = tiny.tool_grammar(TOOLS, ToolChoice(ToolChoiceMode.REQUIRED), parallel=True)
    assert grammar is not None
    assert (len(grammar.alternatives), grammar.repeat, grammar.separator) == (2, True, "\n")
    opener, head, arguments, tail, closer = grammar.alternatives[0]
    assert [tiny.decode([part.token_id]) for part in (opener, closer) if part.token_id is not None] == (
        ["<tool_call>", "</tool_call>"]
    )
    assert arguments.schema == TOOLS[0].parameters
    assert grammar.alternatives[1][2].schema == {"type": "object", "properties": {}}
    parser = tiny.parser(TOOLS, ToolChoice(ToolChoiceMode.REQUIRED), tiny.render([USER], TOOLS, {}))
    parser.feed(tiny.encode(f"{opener.text}{head.text}{{}}{tail.text}{closer.text}"))
    parser.finish()
    assert parser.message.tool_calls[0].name == "read"


def test_a_named_call_allows_that_tool_only(tiny: Renderer) -> None:
    grammar = tiny.tool_grammar(TOOLS, ToolChoice(ToolChoiceMode.NAMED, "list"), parallel=False)
    assert grammar is not None
    assert (len(grammar.alternatives), grammar.repeat) == (1, False)
    with pytest.raises(InvalidRequest):
        tiny.tool_grammar(TOOLS, ToolChoice(ToolChoiceMode.NAMED, "nobody"), parallel=False)


def test_no_grammar_where_the_model_may_choose(tiny: Renderer) -> None:
    assert tiny.tool_grammar(TOOLS, ToolChoice(), parallel=True) is None
    assert tiny.tool_grammar(TOOLS, ToolChoice(ToolChoiceMode.NONE), parallel=True) is None


@pytest.mark.parametrize("name", ["phi3", "gptoss"])
def test_free_calls_cannot_be_held_where_no_token_begins_them(published: Callable[[str], Path], name: str) -> None:
    with pytest.raises(UnsupportedParameter, match="leave out the 'format'"):
        load_renderer(Settings(), published(name)).held_grammar(TOOLS)


def test_a_call_cannot_be_forced_where_its_format_is_unknown(published: Callable[[str], Path]) -> None:
    renderer = load_renderer(Settings(), published("phi3"))
    with pytest.raises(UnsupportedParameter):
        renderer.tool_grammar(TOOLS, ToolChoice(ToolChoiceMode.REQUIRED), parallel=True)
