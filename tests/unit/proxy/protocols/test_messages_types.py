"""Each type of block, source and tool of the anthropic SDK has a row in the tables, which the parser follows."""

from __future__ import annotations

import typing
from typing import Any

import anthropic.types as plain
import anthropic.types.beta as beta
import pytest
from anthropic.types import tool_result_block_param
from anthropic.types.beta import beta_context_management_config_param, beta_tool_result_block_param

from proxy.protocols.messages.accepted_types import BLOCKS, EDITS, SOURCES, TOOLS, Treatment
from proxy.protocols.messages.protocol import MessagesProtocol
from proxy.types import Message, Role, ToolCall, TurnRequest
from tests.unit.proxy.protocols.message_bodies import READ, body, result, says, text
from tokengrove.errors import InvalidRequest, UnsupportedParameter

DATA = {"media_type": "text/plain", "data": "Plums are blue."}
SOURCE = {"type": "text", **DATA}
SEARCH = {
    "type": "search_result",
    "title": "Fruit",
    "source": "https://plums",
    "content": [text("Blue."), text("Sour.")],
}
TAB = {"tab_id": "t1", "title": "Plums", "url": "https://plums", "active": True}
CALL = {"id": "c1", "name": "look", "input": {"q": 1}}
IN_RESULTS = ("tool_reference", "browser_state")
USERS = ("text", "image", "document", "search_result", "tool_result")
EXAMPLES: dict[str, dict[str, Any]] = {
    "text": {"text": "hi"},
    "thinking": {"thinking": "hm", "signature": ""},
    "document": {"source": SOURCE},
    "search_result": SEARCH,
    "tool_result": {"tool_use_id": "c1", "content": "found"},
    "tool_use": CALL,
    "server_tool_use": CALL,
    "mcp_tool_use": {**CALL, "server_name": "s"},
    "tool_reference": {"tool_name": "Read"},
    "browser_state": {"tabs": [TAB]},
    "web_search_tool_result": {
        "tool_use_id": "c1",
        "content": {"type": "web_search_tool_result_error", "error_code": "unavailable"},
    },
    "web_fetch_tool_result": {
        "tool_use_id": "c1",
        "content": {"type": "web_fetch_result", "url": "https://p", "content": {"type": "document", "source": SOURCE}},
    },
    "tool_search_tool_result": {
        "tool_use_id": "c1",
        "content": {"type": "tool_search_tool_search_result", "tool_references": [{"tool_name": "Read"}]},
    },
    "mcp_tool_result": {"tool_use_id": "c1", "content": [text("found")]},
}
CODE = {"tool_use_id": "c1", "content": {"type": "x_result", "stdout": "4", "stderr": "", "return_code": 0}}


def parse(*messages: Any, **more: Any) -> TurnRequest:
    return MessagesProtocol().parse(body(*messages, says("user", "go on"), **more))


def kinds(*unions: Any) -> set[str]:
    """Return the values of `type` in unions of blocks, sources or tools, nested unions included."""
    found: set[str] = set()
    for union in unions:
        if members := typing.get_args(union):
            found |= kinds(*members)
        elif hasattr(union, "model_fields"):  # the SDK takes its own reply blocks back
            found |= {
                value for value in typing.get_args(union.model_fields["type"].annotation) if isinstance(value, str)
            }
        elif isinstance(union, type):
            found |= _literals(typing.get_type_hints(union).get("type"))
    return found


def _literals(hint: Any) -> set[str]:
    members = typing.get_args(hint)
    return {each for each in members if isinstance(each, str)}.union(*map(_literals, members))


def content_of(*messages: Any) -> set[str]:
    """The types of blocks that messages, or the members of a union of messages, may have."""
    members = [member for message in messages for member in typing.get_args(message) or (message,)]
    return kinds(*(typing.get_type_hints(member)["content"] for member in members))


def source_of(*blocks: Any) -> set[str]:
    return kinds(*(typing.get_type_hints(block)["source"] for block in blocks))


def test_every_type_of_block_of_the_sdk_has_a_row() -> None:
    known = content_of(plain.MessageParam, beta.BetaMessageParam)
    known |= kinds(plain.ContentBlockParam, beta.BetaContentBlockParam)
    known |= kinds(tool_result_block_param.Content, beta_tool_result_block_param.Content)
    assert {"text", "document", "server_tool_use", "tool_reference"} <= known
    assert known - set(BLOCKS) == set()


