"""Answers that clients send back changed: what goes on with the sampled tokens, and what is the client's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import Server, call_text, function_tool, sampled, says, serving, tiny_renderer, user
from tests.wide import CROSSED

REASONING, TEXT = "Look there.\nThen here.", "I look\nat both."
FIRST, SECOND = ("look", '{"place": "attic"}'), ("look", '{"place": "cellar", "depth": {"from": 1}}')
ANSWER = f"<think>\n{REASONING}\n</think>\n\n{TEXT}\n{call_text(*FIRST)}\n{call_text(*SECOND)}"
DEPTH = {"type": "object", "properties": {"from": {"type": "integer"}, "to": {"type": "integer"}}, "required": ["from"]}
SCHEMA = {
    "type": "object",
    "properties": {
        "place": {"type": "string"},
        "lines": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "depth": {"anyOf": [{"$ref": "#/$defs/Depth"}, {"type": "null"}]},
    },
    "required": ["place"],
    "$defs": {"Depth": DEPTH},
}


class Call(NamedTuple):
    """A call as a client holds it."""

    id: str
    name: str
    arguments: str


class Said(NamedTuple):
    """An assistant message of a history."""

    text: str | None = None
    calls: tuple[Call, ...] = ()


class Result(NamedTuple):
    """The result of a call."""

    id: str
    text: str


Step = Said | Result | str
"""A message of a history; a string is the user's."""


