"""Whichever engine writes a conversation, the text is the one that transformers' `apply_chat_template` writes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from proxy.rendering.templates.chat_template import RESERVED_OPTIONS, ChatTemplate
from proxy.rendering.templates.engine_probes import engine_probes
from proxy.rendering.templates.jinja2_template import compile_jinja2
from proxy.rendering.templates.minijinja_template import compile_minijinja
from proxy.rendering.templates.template_text import TemplateText
from proxy.rendering.tokenizer import Tokenizer
from tests.unit.proxy.rendering.rendering_folders import FAMILIES
from tokengrove.errors import ConfigurationError, InvalidRequest

quick = settings(max_examples=60)

# What engines strip, escape or print in different ways.
ODD = [
    "",
    " ",
    "\n",
    "\n\n ",
    "\x1f",
    "\x1c \x85",
    "\u2028",
    "\u3000",
    "\x00\x7f",
    "<b>&'\"\\",
    "\ud800",
    "🙂\ufe0f",
    "é",
]
TAGS = ["<think>\n", "\n</think>\n\n", "</think>", "<tool_response>", "</tool_response>", "<|im_end|>", "{{ x }}", "{%"]
TAGS += ["<|channel|>analysis<|message|>", "[TOOL_CALLS]", "None", "True", "assistant", "```json", "a.b", "1.5e3"]
texts = st.lists(st.one_of(st.sampled_from(ODD), st.sampled_from(TAGS), st.text(max_size=6)), max_size=4).map("".join)
KEYWORDS = [
    "type",
    "description",
    "enum",
    "items",
    "oneOf",
    "anyOf",
    "default",
    "nullable",
    "required",
    "properties",
    "keys",
    "get",
    "a",
    "b",
]
numbers = st.one_of(st.integers(-9, 9), st.integers(-(2**70), 2**70), st.floats(), st.sampled_from([1.0, -0.0, 1e22]))
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
keys = st.one_of(st.sampled_from(KEYWORDS), texts)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=8,
)
types = st.sampled_from(["string", "integer", "array", "object", "boolean", "null", ["string", "null"]])
schemas: st.SearchStrategy[dict[str, Any]] = st.deferred(
    lambda: st.fixed_dictionaries(
        {},
        optional={
            "type": types,
            "description": texts,
            "enum": st.lists(scalars, max_size=3),
            "items": schemas,
            "oneOf": st.lists(schemas, max_size=2),
            "default": values,
            "nullable": st.booleans(),
            "properties": st.dictionaries(keys, st.one_of(schemas, values), max_size=3),
            "required": st.lists(keys, max_size=2),
            "title": texts,
        },
    )
)
functions = st.fixed_dictionaries(
    {"name": st.sampled_from(["read", "list"]), "description": texts, "parameters": st.one_of(schemas, st.just({}))}
)
tools = st.one_of(
    st.none(), st.lists(functions, min_size=1, max_size=3).map(lambda found: [_function(f) for f in found])
)
arguments = st.one_of(st.dictionaries(keys, values, max_size=3), st.sampled_from(['{"a": 1}', "", "{"]))
calls = st.builds(
    lambda name, given, call_id: {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}},
    st.sampled_from(["read", "list"]),
    arguments,
    st.sampled_from(["call_0", "call_1", "abcdefghi"]),
)
thoughts = st.one_of(st.just({}), texts.map(lambda text: {"reasoning_content": text}))
answers = st.builds(
    lambda text, thought, made: {
        "role": "assistant",
        "content": text,
        **thought,
        **({"tool_calls": made} if made else {}),
    },
    texts,
    thoughts,
    st.lists(calls, max_size=2),
)
results = st.builds(
    lambda text, named: {"role": "tool", "content": text, **named},
    texts,
    st.sampled_from([{}, {"tool_call_id": "call_0", "name": "read"}]),
)
users = texts.map(lambda text: {"role": "user", "content": text})
systems = texts.map(lambda text: {"role": "system", "content": text})
turns = st.lists(st.one_of(users, st.tuples(answers, users), st.tuples(answers, results), results, systems), max_size=4)
conversations = st.builds(
    lambda first, rest: [*first, *(m for turn in rest for m in (turn if isinstance(turn, tuple) else (turn,)))],
    st.one_of(users.map(lambda m: [m]), st.tuples(systems, users), st.just([{"role": "system", "content": "x"}])),
    turns,
)
options = st.dictionaries(
    st.sampled_from(["preserve_thinking", "reasoning_effort", "thinking", "date_string", "builtin_tools", "colour"]),
    st.one_of(st.booleans(), st.none(), st.sampled_from(["high", "low"]), st.just(["browser"])),
    max_size=2,
)


def _function(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": function}


@pytest.fixture(scope="module")
def loaded(tiny_folder: Path, published: Callable[[str], Path]) -> Callable[[str], tuple[ChatTemplate, Any]]:
    """The template of a folder, and transformers' tokenizer, by name."""
    made: dict[str, tuple[ChatTemplate, Any]] = {}

    def load(name: str) -> tuple[ChatTemplate, Any]:
        if name not in made:
            folder = tiny_folder if name == "tiny" else published(name)
            made[name] = ChatTemplate(Tokenizer.load(folder)), AutoTokenizer.from_pretrained(str(folder))
        return made[name]

    return load