def test_every_type_of_source_of_the_sdk_has_a_row() -> None:
    images = source_of(plain.ImageBlockParam, beta.BetaImageBlockParam)
    documents = source_of(plain.DocumentBlockParam, beta.BetaRequestDocumentBlockParam)
    assert "base64" in images and "content" in documents
    assert {("image", kind) for kind in images} | {("document", kind) for kind in documents} == set(SOURCES)


def test_every_type_of_tool_of_the_sdk_has_a_row() -> None:
    known = kinds(plain.ToolUnionParam, beta.BetaToolUnionParam)
    assert {"bash_20250124", "web_search_20250305", "custom"} <= known
    assert known - set(TOOLS) == set()


def test_every_type_of_edit_of_the_sdk_has_a_row() -> None:
    assert kinds(beta_context_management_config_param.Edit) == set(EDITS)


@pytest.mark.parametrize("kind", [*EDITS, "paint_20990101"])
def test_an_edit_that_would_change_the_prompt_is_refused_as_claude_code_understands_it(kind: str) -> None:
    sent = {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}, {"type": kind}]}}
    if kind in EDITS and EDITS[kind].treatment is Treatment.IGNORED:
        assert parse(**sent).dropped == ("context_management",)
        return
    with pytest.raises(
        UnsupportedParameter, match=rf"^\S{{1,128}} does not support the \W?{kind}\W? context manage"
    ) as told:
        parse(**sent)
    assert told.value.param == "context_management.edits[1]"


def accepted(kind: str) -> TurnRequest:
    """The request with a block of this type in a place where the API has it."""
    block = {"type": kind, **EXAMPLES.get(kind, CODE)}
    if kind in IN_RESULTS:
        return parse(says("user", [result("c1", [block])]), tools=[READ])
    return parse(says("user" if kind in USERS else "assistant", [block]), tools=[READ])


@pytest.mark.parametrize("kind", sorted(set(BLOCKS) - {"image"}))
def test_a_block_is_treated_as_its_row_says(kind: str) -> None:
    row = BLOCKS[kind]
    if row.treatment is not Treatment.REFUSED:
        request = accepted(kind)
        assert bool(request.dropped) is (row.treatment is Treatment.IGNORED)
        return
    for role in ("user", "assistant"):
        with pytest.raises(UnsupportedParameter) as refusal:
            parse(says(role, [{"type": kind}]))
        told = refusal.value
        assert told.param == "messages[0].content[0]"
        assert f"'{kind}'" in str(told) and row.how in str(told) and "accepted are text, " in str(told)


@pytest.mark.parametrize("kind", [kind for block, kind in SOURCES if block == "document"])
def test_a_source_of_a_document_is_treated_as_its_row_says(kind: str) -> None:
    message = says("user", [{"type": "document", "source": {"type": kind, **DATA, "content": "x"}}])
    if SOURCES["document", kind].treatment is Treatment.SERVED:
        assert parse(message).messages[0].content
        return
    with pytest.raises(
        UnsupportedParameter, match=f"'{kind}' of a 'document' .*; accepted are text, content"
    ) as refusal:
        parse(message)
    assert refusal.value.param == "messages[0].content[0].source.type"


@pytest.mark.parametrize("kind", sorted(TOOLS))
def test_a_tool_is_treated_as_its_row_says(kind: str) -> None:
    schema = {"input_schema": {"type": "object"}} if kind == "custom" else {}
    request = parse(tools=[READ, {"type": kind, "name": "mine", **schema}])
    assert len(request.tools) > 1 or TOOLS[kind].treatment is Treatment.IGNORED
    assert request.dropped == (() if len(request.tools) > 1 else (f"tools[1] of type {kind}",))


@pytest.mark.parametrize("role", ["user", "assistant"])
@pytest.mark.parametrize("kind", ["hologram", "input_text"])
def test_an_unknown_type_is_refused_with_those_that_are_accepted(role: str, kind: str) -> None:
    with pytest.raises(
        UnsupportedParameter, match=f"'{kind}', which is not supported here; accepted are text, "
    ) as told:
        parse(says(role, [{"type": kind, "text": "x"}]))
    assert told.value.param == "messages[0].content[0]"