class Chat:
    """Api over chat completions."""

    path = "chat/completions"

    @staticmethod
    def body(steps: Sequence[Step]) -> dict[str, Any]:
        tool = {"type": "function", "function": {"name": "look", "description": "does look", "parameters": SCHEMA}}
        return {"messages": [Chat.wire(step) for step in steps], "tools": [tool]}

    @staticmethod
    def said(reply: Any) -> Said:
        return Chat.choice(reply["choices"][0])

    @staticmethod
    def choice(choice: Any) -> Said:
        message = choice["message"]
        calls = message.get("tool_calls") or ()
        return Said(message["content"], tuple(Call(call["id"], *call["function"].values()) for call in calls))

    @staticmethod
    def wire(step: Step) -> Any:
        match step:
            case Said(text, calls):
                wired = [
                    {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                    for call in calls
                ]
                return {"role": "assistant", "content": text, **({"tool_calls": wired} if wired else {})}
            case Result(call_id, text):
                return {"role": "tool", "tool_call_id": call_id, "content": text}
            case text:
                return user(text)


class Responses:
    """Api over responses, without item ids."""

    path = "responses"

    @staticmethod
    def body(steps: Sequence[Step]) -> dict[str, Any]:
        tool = {"type": "function", "name": "look", "description": "does look", "parameters": SCHEMA}
        return {"input": [item for step in steps for item in Responses.wire(step)], "tools": [tool]}

    @staticmethod
    def said(reply: Any) -> Said:
        texts = [item["content"][0]["text"] for item in reply["output"] if item["type"] == "message"]
        calls = [item for item in reply["output"] if item["type"] == "function_call"]
        made = tuple(Call(call["call_id"], call["name"], call["arguments"]) for call in calls)
        return Said(texts[0] if texts else None, made)

    @staticmethod
    def wire(step: Step) -> list[Any]:
        match step:
            case Said(text, calls):
                items: list[Any] = [] if text is None else [{"role": "assistant", "content": text}]
                return items + [
                    {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
                    for call in calls
                ]
            case Result(call_id, text):
                return [{"type": "function_call_output", "call_id": call_id, "output": text}]
            case text:
                return [user(text)]


class Messages:
    """Api over Anthropic's messages."""

    path = "messages"

    @staticmethod
    def body(steps: Sequence[Step]) -> dict[str, Any]:
        tool = {"name": "look", "description": "does look", "input_schema": SCHEMA}
        return {"max_tokens": 999, "messages": [Messages.wire(step) for step in steps], "tools": [tool]}

    @staticmethod
    def said(reply: Any) -> Said:
        texts = [block["text"] for block in reply["content"] if block["type"] == "text"]
        calls = [block for block in reply["content"] if block["type"] == "tool_use"]
        made = tuple(Call(call["id"], call["name"], json.dumps(call["input"])) for call in calls)
        return Said(texts[0] if texts else None, made)

    @staticmethod
    def wire(step: Step) -> Any:
        match step:
            case Said(text, calls):
                blocks: list[Any] = [] if text is None else [{"type": "text", "text": text}]
                blocks += [
                    {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
                    for call in calls
                ]
                return {"role": "assistant", "content": blocks}
            case Result(call_id, text):
                result = {"type": "tool_result", "tool_use_id": call_id, "content": text}
                return {"role": "user", "content": [result]}
            case text:
                return user(text)


Api = type[Chat] | type[Responses] | type[Messages]
APIS = pytest.mark.parametrize("api", [Chat, Responses, Messages])


async def turn(server: Server, api: Api, steps: Sequence[Step], session: str = "s") -> Said:
    """Run one turn; return its answer as the client holds it."""
    return api.said(await server.ok(f"/{session}/v1/{api.path}", {"model": "m", **api.body(steps)}))


@dataclass
class Loop:
    """An agent after the turn that called two tools."""

    server: Server
    api: Api
    answer: Said

    @property
    def results(self) -> tuple[Result, Result]:
        first, second = self.answer.calls
        return Result(first.id, "dust"), Result(second.id, "wine")

    async def goes_on(self, *echo: Step) -> Any:
        """Run the next turn with `echo` after the question; return its node."""
        await turn(self.server, self.api, ["go", *echo])
        return (await self.server.tree())[-1]

    def continued(self) -> bool:
        """Whether the last prompt begins with all tokens of the first turn."""
        before = self.server.prompts()[0] + list(sampled(ANSWER))
        return self.server.prompts()[-1][: len(before)] == before

    def shown(self) -> str:
        """The text of the last prompt."""
        return tiny_renderer().decode(self.server.prompts()[-1])


async def begin(server: Server, api: Api) -> Loop:
    return Loop(server, api, await turn(server, api, ["go"]))


def expect(loop: Loop, node: Any, *echo: str) -> None:
    assert (node["reason"], node["aligned"], node["notes"].get("echo", [])) == ("continued", True, list(echo))
    assert loop.continued()


def in_tags(tag: str) -> str:
    return f"<{tag}>\n{REASONING}\n</{tag}>"


@CROSSED
@APIS
@pytest.mark.parametrize(
    ("text", "echo"),
    [
        (TEXT, []),
        (f"\n {TEXT} \n", []),
        (TEXT.replace("\n", "\r\n"), []),
        (f"{in_tags('think')}\n\n{TEXT}", []),
        (f"{in_tags('thinking')}{TEXT}", []),
        (f"</think>\n\n{TEXT}", []),
        (f"{TEXT}\n</think>", []),
        (f"<thinking>{TEXT}</thinking>", []),
        (None, ["text_dropped"]),
        ("", ["text_dropped"]),
        (" \n", ["text_dropped"]),
        ("<think>\n\n</think>\n\n", ["text_dropped"]),
        (REASONING, ["text_dropped", "reasoning_as_text"]),
        (in_tags("thinking"), ["text_dropped", "reasoning_as_text"]),
        (in_tags("think").replace("\n", "\r\n"), ["text_dropped", "reasoning_as_text"]),
        (f"{REASONING}\n{TEXT}", ["reasoning_as_text"]),
        (f"{REASONING}\n\n{TEXT}", ["reasoning_as_text"]),
        (f"{REASONING}{TEXT}", ["reasoning_as_text"]),
        (f"<think>\n\n</think>\n\n{REASONING}\n{TEXT}", ["reasoning_as_text"]),
        (f"{TEXT}\n\n{in_tags('thinking')}", ["reasoning_as_text"]),
        (f"{REASONING}\n</think>\n\n{TEXT}", ["reasoning_as_text"]),
    ],
)
async def test_an_answer_with_our_text_or_reasoning_or_none_goes_on(
    tmp_path: Path, api: Api, text: str | None, echo: list[str]
) -> None:
    async with serving(tmp_path, says(ANSWER, "done")) as server:
        loop = await begin(server, api)
        node = await loop.goes_on(Said(text, loop.answer.calls), *loop.results)
        expect(loop, node, *echo)


@CROSSED
@APIS
@pytest.mark.parametrize(
    "text",
    [
        "I look\nat one.",
        "I look",
        f"{TEXT} And more.",
        "I look at both.",
        "[redacted]",
        f"{REASONING} Or so.\n{TEXT}",
        f"{in_tags('thinking')} edited",
        f"{TEXT}{TEXT}{TEXT}",
    ],
)
async def test_any_other_text_is_a_rewrite_and_is_what_the_model_sees(tmp_path: Path, api: Api, text: str) -> None:
    async with serving(tmp_path, says(ANSWER, "done")) as server:
        loop = await begin(server, api)
        node = await loop.goes_on(Said(text, loop.answer.calls), *loop.results)
        assert (node["reason"], node["parent_id"], node["notes"]) == ("rewritten", None, {})
        assert text.rpartition(">")[2].strip() in loop.shown()
        if TEXT not in text:
            assert TEXT not in loop.shown()


@APIS
async def test_a_text_that_comes_back_in_tags_and_then_without_is_one_chain(tmp_path: Path, api: Api) -> None:
    async with serving(tmp_path, says(ANSWER, ANSWER, "done", "bye")) as server:
        loop = await begin(server, api)
        history: list[Step] = [Said(f"</think>\n\n{TEXT}", loop.answer.calls), *loop.results]
        again = await turn(server, api, ["go", *history])
        history += [Said(None, again.calls), *(Result(call.id, "r") for call in again.calls)]
        expect(loop, await loop.goes_on(*history), "text_dropped")
        history[0] = loop.answer
        expect(loop, await loop.goes_on(*history, Said("done"), "thanks"), "text_dropped")
        (sample,) = await server.export()
        assert sum(sample["loss_mask"]) == sum(node["output_tokens"] for node in await server.tree())


@APIS
async def test_a_result_of_no_call_within_an_answer_is_a_rewrite(tmp_path: Path, api: Api) -> None:
    async with serving(tmp_path, says(ANSWER, "done")) as server:
        loop = await begin(server, api)
        (one, two), (first, second) = loop.answer.calls, loop.results
        steps = [Said(None, (one,)), first, Result("call_of_nobody", "[noted]"), Said(None, (two,)), second]
        body = {"model": "m", **api.body(["go", *steps])}
        response = await server.post(f"/s/v1/{api.path}", body)
        if response.status_code == 200:
            assert (await server.tree())[-1]["reason"] == "rewritten" and "[noted]" in loop.shown()
        else:
            assert response.status_code == 400


SPLITS = (
    *("text, calls", "calls, text", "call, call", "call, result, call, result", "text, call, result, call, result"),
    *("the same text with each call", "the same text with each call and its result"),
)
"""How an answer is split into assistant messages."""


def split(loop: Loop, how: str, text: str | None = TEXT) -> list[Step]:
    (one, two), (first, second) = loop.answer.calls, loop.results
    return {
        "text, calls": [Said(text), Said(None, (one, two)), first, second],
        "calls, text": [Said(None, (one, two)), Said(text), first, second],
        "call, call": [Said(text, (one,)), Said(None, (two,)), second, first],
        "call, result, call, result": [Said(text, (one,)), first, Said(None, (two,)), second],
        "the same text with each call": [Said(text, (one,)), Said(text, (two,)), first, second],
        "the same text with each call and its result": [Said(text, (one,)), first, Said(text, (two,)), second],
        "text, call, result, call, result": [Said(text), Said(None, (one,)), first, Said(None, (two,)), second],
    }[how]


@CROSSED
@APIS
@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize(("text", "echo"), [(TEXT, []), (REASONING, ["text_dropped", "reasoning_as_text"])])
async def test_an_answer_split_into_messages_goes_on(
    tmp_path: Path, api: Api, how: str, text: str, echo: list[str]
) -> None:
    async with serving(tmp_path, says(ANSWER, "done", "bye")) as server:
        loop = await begin(server, api)
        history = split(loop, how, text)
        node = await loop.goes_on(*history)
        # Items of responses and neighbouring messages of Anthropic's API are one message before they are compared.
        kinds = [kind for kind in node["notes"].get("echo", []) if kind != "split"]
        assert kinds == echo
        expect(loop, node, *node["notes"].get("echo", []))
        if api is Chat or "result" in how:
            assert "split" in node["notes"]["echo"]
        node = await loop.goes_on(*history, Said("done"), "thanks")
        assert (node["reason"], node["aligned"]) == ("continued", True)


@CROSSED
@APIS
@pytest.mark.parametrize("how", SPLITS)
async def test_a_split_answer_with_an_edited_text_is_a_rewrite(tmp_path: Path, api: Api, how: str) -> None:
    async with serving(tmp_path, says(ANSWER, "done")) as server:
        loop = await begin(server, api)
        node = await loop.goes_on(*split(loop, how, "[redacted]"))
        assert node["reason"] == "rewritten"
        assert "[redacted]" in loop.shown() and TEXT not in loop.shown()


THIRD = ("look", '{"place": "roof"}')
AFTERWARDS = f"<think>\nOne more.\n</think>\n\n{call_text(*THIRD)}"


@CROSSED
@APIS
@pytest.mark.parametrize(
    ("text", "echo"),
    [
        (TEXT, ["joined"]),
        (None, ["text_dropped", "joined"]),
        (f"{REASONING}\n{TEXT}\nOne more.", ["reasoning_as_text", "joined"]),
    ],
)
async def test_answers_joined_in_one_message_go_on(tmp_path: Path, api: Api, text: str | None, echo: list[str]) -> None:
    async with serving(tmp_path, says(ANSWER, AFTERWARDS, "done", "bye")) as server:
        loop = await begin(server, api)
        after = await turn(server, api, ["go", loop.answer, *loop.results])
        history = (Said(text, loop.answer.calls + after.calls), *loop.results, Result(after.calls[0].id, "sky"))
        node = await loop.goes_on(*history)
        expect(loop, node, *echo)
        assert node["parent_id"] == (await server.tree())[1]["id"]
        node = await loop.goes_on(*history, Said("done"), "thanks")
        assert (node["reason"], node["aligned"]) == ("continued", True)


@APIS
async def test_answers_without_their_results_in_between_go_on(tmp_path: Path, api: Api) -> None:
    async with serving(tmp_path, says(ANSWER, AFTERWARDS, "done")) as server:
        loop = await begin(server, api)
        after = await turn(server, api, ["go", loop.answer, *loop.results])
        node = await loop.goes_on(loop.answer, Said(None, after.calls), *loop.results, Result(after.calls[0].id, "sky"))
        expect(loop, node, "joined")


@CROSSED
@APIS
@pytest.mark.parametrize("edited", ["text", "first result", "a result of no call", "order of the calls"])
async def test_joined_answers_with_something_of_the_clients_own_are_a_fork(
    tmp_path: Path, api: Api, edited: str
) -> None:
    async with serving(tmp_path, says(ANSWER, AFTERWARDS, "done")) as server:
        loop = await begin(server, api)
        after = await turn(server, api, ["go", loop.answer, *loop.results])
        calls, results = loop.answer.calls + after.calls, [*loop.results, Result(after.calls[0].id, "sky")]
        if edited == "first result":
            results[0] = Result(results[0].id, "[cut]")
        if edited == "a result of no call":
            results.append(Result("call_of_nobody", "sky"))
        if edited == "order of the calls":
            calls = calls[::-1]
        history = [Said("[redacted]" if edited == "text" else TEXT, calls), *results]
        response = await server.post(f"/s/v1/{api.path}", {"model": "m", **api.body(["go", *history])})
        if response.status_code == 200:
            node = (await server.tree())[-1]
            assert (node["reason"], node["parent_id"], node["notes"]) == ("rewritten", None, {})
        else:
            assert edited == "a result of no call"


@APIS
async def test_text_and_reasoning_as_messages_of_their_own_go_on(tmp_path: Path, api: Api) -> None:
    async with serving(tmp_path, says(ANSWER, "done")) as server:
        loop = await begin(server, api)
        node = await loop.goes_on(Said(REASONING), Said(TEXT), Said(None, loop.answer.calls), *loop.results)
        expect(loop, node, *(["reasoning_as_text"] if api is Messages else ["reasoning_as_text", "split"]))


@CROSSED
@APIS
@pytest.mark.parametrize(
    ("arguments", "echo"),
    [
        ('{"depth":{"from":1},"place":"cellar"}', []),
        ('{"place": "cellar", "depth": {"from": 1}, "lines": null}', ["nulls_added"]),
        ('{"place": "cellar", "depth": {"from": 1, "to": null}, "lines": null}', ["nulls_added"]),
    ],
)
async def test_arguments_with_null_defaults_go_on(tmp_path: Path, api: Api, arguments: str, echo: list[str]) -> None:
    async with serving(tmp_path, says(ANSWER, "done")) as server:
        loop = await begin(server, api)
        one, two = loop.answer.calls
        node = await loop.goes_on(Said(TEXT, (one, two._replace(arguments=arguments))), *loop.results)
        expect(loop, node, *echo)


@CROSSED
@APIS
@pytest.mark.parametrize(
    "arguments",
    [
        '{"place": "garden", "depth": {"from": 1}}',
        '{"place": "cellar"}',
        '{"place": "cellar", "depth": null}',
        '{"place": "cellar", "depth": {"from": 1}, "lines": 0}',
        '{"place": "cellar", "depth": {"from": 1}, "unknown": null}',
        '{"place": "cellar", "depth": {"from": null}}',
        '{"place": null, "depth": {"from": 1}}',
    ],
)
async def test_edited_arguments_are_a_rewrite_and_are_what_the_model_sees(
    tmp_path: Path, api: Api, arguments: str
) -> None:
    async with serving(tmp_path, says(ANSWER, "done")) as server:
        loop = await begin(server, api)
        one, two = loop.answer.calls
        node = await loop.goes_on(Said(None, (one, two._replace(arguments=arguments))), *loop.results)
        assert (node["reason"], node["parent_id"], node["notes"]) == ("rewritten", None, {})
        assert arguments in loop.shown() and TEXT not in loop.shown()


@APIS
async def test_missing_further_renamed_and_swapped_calls_are_rewrites(tmp_path: Path, api: Api) -> None:
    async with serving(tmp_path, says(ANSWER, *["done"] * 4)) as server:
        loop = await begin(server, api)
        (one, two), (first, second) = loop.answer.calls, loop.results
        more = Call("call_more", *FIRST)
        for calls, results in (
            ((one,), (first,)),
            ((one, two, more), (first, second, Result(more.id, "3"))),
            ((one, two._replace(id="x")), (first, second._replace(id="x"))),
            ((two, one), (first, second)),
        ):
            node = await loop.goes_on(Said(None, calls), *results)
            assert (node["parent_id"], node["notes"]) == (None, {})


@APIS
async def test_an_edited_result_beside_a_dropped_text_is_what_the_model_sees(tmp_path: Path, api: Api) -> None:
    async with serving(tmp_path, says(ANSWER, "done", "cut")) as server:
        loop = await begin(server, api)
        echo = Said(None, loop.answer.calls)
        await loop.goes_on(echo, *loop.results)
        first, second = loop.results
        node = await loop.goes_on(echo, first._replace(text="[cut]"), second, Said("done"), "more")
        assert (node["reason"], node["aligned"]) == ("branched", True)
        assert loop.continued()
        assert "[cut]" in loop.shown() and "dust" not in loop.shown()


@APIS
async def test_a_text_that_is_dropped_and_comes_back_is_one_chain(tmp_path: Path, api: Api) -> None:
    async with serving(tmp_path, says(ANSWER, "one", "two", "three")) as server:
        loop = await begin(server, api)
        history: list[Step] = [Said(None, loop.answer.calls), *loop.results]
        await loop.goes_on(*history)
        history += [Said("one"), "next"]
        await loop.goes_on(*history)
        history[0] = loop.answer
        await loop.goes_on(*history, Said("two"), "last")
        tree = await server.tree()
        assert [node["notes"].get("echo", []) for node in tree] == [[], ["text_dropped"], ["text_dropped"], []]
        assert [node["reason"] for node in tree] == ["first", "continued", "continued", "continued"]
        (sample,) = await server.export()
        assert sum(sample["loss_mask"]) == sum(len(sampled(text)) for text in (ANSWER, "one", "two", "three"))


@APIS
async def test_the_same_question_again_after_a_dropped_text_is_resampled(tmp_path: Path, api: Api) -> None:
    async with serving(tmp_path, says(ANSWER, "one", "two", "more")) as server:
        loop = await begin(server, api)
        await loop.goes_on(loop.answer, *loop.results)
        node = await loop.goes_on(Said(None, loop.answer.calls), *loop.results)
        assert (node["reason"], node["notes"]) == ("resampled", {"echo": ["text_dropped"]})
        node = await loop.goes_on(Said(None, loop.answer.calls), *loop.results, Said("one"), "go on")
        assert node["parent_id"] == (await server.tree())[1]["id"]


@APIS
async def test_of_equal_calls_the_ids_tell_which_answer_dropped_its_text(tmp_path: Path, api: Api) -> None:
    """The second answer has no text, so an echo of the first one without its text looks like it."""
    spoken, silent = (f"{text}{call_text(*FIRST)}" for text in ("Let me look. ", ""))
    async with serving(tmp_path, says(spoken, silent, "a", "a", "b", "b")) as server:
        answers = [await turn(server, api, ["go"]) for _ in range(2)]
        steps = [["go", Said(None, answer.calls), Result(answer.calls[0].id, "dust")] for answer in answers]
        for history in steps:
            await turn(server, api, history)
        for history in steps:
            await turn(server, api, [*history, Said("a"), "again"])
        tree = await server.tree()
        names = [node["id"] for node in tree]
        assert [names.index(node["parent_id"]) if node["parent_id"] else None for node in tree[2:]] == [0, 1, 2, 3]
        assert [node["notes"].get("echo", []) for node in tree[2:]] == [["text_dropped"], [], ["text_dropped"], []]


async def test_choices_with_equal_calls_are_told_apart_by_their_ids(tmp_path: Path) -> None:
    texts = [f"{text}{call_text(*FIRST)}" for text in ("one ", "two ", "")]
    async with serving(tmp_path, says(*texts, *"abc")) as server:
        body = {"model": "m", "messages": [user("go")], "tools": [function_tool("look")], "n": 3}
        choices = (await server.ok("/s/v1/chat/completions", body))["choices"]
        for choice in choices:
            calls = Chat.choice(choice).calls
            history = [user("go"), Chat.wire(Said(None, calls)), Chat.wire(Result(calls[0].id, "dust"))]
            await server.answer(history, tools=body["tools"])
        tree = await server.tree()
        assert [node["parent_id"] for node in tree[3:]] == [node["id"] for node in tree[:3]]
        assert all(node["aligned"] for node in tree[3:])


@APIS
async def test_call_ids_of_another_session_are_not_ours(tmp_path: Path, api: Api) -> None:
    async with serving(tmp_path, says(ANSWER, ANSWER, "done")) as server:
        await turn(server, api, ["go"])
        other = await turn(server, api, ["go"], session="other")
        results = [Result(call.id, "dust") for call in other.calls]
        await turn(server, api, ["go", Said(None, other.calls), *results])
        assert [(node["reason"], node["notes"]) for node in await server.tree()] == [("first", {}), ("rewritten", {})]


@APIS
async def test_a_text_that_equals_the_reasoning_is_the_text(tmp_path: Path, api: Api) -> None:
    answer = f"<think>\nsame\n</think>\n\nsame\n{call_text(*FIRST)}"
    async with serving(tmp_path, says(answer, *"abcd")) as server:
        said = await turn(server, api, ["go"])
        result = Result(said.calls[0].id, "dust")
        for text in ("same", "same\nsame", None, "<think>\nsame\n</think>"):
            await turn(server, api, ["go", Said(text, said.calls), result])
        tree = await server.tree()
        notes = [node["notes"].get("echo", []) for node in tree[1:]]
        assert notes == [[], ["reasoning_as_text"], ["text_dropped"], []]
        assert {node["parent_id"] for node in tree[1:]} == {tree[0]["id"]}


@APIS
async def test_an_answer_without_reasoning_takes_no_other_text(tmp_path: Path, api: Api) -> None:
    answer = call_text(*FIRST)
    async with serving(tmp_path, says(answer, "a", "b")) as server:
        said = await turn(server, api, ["go"])
        result = Result(said.calls[0].id, "dust")
        for text in ("<think>\n\n</think>\n\n", "I call"):
            await turn(server, api, ["go", Said(text, said.calls), result])
        assert [node["reason"] for node in await server.tree()] == ["first", "continued", "rewritten"]


async def test_of_siblings_the_one_that_a_split_echo_names_goes_on(tmp_path: Path) -> None:
    """The text alone is the answer of another sibling."""
    async with serving(tmp_path, says("hi", f"hi{call_text(*FIRST)}", "done")) as server:
        plain, called = [await turn(server, Chat, ["go"]) for _ in range(2)]
        assert plain.text == called.text == "hi"
        await turn(server, Chat, ["go", Said("hi"), Said(None, called.calls), Result(called.calls[0].id, "dust")])
        tree = await server.tree()
        assert (tree[2]["parent_id"], tree[2]["notes"]) == (tree[1]["id"], {"echo": ["split"]})


async def test_a_text_before_an_answer_that_follows_it_is_not_part_of_it(tmp_path: Path) -> None:
    """A conversation that ended with an assistant message was answered by a call."""
    async with serving(tmp_path, says("hi", f"so{call_text(*FIRST)}", "done")) as server:
        plain = await turn(server, Chat, ["go"])
        called = await turn(server, Chat, ["go", plain])
        await turn(server, Chat, ["go", plain, Said(None, called.calls), Result(called.calls[0].id, "dust")])
        tree = await server.tree()
        assert (tree[2]["parent_id"], tree[2]["notes"]) == (tree[1]["id"], {"echo": ["text_dropped"]})
        assert tree[2]["aligned"]


async def test_an_assistant_message_after_a_whole_answer_stays_a_message(tmp_path: Path) -> None:
    async with serving(tmp_path, says(ANSWER, "done")) as server:
        loop = await begin(server, Chat)
        node = await loop.goes_on(loop.answer, Said("[noted]"), *loop.results)
        expect(loop, node)
        assert "[noted]" in loop.shown()


async def test_a_call_of_the_clients_own_after_a_whole_answer_is_no_part_of_it(tmp_path: Path) -> None:
    async with serving(tmp_path, says(ANSWER, "done")) as server:
        loop = await begin(server, Chat)
        own = Call("call_own", "look", '{"place": "own"}')
        echo = (Said(None, loop.answer.calls), Said("[noted]", (own,)))
        node = await loop.goes_on(*echo, *loop.results, Result(own.id, "r"))
        expect(loop, node, "text_dropped")
        assert "[noted]" in loop.shown() and own.arguments in loop.shown()


@APIS
async def test_echoes_go_on_after_a_restart(tmp_path: Path, api: Api) -> None:
    async with serving(tmp_path, says(ANSWER, "done")) as server:
        loop = await begin(server, api)
        history: list[Step] = [Said(REASONING, loop.answer.calls), *loop.results]
        await loop.goes_on(*history)
    async with serving(tmp_path, says("more")) as server:
        await turn(server, api, ["go", *history, Said("done"), "go on"])
        tree = await server.tree()
        assert [node["reason"] for node in tree] == ["first", "continued", "continued"]
        assert all(node["aligned"] for node in tree[1:])
        assert [node["notes"] for node in tree] == [{}, *[{"echo": ["text_dropped", "reasoning_as_text"]}] * 2]


@APIS
async def test_a_streamed_turn_goes_on_from_an_echo(tmp_path: Path, api: Api) -> None:
    async with serving(tmp_path, says(ANSWER, "done")) as server:
        loop = await begin(server, api)
        body = api.body(["go", Said(None, loop.answer.calls), *loop.results])
        response = await server.post(f"/s/v1/{api.path}", {"model": "m", "stream": True, **body})
        assert response.status_code == 200
        expect(loop, (await server.tree())[-1], "text_dropped")


@CROSSED
@pytest.mark.parametrize("text", ["one\r\ntwo", "<thinking>so</thinking>\none\ntwo"])
@APIS
async def test_line_ends_and_thinking_tags_do_not_count_without_calls(tmp_path: Path, api: Api, text: str) -> None:
    async with serving(tmp_path, says("one\ntwo", "done")) as server:
        await turn(server, api, ["go"])
        await turn(server, api, ["go", Said(text), "more"])
        tree = await server.tree()
        assert [(node["reason"], node["notes"]) for node in tree] == [("first", {}), ("continued", {})]


@APIS
async def test_a_sampled_carriage_return_that_comes_back_without_it_is_the_same_answer(
    tmp_path: Path, api: Api
) -> None:
    async with serving(tmp_path, says("one\r\ntwo", "done")) as server:
        await turn(server, api, ["go"])
        await turn(server, api, ["go", Said("one\ntwo"), "more"])
        assert [node["reason"] for node in await server.tree()] == ["first", "continued"]


@CROSSED
@APIS
@pytest.mark.parametrize("text", ['{"a":1}', "so\none", "so\n\none"])
async def test_another_text_without_calls_is_a_rewrite(tmp_path: Path, api: Api, text: str) -> None:
    answer = '{"a": 1}' if text.startswith("{") else "<think>\nso\n</think>\n\none"
    async with serving(tmp_path, says(answer, "done")) as server:
        await turn(server, api, ["go"])
        await turn(server, api, ["go", Said(text), "more"])
        assert [node["reason"] for node in await server.tree()] == ["first", "rewritten"]


@CROSSED
@pytest.mark.parametrize("api", [Chat, Responses])  # over messages, texts that follow one another are one text
@pytest.mark.parametrize("reasoning", ["<think>\nso\n</think>", " <thinking>so</thinking>\r\n"])
async def test_reasoning_in_tags_as_a_message_before_its_answer_goes_on(
    tmp_path: Path, api: Api, reasoning: str
) -> None:
    texts = ["<think>\nnot\n</think>\n\none", *["<think>\nso\n</think>\n\none"] * 2, "two", "done"]
    async with serving(tmp_path, says(*texts)) as server:
        for steps in (["go"], ["go"], ["go"], ["go", Said(reasoning), Said("one"), "more"]):
            await turn(server, api, steps)
        await turn(server, api, ["go", Said(reasoning), Said("one"), "more", Said("two"), "and"])
        tree = await server.tree()
        assert [node["parent_id"] for node in tree] == [None, None, None, tree[2]["id"], tree[3]["id"]]
        assert [(node["aligned"], node["notes"]) for node in tree[3:]] == [(True, {"echo": ["split"]})] * 2


@CROSSED
@APIS
@pytest.mark.parametrize("reasoning", ["\n\n<think>\nso\n</think>\n", "<thinking>so</thinking>\r\n"])
async def test_reasoning_in_tags_behind_its_answer_goes_on(tmp_path: Path, api: Api, reasoning: str) -> None:
    texts = ["<think>\nnot\n</think>\n\none", *["<think>\nso\n</think>\n\none"] * 2, "two", "done"]
    async with serving(tmp_path, says(*texts)) as server:
        for steps in (["go"], ["go"], ["go"], ["go", Said("one" + reasoning), "more"]):
            await turn(server, api, steps)
        await turn(server, api, ["go", Said("one" + reasoning), "more", Said("two"), "and"])
        tree = await server.tree()
        assert [node["parent_id"] for node in tree] == [None, None, None, tree[2]["id"], tree[3]["id"]]
        assert [(node["aligned"], node["notes"]) for node in tree[3:]] == [(True, {"echo": ["reasoning_as_text"]})] * 2


@CROSSED
@APIS
@pytest.mark.parametrize(
    "text", ["one<think>not</think>", "won<think>so</think>", "one<think>so</think> then", "one so", "one</think>"]
)
async def test_other_text_behind_an_answer_is_a_rewrite(tmp_path: Path, api: Api, text: str) -> None:
    async with serving(tmp_path, says("<think>\nso\n</think>\n\none", "done")) as server:
        await turn(server, api, ["go"])
        await turn(server, api, ["go", Said(text), "more"])
        node = (await server.tree())[-1]
        assert (node["reason"], node["notes"]) == ("rewritten", {})


@CROSSED
@pytest.mark.parametrize("api", [Chat, Responses])
@pytest.mark.parametrize(
    "said",
    [
        ["<think>not</think>", "one"],
        ["<think>so</think>", "won"],
        ["<think>so</think>", ""],
        ["<think>so</think> then", "one"],
        ["so", "one"],
        ["<think>so</think>", "<think>so</think>", "one"],
    ],
)
async def test_other_messages_beside_a_text_are_a_rewrite(tmp_path: Path, api: Api, said: list[str]) -> None:
    async with serving(tmp_path, says("<think>\nso\n</think>\n\none", "done")) as server:
        await turn(server, api, ["go"])
        await turn(server, api, ["go", *map(Said, said), "more"])
        node = (await server.tree())[-1]
        assert (node["aligned"], node["notes"]) == (False, {})


async def test_of_answers_that_differ_in_their_thinking_text_the_exact_one_goes_on(tmp_path: Path) -> None:
    texts = [f"<thinking>{number}</thinking>yes" for number in (1, 2, 3)]
    async with serving(tmp_path, says(*texts, "done")) as server:
        answers = [await turn(server, Chat, ["go"]) for _ in texts]
        await turn(server, Chat, ["go", answers[1], "more"])
        tree = await server.tree()
        assert tree[3]["parent_id"] == tree[1]["id"]


async def test_a_legacy_function_call_in_the_history_is_what_the_model_sees(tmp_path: Path) -> None:
    """Also as an echo of ours: a client that knows no tool calls may turn them into function calls."""
    async with serving(tmp_path, says(f"so{call_text(*FIRST)}", "done", "done")) as server:
        await turn(server, Chat, ["go"])
        call = {"name": "look", "arguments": FIRST[1]}
        history = [user("go"), {"role": "assistant", "content": "so", "function_call": call}]
        history.append({"role": "function", "name": "look", "content": "dust"})
        body = {"model": "m", **Chat.body([]), "messages": history}
        await server.ok("/s/v1/chat/completions", body)
        tree = await server.tree()
        assert [node["reason"] for node in tree] == ["first", "continued"]
        assert "dust" in tiny_renderer().decode(server.prompts()[-1])
        await server.ok("/other/v1/chat/completions", {**body, "messages": history[1:]})
        shown = tiny_renderer().decode(server.prompts()[-1])
        assert FIRST[1] in shown and "dust" in shown


@APIS
async def test_a_template_that_strips_reasoning_goes_on_from_an_echo(tmp_path: Path, api: Api) -> None:
    """Within a tool loop it keeps the tokens; a new question renders our own answer again, without its reasoning."""
    async with serving(tmp_path, says(ANSWER, "done", "bye"), thinking_retention="template") as server:
        loop = await begin(server, api)
        history: list[Step] = [Said(None, loop.answer.calls), *loop.results]
        node = await loop.goes_on(*history)
        expect(loop, node, "text_dropped")
        node = await loop.goes_on(*history, Said("done"), "thanks")
        tree = await server.tree()
        assert (node["reason"], node["parent_id"]) == ("template", tree[1]["id"])
        assert TEXT in loop.shown() and REASONING not in loop.shown()


@APIS
async def test_a_sub_agent_in_the_same_session_does_not_disturb_echoes(tmp_path: Path, api: Api) -> None:
    async with serving(tmp_path, says(ANSWER, ANSWER, "sub", "done", "bye")) as server:
        loop = await begin(server, api)
        sub = await turn(server, api, ["help"])
        result = [Result(call.id, "sub") for call in sub.calls]
        await turn(server, api, ["help", Said(REASONING, sub.calls), *result])
        history: list[Step] = [Said(None, loop.answer.calls), *loop.results]
        await loop.goes_on(*history)
        await loop.goes_on(*history, Said("done"), "thanks")
        tree = await server.tree()
        names = [node["id"] for node in tree]
        assert [names.index(node["parent_id"]) if node["parent_id"] else None for node in tree] == [None, None, 1, 0, 3]
        assert all(node["aligned"] for node in tree[2:])


@APIS
async def test_calls_of_two_answers_in_one_message_are_not_ours(tmp_path: Path, api: Api) -> None:
    async with serving(tmp_path, says(ANSWER, ANSWER, "done")) as server:
        one, other = [await turn(server, api, ["go"]) for _ in range(2)]
        calls = (one.calls[0], other.calls[1])
        await turn(server, api, ["go", Said(None, calls), *(Result(call.id, "r") for call in calls)])
        node = (await server.tree())[-1]
        assert (node["parent_id"], node["notes"]) == (None, {})


@APIS
async def test_a_marked_retry_of_a_request_with_an_echo_is_replayed(tmp_path: Path, api: Api) -> None:
    async with serving(tmp_path, says(ANSWER, "done")) as server:
        loop = await begin(server, api)
        body = {"model": "m", **api.body(["go", Said(None, loop.answer.calls), *loop.results])}
        one, other = [
            await server.ok(f"/s/v1/{api.path}", body, headers={"x-stainless-retry-count": count}) for count in "01"
        ]
        assert one["id"] == other["id"]
        assert len(await server.tree()) == 2


async def test_the_count_of_tokens_is_that_of_the_turn_that_goes_on(tmp_path: Path) -> None:
    async with serving(tmp_path, says(ANSWER, "done")) as server:
        loop = await begin(server, Messages)
        body = {"model": "m", **Messages.body(["go", Said(None, loop.answer.calls), *loop.results])}
        counted = await server.ok("/s/v1/messages/count_tokens", body)
        await server.ok("/s/v1/messages", body)
        assert counted["input_tokens"] == (await server.tree())[-1]["prompt_tokens"]


async def test_items_of_responses_go_on_with_and_without_their_ids(tmp_path: Path) -> None:
    """Reasoning as a message of its own, as the Copilot CLI sent it, and calls in items with our ids."""
    async with serving(tmp_path, says(ANSWER, *["done"] * 3)) as server:
        body = {"model": "m", **Responses.body(["go"])}
        output = (await server.ok("/s/v1/responses", body))["output"]
        said = [{"role": "assistant", "content": text} for text in (REASONING, TEXT)]
        calls = [item for item in output if item["type"] == "function_call"]
        bare = [{key: value for key, value in call.items() if key != "id"} for call in calls]
        results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "r"} for call in calls]
        for items in (
            [said[0], *calls, *results],
            [output[0], *said, *bare, *results],
            [calls[0], results[0], bare[1], results[1]],
        ):
            await server.ok("/s/v1/responses", {**body, "input": [user("go"), *items]})
        notes = [node["notes"]["echo"] for node in (await server.tree())[1:]]
        assert (
            notes == [["text_dropped", "reasoning_as_text"], ["reasoning_as_text", "split"], ["text_dropped"]] or notes
        )
        assert all(node["aligned"] for node in (await server.tree())[1:])


async def test_a_response_continues_by_id_after_an_echo(tmp_path: Path) -> None:
    async with serving(tmp_path, says(ANSWER, "done", "more")) as server:
        loop = await begin(server, Responses)
        node = await loop.goes_on(Said(None, loop.answer.calls), *loop.results)
        body = {**Responses.body([]), "model": "m", "input": "go on", "previous_response_id": node["id"]}
        await server.ok("/s/v1/responses", body)
        node = (await server.tree())[-1]
        assert (node["reason"], node["aligned"], node["notes"]) == ("continued", True, {})
        assert loop.continued()


def dropped(answer: Said, results: list[Result]) -> list[Step]:
    return [answer._replace(text=None), *results]


def thought(answer: Said, results: list[Result]) -> list[Step]:
    return [answer._replace(text=THOUGHTS[answer.text]), *results]


def thought_aloud(answer: Said, results: list[Result]) -> list[Step]:
    return [answer._replace(text=f"{THOUGHTS[answer.text]}\n\n{answer.text or ''}"), *results]


def in_two(answer: Said, results: list[Result]) -> list[Step]:
    return [Said(answer.text), answer._replace(text=None), *results]


def in_two_reversed(answer: Said, results: list[Result]) -> list[Step]:
    return [answer._replace(text=None), Said(answer.text), *results]


def call_by_call(answer: Said, results: list[Result]) -> list[Step]:
    pieces: list[Step] = []
    for at, (call, result) in enumerate(zip(answer.calls, results, strict=True)):
        pieces += [Said(answer.text if at == 0 else None, (call,)), result]
    return pieces


def call_by_call_thinking(answer: Said, results: list[Result]) -> list[Step]:
    text = f"<thinking>\r\n{THOUGHTS[answer.text]}\r\n</thinking>\r\n"
    return [*(Said(text if at == 0 else "", (call,)) for at, call in enumerate(answer.calls)), *results]


def filled(answer: Said, results: list[Result]) -> list[Step]:
    calls = tuple(
        call._replace(arguments=json.dumps({"lines": None, **json.loads(call.arguments)}, indent=2))
        for call in answer.calls
    )
    return [answer._replace(calls=calls), *results]


def everything(answer: Said, results: list[Result]) -> list[Step]:
    """All at once: nulls, reasoning with tags, a message for each call, results in between."""
    whole = filled(answer, results)[0]
    assert isinstance(whole, Said)
    return call_by_call(whole._replace(text=f"<think>{THOUGHTS[answer.text]}</think>"), results)


THOUGHTS: dict[str | None, str] = {"First\nthis.": "One\r\nthought.", None: "No words.", "Then\nthat.": "Another."}


@CROSSED
@APIS
@pytest.mark.parametrize(
    "changed",
    [
        *(dropped, thought, thought_aloud, in_two, in_two_reversed, call_by_call, call_by_call_thinking, filled),
        everything,
    ],
)
async def test_a_loop_whose_client_changes_every_answer_is_one_sample(tmp_path: Path, api: Api, changed: Any) -> None:
    """Two questions with two rounds of two calls each; the answers come back with CRLF and their reasoning in tags."""
    texts = []
    for _ in range(2):
        for text, thinking in list(THOUGHTS.items())[:2]:
            calls = f"{call_text(*FIRST)}\n{call_text(*SECOND)}"
            texts.append(f"<think>\n{thinking}\n</think>\n\n{text or ''}\n{calls}")
        texts.append("<think>\nDone.\n</think>\n\nAll\ndone.")
    async with serving(tmp_path, says(*texts)) as server:
        history: list[Step] = []
        for question in ("go", "again"):
            history.append(question)
            while (answer := await turn(server, api, history)).calls:
                results = [Result(call.id, f"result of {call.id}") for call in answer.calls]
                history += changed(answer._replace(text=answer.text or None), results)
            history.append(Said("<thinking>\nDone.\n</thinking>\r\n\r\nAll\r\ndone."))
        tree = await server.tree()
        assert [node["reason"] for node in tree] == ["first", *["continued"] * 5]
        (sample,) = await server.export()
        assert sum(sample["loss_mask"]) == sum(len(sampled(text)) for text in texts)
        assert sample["input_ids"] == server.prompts()[-1] + list(sampled(texts[-1]))
