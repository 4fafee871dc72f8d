"""Families are found by configuration and chat template, formats by probing what the template writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rendering_folders import write_folder

from proxy.engine.scripted.scripts import Reply, play
from proxy.rendering import Renderer, load_renderer
from proxy.rendering.families import FAMILIES, candidates
from proxy.rendering.reasoning_formats import REASONING_FORMATS
from proxy.rendering.tool_calls.known_formats import TOOL_FORMATS
from proxy.settings import Settings
from proxy.types import Message, Role, Tool, ToolCall, ids_of
from tests.support import function_tool, serving, tool_result, user
from tests.wide import WIDE
from tokengrove.errors import InvalidRequest

TOOLS = (Tool("read", "Read a file.", {"type": "object", "properties": {"path": {"type": "string"}}}),)
USER = Message(Role.USER, "Hi")
CALL = ToolCall("call_0123456789", "read", '{"path": "a"}')
CALLED = Message(Role.ASSISTANT, "", (CALL,))
RESULT = Message(Role.TOOL, "42", (), CALL.id)

# Written for these tests. Like Mistral's: ids of nine characters, tools only before the last question.
MISTRAL = """{{- bos_token }}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}
{{- '[TOOL_CALLS][' }}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('Tool call IDs should be 9 long') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
{%- endfor %}{{ ']' + eos_token }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('Tool call IDs should be 9 long') }}{% endif %}
{{- '[TOOL_RESULTS]{"content": "' + m.content + '", "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' %}{{ m.content + eos_token }}
{%- else %}{{ raise_exception('no') }}{% endif %}
{%- endfor %}"""
MISTRAL_MARKERS = ["</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"]
MISTRAL_MARKERS += ["[TOOL_RESULTS]", "[/TOOL_RESULTS]"]

# Like Kimi's: ids are names with a running number, written in calls and results.
KIMI_MARKERS = [f"<|{name}|>" for name in ("im_user", "im_assistant", "im_system", "im_middle", "im_end")]
KIMI_MARKERS += [f"<|tool_calls_section_{end}|>" for end in ("begin", "end")]
KIMI_MARKERS += [f"<|tool_call_{end}|>" for end in ("begin", "argument_begin", "end")]
KIMI = """{%- for m in messages %}
{{- '<|im_' + (m.role if m.role != 'tool' else 'system') + '|>' + m.role + '<|im_middle|>' }}
{%- if m.role == 'tool' %}{{ '## Return of ' + m.tool_call_id + '\\n' }}{% endif %}
{{- m.content }}
{%- if m.tool_calls %}{{ '<|tool_calls_section_begin|>' }}
{%- for call in m.tool_calls %}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
{{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) }}
{{- '<|tool_call_end|>' }}
{%- endfor %}{{ '<|tool_calls_section_end|>' }}{% endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if tools %}{{ '' }}{% endif %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"""


@pytest.mark.parametrize(
    ("name", "family", "calls", "reasoning"),
    [
        pytest.param("cohere2", "cohere", None, None, marks=WIDE),
        ("deepseekv3", "deepseek-r1", "deepseekv3", "</think>"),
        pytest.param("gemma3", "gemma", None, None, marks=WIDE),
        pytest.param("glm4moe", "glm-4.5", "glm45", "</think>", marks=WIDE),
        ("gptoss", "gpt-oss", "gpt-oss", "<|end|>"),
        ("llama3_1", "llama-3", "llama3", None),
        pytest.param("nemotron_3_nano", "nemotron-3", "qwen3_coder", "</think>", marks=WIDE),
        pytest.param("phi3", "phi-3", None, None, marks=WIDE),
        ("qwen2_5", "qwen2.5", "hermes", None),
        ("qwen3", "qwen3", "hermes", "</think>"),
        ("qwen3_5_think", "qwen3.5", "qwen3_coder", "</think>"),
        pytest.param("qwen3_8", "qwen3.8", "qwen3_coder", "</think>", marks=WIDE),
        pytest.param("qwen3_instruct_2507", "qwen3-instruct", "hermes", None, marks=WIDE),
    ],
)
def test_a_published_template_is_known(
    spelled: Callable[[str], Renderer], name: str, family: str, calls: str | None, reasoning: str | None
) -> None:
    renderer = spelled(name)
    assert renderer.family == family
    assert (renderer.tool_format and renderer.tool_format.name) == calls
    assert (renderer.reasoning and renderer.reasoning.closer) == reasoning


def test_every_format_that_a_family_names_is_there() -> None:
    assert {family.tool_format for family in FAMILIES if family.tool_format} <= set(TOOL_FORMATS)
    assert {family.reasoning for family in FAMILIES if family.reasoning} <= set(REASONING_FORMATS)


@pytest.mark.parametrize(
    ("model_type", "source", "family"),
    [
        ("qwen3_moe", "<|im_start|> <function=", "qwen3-coder"),
        ("qwen3_moe", "<|im_start|> </think>", "qwen3"),
        ("qwen2", "<\uff5cAssistant\uff5c><think>\n", "deepseek-r1"),  # a distilled one
        ("llama", "<|im_start|> <tool_call>", "qwen3-instruct"),  # a ChatML fine-tune
        ("deepseek_v3", "<\uff5cAssistant\uff5c> ```json", "deepseek-v3"),
        ("deepseek_v3", "<\uff5cAssistant\uff5c></think>", "deepseek-v3.1"),
        ("kimi_k2", "<|im_middle|>", "kimi-k2"),
        ("minimax_m2", "]~b]", "minimax-m2"),
        ("gemma3_text", "<start_of_turn>", "gemma"),
        ("mistral", "[INST]", "mistral"),
        ("phi3", "<|im_sep|>", "phi-4"),
        ("glm_moe_dsa", "<|observation|><arg_key>", "glm-5"),
        ("never heard of", "{{ messages }}", "generic"),
        (None, "<|start_header_id|>", "llama-3"),
    ],
)
def test_a_family_is_found_by_type_and_template(model_type: str | None, source: str, family: str) -> None:
    assert next(candidates(model_type, source)).name == family


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.model_types], ids=lambda f: f.name)
def test_every_model_type_leads_to_its_family(family: object) -> None:
    for model_type in family.model_types:  # type: ignore[attr-defined]
        assert family in list(candidates(model_type, ""))


def renderer_of(folder: Path, base: Path, template: str, markers: list[str], end: str, model_type: str) -> Renderer:
    write_folder(folder, base, template, [*markers, "<|begin_of_text|>"], [end], model_type)
    return load_renderer(Settings(), folder)


def test_mistral_gets_ids_of_nine_characters_and_its_tools_are_not_repeated(tiny_folder: Path, tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path, tiny_folder, MISTRAL, MISTRAL_MARKERS, "</s>", "mistral")
    assert renderer.family == "mistral"
    prompt = renderer.render([USER], TOOLS, {})
    assert renderer.decode(prompt).endswith("[INST]Hi[/INST]")
    whole = renderer.decode(renderer.render([USER, CALLED, RESULT], TOOLS, {}))
    call_id = whole.partition('"id": "')[2][:9]
    assert call_id.isalnum()
    assert f'"call_id": "{call_id}"' in whole
    suffix = renderer.bridge(prompt, renderer.encode("Yo</s>"), Message(Role.ASSISTANT, "Yo"), [USER], TOOLS, {})
    assert suffix is not None
    assert renderer.decode(suffix) == "[INST]Hi[/INST]"
    with pytest.raises(InvalidRequest):
        renderer.render([Message(Role.SYSTEM, "x"), USER], (), {})


def test_a_result_refers_to_the_sampled_call_id(tiny_folder: Path, tmp_path: Path) -> None:
    mistral = renderer_of(tmp_path, tiny_folder, MISTRAL, MISTRAL_MARKERS, "</s>", "mistral")
    output = mistral.encode('[TOOL_CALLS][{"name": "read", "arguments": {"path": "a"}, "id": "Xy12AbCd9"}]</s>')
    suffix = mistral.bridge(mistral.render([USER], TOOLS, {}), output, CALLED, [RESULT], TOOLS, {})
    assert suffix is not None
    assert mistral.decode(suffix) == '[TOOL_RESULTS]{"content": "42", "call_id": "Xy12AbCd9"}[/TOOL_RESULTS]'


def test_kimi_numbers_its_calls_and_keeps_the_numbers_it_sampled(tiny_folder: Path, tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path, tiny_folder, KIMI, KIMI_MARKERS, "<|im_end|>", "kimi_k2")
    assert (renderer.family, renderer.tool_format and renderer.tool_format.name) == ("kimi-k2", "kimi_k2")
    again = Message(Role.ASSISTANT, "", (ToolCall("call_z", "read", "{}"),))
    whole = renderer.decode(renderer.render([USER, CALLED, RESULT, again], (), {}))
    assert "## Return of functions.read:0\n" in whole
    assert "<|tool_call_begin|>functions.read:1<|tool_call_argument_begin|>" in whole
    said = "<|tool_calls_section_begin|><|tool_call_begin|>functions.read:7<|tool_call_argument_begin|>"
    output = renderer.encode(said + '{"path": "a"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>')
    suffix = renderer.bridge(renderer.render([USER], (), {}), output, CALLED, [RESULT], (), {})
    assert suffix is not None
    assert renderer.decode(suffix).startswith("<|im_system|>tool<|im_middle|>## Return of functions.read:7\n42")


async def test_sampled_call_ids_that_repeat_are_unique_for_clients_and_stay_in_the_prompt(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """Kimi may sample `functions.read:0` in each turn; a client that drops the text beside such a call goes on."""
    declared = "{{- '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' if tools else '' }}"
    kimi = renderer_of(tmp_path, tiny_folder, declared + KIMI, KIMI_MARKERS, "<|im_end|>", "kimi_k2")
    call = "<|tool_calls_section_begin|><|tool_call_begin|>functions.read:0<|tool_call_argument_begin|>"
    call += '{"path": "a"}<|tool_call_end|><|tool_calls_section_end|>'
    outputs = [kimi.encode(f"{text}<|im_end|>") for text in (f"so{call}", f"again{call}", "done")]
    async with serving(tmp_path, play([Reply(ids) for ids in outputs]), kimi) as server:
        history, ids = [user("go")], []
        for text in ("dust", "wine"):
            answer = await server.answer(history, tools=[function_tool("read")])
            ids.append(answer["tool_calls"][0]["id"])
            history += [{**answer, "content": None}, tool_result(ids[-1], text)]
        await server.answer(history, tools=[function_tool("read")])
        tree = await server.tree()
        assert [node["notes"].get("echo") for node in tree] == [None, ["text_dropped"], ["text_dropped"]]
        assert [node["reason"] for node in tree] == ["first", "continued", "continued"]
        assert len(set(ids)) == 2
        shown = kimi.decode(server.prompts()[-1])
        assert shown.count("## Return of functions.read:0\n") == 2
        assert not any(one in shown for one in ids)
        before = server.prompts()[1] + list(outputs[1])
        assert server.prompts()[2][: len(before)] == before


def test_the_end_of_turn_is_found_where_the_configuration_names_another(tiny_folder: Path, tmp_path: Path) -> None:
    """Like Phi-3 without its generation configuration."""
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
    )
    markers = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"]
    renderer = renderer_of(tmp_path, tiny_folder, template, markers, "<|endoftext|>", "phi3")
    assert [renderer.decode([token]) for token in renderer.stop_token_ids] == ["<|endoftext|>", "<|end|>"]
    for end in renderer.stop_token_ids:
        output = renderer.encode("Yo") + ids_of([end])
        suffix = renderer.bridge(renderer.render([USER], (), {}), output, Message(Role.ASSISTANT, "Yo"), [USER], (), {})
        assert suffix is not None
        assert renderer.decode(suffix) == "\n<|user|>\nHi<|end|>\n<|assistant|>\n"


def test_a_named_family_still_uses_the_folders_template(published: Callable[[str], Path]) -> None:
    """The library renderer writes parallel calls of GLM-4.5 differently from this template."""
    folder = published("glm4moe")
    named, found = load_renderer(Settings(family="glm-4.5"), folder), load_renderer(Settings(), folder)
    two = Message(Role.ASSISTANT, "", (CALL, ToolCall("call_1", "read", "{}")))
    assert named.render([USER, two], TOOLS, {}) == found.render([USER, two], TOOLS, {})
    assert named.family == found.family == "glm-4.5"