def test_a_document_is_its_title_context_and_text() -> None:
    named = {"type": "document", "title": "Plums", "context": "a guide", "source": SOURCE}
    blocks = {"type": "content", "content": [text("one"), text("two")]}
    request = parse(says("user", [text("Read:\n"), named, {"type": "document", "source": blocks}]))
    assert request.messages[0].content == (
        "Read:\n<document>\n<title>Plums</title>\n<context>a guide</context>\n<content>\nPlums are blue.\n</content>\n"
        "</document>\n<document>\n<content>\none\ntwo\n</content>\n</document>\n"
    )


def test_a_search_result_is_its_title_source_and_text_in_messages_and_in_tool_results() -> None:
    wanted = (
        "<search_result>\n<title>Fruit</title>\n<source>https://plums</source>\n<content>\nBlue.\nSour.\n</content>\n"
        "</search_result>\n"
    )
    request = parse(says("user", [result("c1", [SEARCH]), SEARCH]))
    assert [message.content for message in request.messages[:2]] == [wanted, wanted]


def test_citations_that_no_model_here_writes_are_named_as_ignored() -> None:
    cited = {**SEARCH, "citations": {"enabled": True}}
    request = parse(says("user", [{**SEARCH, "citations": {"enabled": False}}, result("c1", [cited])]))
    assert request.dropped == ("messages[0].content[1].content[0].citations",)


def test_the_state_of_a_browser_is_the_text_of_its_tabs_and_changes() -> None:
    started = {"type": "download_started", "download_id": "d", "url": "https://z"}
    done = {**started, "type": "download_completed", "path": "/tmp/z", "size_bytes": 3}
    other = {"tab_id": "t2", "title": "", "url": ""}
    changes = [{"type": "tab_opened", "tab_id": "t2"}, started, done, {**started, "type": "download_failed"}]
    state = {"type": "browser_state", "tabs": [TAB, other], "state_changes": changes}
    assert parse(says("user", [result("c1", [text("Clicked.\n"), state])])).messages[0].content == (
        "Clicked.\nOpen tabs:\n- t1: Plums https://plums (active)\n- t2:  \n- opened the tab t2\n"
        "- download d of https://z has started\n- download d of https://z is complete: path /tmp/z, size_bytes 3\n"
        "- download d of https://z has failed"
    )


def test_a_tool_that_a_provider_ran_is_a_call_and_its_result_between_the_texts() -> None:
    ran = {"type": "code_execution_tool_result", **CODE}
    request = parse(
        says("assistant", [text("I run it."), {"type": "server_tool_use", **CALL}, ran, text("It is 4.")]),
    )
    assert request.messages[:3] == (
        Message(Role.ASSISTANT, "I run it.", (ToolCall("c1", "look", '{"q":1}'),)),
        Message(Role.TOOL, '{"type":"x_result","stdout":"4","stderr":"","return_code":0}', tool_call_id="c1"),
        Message(Role.ASSISTANT, "It is 4."),
    )


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("web_search_tool_result", [{"type": "web_search_result", "url": "u", "title": "t", "encrypted_content": "x"}]),
        ("advisor_tool_result", {"type": "advisor_redacted_result", "encrypted_content": "x"}),
        ("code_execution_tool_result", {"type": "encrypted_code_execution_result", "encrypted_stdout": "x"}),
    ],
)
def test_an_encrypted_result_is_refused_by_name(kind: str, content: Any) -> None:
    with pytest.raises(UnsupportedParameter, match=f"of type '{kind}' is encrypted") as refusal:
        parse(says("assistant", [{"type": kind, "tool_use_id": "c1", "content": content}]))
    assert refusal.value.param == "messages[0].content[0]"


@pytest.mark.parametrize(
    ("block", "param"),
    [
        ({"type": "document", "source": {**SOURCE, "media_type": "text/html"}}, "source.media_type"),
        ({"type": "document", "source": {"type": "text"}}, "source.data"),
        ({"type": "document", "source": {"type": "content", "content": [{"type": "document"}]}}, "source.content[0]"),
        ({**SEARCH, "title": None}, "title"),
        ({**SEARCH, "content": [{"type": "image", "source": {}}]}, "content[0]"),
        (result("c1", [{"type": "browser_state", "tabs": [{}]}]), "content[0].tabs[0].tab_id"),
        (
            result("c1", [{"type": "browser_state", "tabs": [], "state_changes": [{"type": "flood"}]}]),
            "content[0].state_changes[0].type",
        ),
    ],
)
def test_a_part_of_a_block_that_cannot_be_read_is_named(block: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse(says("user", [block]))
    assert refusal.value.param == f"messages[0].content[0].{param}"