@pytest.mark.parametrize("name", [*FAMILIES, "tiny"])
@quick
@given(messages=conversations, offered=tools, chosen=options, prompt=st.booleans())
def test_the_text_is_that_of_transformers(
    loaded: Callable[[str], tuple[ChatTemplate, Any]],
    name: str,
    messages: list[dict[str, Any]],
    offered: list[dict[str, Any]] | None,
    chosen: dict[str, Any],
    prompt: bool,
) -> None:
    template, hugging_face = loaded(name)
    try:
        text = template.write(messages, offered, chosen, prompt=prompt)
    except InvalidRequest as error:
        text = re.split(r"this conversation(?: with the options \{.*?\})?: ", str(error), maxsplit=1)[-1]
    try:
        wanted = hugging_face.apply_chat_template(
            messages, tools=offered, tokenize=False, add_generation_prompt=prompt, **chosen
        )
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        wanted = str(error)
    assert text == wanted


@pytest.mark.parametrize("name", [*FAMILIES, "tiny"])
def test_minijinja_writes_every_known_template(loaded: Callable[[str], tuple[ChatTemplate, Any]], name: str) -> None:
    assert loaded(name)[0].engine == "minijinja (same text as jinja2 in the self-check)"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ messages|sort }}", "differs in filter `sort`"),
        ("{{ messages is odd }}", "differs in test `odd`"),
        ("{{ messages.append(1) }}", "differs in `.append`"),
        ("{{ messages[0].items }}", "differs in `.items`"),
        ("{% for m in messages %}{{ loop.revindex }}{% endfor %}", "differs in `.revindex`"),
        ("{{ 'items' in messages[0] }}", "differs in `items` in"),
        ("{{ lipsum() }}", "differs in `lipsum`"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "cannot compile it"),
        ("{{ messages[0].content is sequence and messages[0].content ~ [messages[0].content] }}", "user text"),
        ("{% for m in messages %}{% for letter in m.content %}{{ loop.last }}{% endfor %}{% endfor %}", "user text"),
        ("{{ [colour] }}", "self-check: "),
    ],
)
def test_a_template_that_minijinja_writes_otherwise_is_left_to_jinja2(source: str, why: str) -> None:
    text = TemplateText(source, {})
    assert text.engine.startswith("jinja2 (minijinja ")
    assert why in text.engine


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.5"),
        (1.0, "1.0"),
        (0.00001, "1e-05"),
        (1e16 + 2, "1.0000000000000002e+16"),
        (float("nan"), "NaN"),
        (1e22, "1e+22"),
        (-0.0, "-0.0"),
        (float("inf"), "Infinity"),
        (2**64, str(2**64)),
        (2**63 - 1, str(2**63 - 1)),
        (None, "null"),
        ("\ud800", '"\ud800"'),
        ("a\x1f", '"a\\u001f"'),
    ],
)
def test_values_that_engines_write_differently_have_the_text_of_jinja2(value: Any, text: str) -> None:
    template = TemplateText("{{ messages[0].content.a|tojson }}", {})
    assert template.engine.startswith("minijinja")
    assert template.write({"messages": [{"role": "user", "content": {"a": value}}]}) == text


def test_a_schema_with_an_object_where_a_list_belongs_has_the_text_of_jinja2() -> None:
    template = TemplateText("{% for name in ['items'] %}{{ name in tools[0].required }}{% endfor %}", {})
    assert template.engine.startswith("minijinja")
    assert template.write({"messages": [], "tools": [{"required": {"a": 1}}]}) == "False"


def test_white_space_that_only_python_strips_is_stripped() -> None:
    template = TemplateText("{{ messages[0].content|trim }}.", {})
    assert template.engine.startswith("minijinja")
    assert template.write({"messages": [{"role": "user", "content": "\x1c a \x1f"}]}) == "a."


def test_a_panic_of_minijinja_leaves_the_conversation_to_jinja2(capfd: pytest.CaptureFixture[str]) -> None:
    template = TemplateText("{% if colour is defined %}{{ colour[::-1] }}{% endif %}x", {})
    assert template.engine.startswith("minijinja")
    assert template.write({"messages": [], "colour": ""}) == "x"


def test_a_template_that_is_not_jinja_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigurationError, match=r"the chat template is not valid: [^\n]+$"):
        TemplateText("{% if %}", {})


def test_assignments_in_a_generation_block_end_with_it() -> None:
    source = "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}"
    assert TemplateText(source, {}).write({"messages": []}) == "21"


def test_templates_do_not_leave_the_sandbox() -> None:
    for source in ("{{ dict.mro() }}", "{{ namespace(_x=1) }}", "{{ messages.clear() }}", "{{ ''.__class__.mro() }}"):
        with pytest.raises(TemplateError):
            TemplateText(source, {}).write({"messages": [1]})


def test_options_that_transformers_takes_itself_are_reserved(
    loaded: Callable[[str], tuple[ChatTemplate, Any]],
) -> None:
    parameters = set(inspect.signature(loaded("tiny")[1].apply_chat_template).parameters)
    assert parameters - {"documents"} <= RESERVED_OPTIONS
    assert RESERVED_OPTIONS - parameters == {"messages", "conversations"}


def test_documents_are_a_list_of_objects(loaded: Callable[[str], tuple[ChatTemplate, Any]]) -> None:
    template = loaded("tiny")[0]
    messages = [{"role": "user", "content": "Hi"}]
    assert template.write(messages, None, {"documents": [{"title": "a"}]}, prompt=True)
    with pytest.raises(InvalidRequest, match="'documents'") as caught:
        template.write(messages, None, {"documents": ["a"]}, prompt=True)
    assert caught.value.param == "chat_template_kwargs"


def test_probes_differ_from_each_other() -> None:
    shown = [repr(probe) for probe in engine_probes()]
    assert len(set(shown)) == len(shown)


def test_long_conversations_do_not_keep_the_lock_of_the_interpreter() -> None:
    source = "{% for message in messages %}{{ message.content }}{% endfor %}"
    write = compile_minijinja(source, compile_jinja2(source).environment.parse(source))
    message = {"role": "user", "content": "Hi"}
    assert write({"messages": [message] * 1000}) == "Hi" * 1000
    assert write({"messages": [message] * 2000}) is None
    assert write({"messages": [{**message, "content": "x" * 2**21}]}) is None
    assert TemplateText(source, {}).write({"messages": [message] * 2000}) == "Hi" * 2000


def test_threads_write_alike(loaded: Callable[[str], tuple[ChatTemplate, Any]]) -> None:
    template = loaded("qwen3")[0]
    conversations = [[{"role": "user", "content": f"{number} " * number}] for number in range(60)]
    offered = [_function({"name": "read", "description": "", "parameters": {"type": "object"}})]

    def write(messages: list[dict[str, Any]]) -> str:
        return template.write(messages, offered, {}, prompt=True)

    wanted = [write(messages) for messages in conversations]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(write, conversations * 5)) == wanted * 5
