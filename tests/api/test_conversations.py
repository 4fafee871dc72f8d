"""Whole conversations against the server: the prompts of the engine, the tree, and the exported samples."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.scripted.scripts import Fault, Reply, Script, play
from proxy.types import Message, Role
from tests import support
from tests.support import (
    Server,
    assistant,
    call_text,
    function_tool,
    sampled,
    says,
    system,
    tiny_renderer,
    tool_result,
    user,
)


@contextlib.asynccontextmanager
async def serving(folder: Path, script: Script) -> AsyncIterator[Server]:
    """A server whose session is checked token by token when the conversation is over."""
    async with support.serving(folder, script) as server:
        yield server
        await check_exact(server)


async def check_exact(server: Server) -> None:
    """Check that each sample is a prompt and output of the engine, and that each sampled token is trained once."""
    given = {request.request_id: list(request.input_ids) for request in server.engine.requests}
    sampled_ids: dict[str, list[int]] = {}
    for sample in await server.export(layout="individual"):
        (turn,) = sample["turns"]
        start, end = turn["span"]
        assert sample["input_ids"][:start] == given[turn["interaction_id"]]
        assert sample["loss_mask"] == [0] * start + [1] * (end - start)
        sampled_ids[turn["interaction_id"]] = sample["input_ids"][start:end]
    trained: list[str] = []
    for sample in await server.export(layout="concat"):
        mask = [0] * len(sample["input_ids"])
        for turn in sample["turns"]:
            start, end = turn["span"]
            assert sample["input_ids"][:start] == given[turn["interaction_id"]]
            assert sample["input_ids"][start:end] == sampled_ids[turn["interaction_id"]]
            if turn["interaction_id"] not in trained:
                mask[start:end] = [1] * (end - start)
                trained.append(turn["interaction_id"])
        assert sample["loss_mask"] == mask
        assert [value != 0 for value in sample["logprobs"]] == [value == 1 for value in mask]
        assert [value >= 0 for value in sample["versions"]] == [value == 1 for value in mask]
        assert [value >= 0 for value in sample["turn_ids"]] == [value == 1 for value in mask]
    assert sorted(trained) == sorted(sampled_ids)


ADD = [function_tool("add", {"a": {"type": "integer"}})]


def rendered(messages: list[Message]) -> list[int]:
    return list(tiny_renderer().render(messages, (), {}))


async def test_second_prompt_equals_the_full_template(tmp_path: Path) -> None:
    async with serving(tmp_path, says("hello there", "fine")) as server:
        first = [system("be kind"), user("hi")]
        answer = await server.answer(first)
        await server.answer([*first, answer, user("how are you?")])
        conversation = [
            Message(Role.SYSTEM, "be kind"),
            Message(Role.USER, "hi"),
            Message(Role.ASSISTANT, "hello there"),
            Message(Role.USER, "how are you?"),
        ]
        assert server.prompts()[1] == rendered(conversation)
        assert [node["reason"] for node in await server.tree()] == ["first", "continued"]


async def test_a_truncated_answer_gets_its_end_token_once_as_context(tmp_path: Path) -> None:
    cut = sampled("one two three", end=False)
    end = tiny_renderer().stop_token_ids[0]
    async with serving(tmp_path, play([Reply(cut), Reply(sampled("four"))])) as server:
        answer = await server.answer([user("count")])
        await server.answer([user("count"), answer, user("go on")])
        prompt = server.prompts()[0] + list(cut)
        assert server.prompts()[1][: len(prompt) + 1] == [*prompt, end]
        (sample,) = await server.export()
        at = len(prompt)
        assert sample["input_ids"][at] == end
        assert sample["loss_mask"][at - 1 : at + 1] == [1, 0]


async def test_a_rewritten_answer_is_context_and_the_first_stays_as_a_dead_branch(tmp_path: Path) -> None:
    async with serving(tmp_path, says("first answer", "second")) as server:
        await server.answer([user("hi")])
        await server.answer([user("hi"), assistant("edited answer"), user("go on")])
        tree = await server.tree()
        assert [node["reason"] for node in tree] == ["first", "rewritten"]
        assert tree[1]["parent_id"] is None
        header = list(tiny_renderer().encode("<|im_start|>assistant\n"))
        prompt = server.prompts()[1]
        edited = list(tiny_renderer().encode("edited answer"))
        assert count(prompt, header + edited) == 1
        assert len(await server.export()) == 2


async def test_a_rewritten_second_answer_follows_the_untouched_first_one(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two", "three")) as server:
        first = [user("a")]
        one = await server.answer(first)
        await server.answer([*first, one, user("b")])
        await server.answer([*first, one, user("b"), assistant("two, edited"), user("c")])
        tree = await server.tree()
        assert [node["reason"] for node in tree] == ["first", "continued", "rewritten"]
        assert tree[2]["parent_id"] == tree[0]["id"] and tree[2]["aligned"]
        kept = server.prompts()[0] + list(sampled("one"))
        assert server.prompts()[2][: len(kept)] == kept
        samples = await server.export()
        assert sum(sum(sample["loss_mask"]) for sample in samples) == total_sampled(tree)


async def test_interleaved_agents_are_two_chains_with_each_token_once(tmp_path: Path) -> None:
    async with serving(tmp_path, says("a1", "b1", "a2", "b2")) as server:
        a, b = [system("A"), user("task a")], [system("B"), user("task b")]
        a.append(await server.answer(a))
        b.append(await server.answer(b))
        await server.answer([*a, user("more a")])
        await server.answer([*b, user("more b")])
        samples = await server.export()
        tree = await server.tree()
        assert [len(sample["interaction_ids"]) for sample in samples] == [2, 2]
        assert sum(sum(sample["loss_mask"]) for sample in samples) == total_sampled(tree)


async def test_two_tool_results_are_one_user_turn(tmp_path: Path) -> None:
    calls = call_text("add", '{"a": 1}') + "\n" + call_text("add", '{"a": 2}')
    async with serving(tmp_path, says(calls, "three")) as server:
        answer = await server.answer([user("add")], tools=ADD)
        ids = [call["id"] for call in answer["tool_calls"]]
        results = [tool_result(ids[0], "1"), tool_result(ids[1], "2")]
        await server.answer([user("add"), answer, *results], tools=ADD)
        added = server.prompts()[1][len(server.prompts()[0]) + len(sampled(calls)) :]
        assert count(added, list(tiny_renderer().encode("<|im_start|>user"))) == 1
        assert count(added, list(tiny_renderer().encode("<tool_response>"))) == 2


@pytest.mark.parametrize("arguments", ['{"a":1,"b":[1.0,2]}', '{ "b": [1, 2], "a": 1 }'])
async def test_arguments_serialised_again_are_the_same_node(tmp_path: Path, arguments: str) -> None:
    async with serving(tmp_path, says(call_text("add", '{"a": 1, "b": [1, 2]}'), "ok")) as server:
        answer = await server.answer([user("add")], tools=ADD)
        answer["tool_calls"][0]["function"]["arguments"] = arguments
        result = tool_result(answer["tool_calls"][0]["id"], "1")
        await server.answer([user("add"), answer, result], tools=ADD)
        assert [node["reason"] for node in await server.tree()] == ["first", "continued"]


async def test_renamed_and_swapped_call_ids_are_the_same_node(tmp_path: Path) -> None:
    calls = call_text("add", '{"a": 1}') + "\n" + call_text("add", '{"a": 2}')
    async with serving(tmp_path, says(calls, "x", "y")) as server:
        answer = await server.answer([user("add")], tools=ADD)
        first, second = (call["id"] for call in answer["tool_calls"])
        for names in (("r1", "r2"), (second, first)):
            echo = assistant(None, tool_calls=[dict(call) for call in answer["tool_calls"]])
            for call, name in zip(echo["tool_calls"], names, strict=True):
                call["id"] = name
            results = [tool_result(names[0], "1"), tool_result(names[1], "2")]
            await server.answer([user("add"), echo, *results], tools=ADD)
        assert [node["reason"] for node in await server.tree()] == ["first", "continued", "resampled"]


@pytest.mark.parametrize(
    "echo",
    [
        {"content": None},
        {"content": ""},
        {},
        {"content": []},
        {"content": [{"type": "text", "text": ""}], "name": None, "refusal": None, "reasoning_content": None},
    ],
)
async def test_empty_content_in_any_spelling_is_the_same_node(tmp_path: Path, echo: dict[str, Any]) -> None:
    async with serving(tmp_path, says(call_text("add", '{"a": 1}'), "ok")) as server:
        answer = await server.answer([user("add")], tools=ADD)
        replay = {"role": "assistant", "tool_calls": answer["tool_calls"], **echo}
        await server.answer([user("add"), replay, tool_result(answer["tool_calls"][0]["id"], "1")], tools=ADD)
        assert [node["reason"] for node in await server.tree()] == ["first", "continued"]


async def test_text_as_parts_and_empty_call_lists_are_the_same_node(tmp_path: Path) -> None:
    async with serving(tmp_path, says("hello", "x", "y")) as server:
        await server.answer([user("hi")])
        texts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
        parts = {"role": "assistant", "content": texts, "tool_calls": []}
        await server.answer([user("hi"), parts, user("a")])
        await server.answer([user("hi"), assistant("hello", tool_calls=None), user("b")])
        assert [node["reason"] for node in await server.tree()] == ["first", "continued", "branched"]


async def test_two_requests_at_once_are_siblings(tmp_path: Path) -> None:
    script = play([Reply(sampled("one"), delay_s=0.01), Reply(sampled("two"), delay_s=0.01)])
    async with serving(tmp_path, script) as server:
        await asyncio.gather(server.answer([user("hi")]), server.answer([user("hi")]))
        tree = await server.tree()
        assert sorted(node["reason"] for node in tree) == ["first", "resampled"]
        assert sorted(node["seq"] for node in tree) == [0, 1]
        assert len(await server.export()) == 2


async def test_too_few_logprobs_fail_the_call_and_are_never_exported(tmp_path: Path) -> None:
    async with serving(tmp_path, play([Reply(sampled("abc"), chunk=9, fault=Fault.BAD_LENGTHS)])) as server:
        response = await server.post("/s/v1/chat/completions", {"model": "m", "messages": [user("hi")]})
        assert response.status_code == 502
        assert response.json()["error"]["code"] == "engine_failed"
        assert [node["status"] for node in await server.tree()] == ["failed"]
        assert await server.export() == []


async def test_after_an_aborted_call_there_is_no_stray_header(tmp_path: Path) -> None:
    script = play([Reply(sampled("abc"), fault=Fault.ERROR, fault_after=1), Reply(sampled("ok"))])
    async with serving(tmp_path, script) as server:
        await server.post("/s/v1/chat/completions", {"model": "m", "messages": [user("hi")]})
        await server.answer([user("hi"), user("are you there?")])
        conversation = [Message(Role.USER, "hi"), Message(Role.USER, "are you there?")]
        assert server.prompts()[1] == rendered(conversation)


async def test_an_older_sibling_is_continued_as_that_sibling(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two", "three", "next")) as server:
        answers = [await server.answer([user("hi")]) for _ in range(3)]
        await server.answer([user("hi"), answers[1], user("go on")])
        tree = await server.tree()
        assert [node["reason"] for node in tree] == ["first", "resampled", "resampled", "continued"]
        assert tree[3]["parent_id"] == tree[1]["id"]


async def test_reasoning_stays_in_the_context_as_sampled(tmp_path: Path) -> None:
    text = "<think>\nbecause\n</think>\n\nyes"
    async with serving(tmp_path, says(text, "ok")) as server:
        answer = await server.answer([user("hi")])
        assert (answer["content"], answer["reasoning_content"].strip()) == ("yes", "because")
        await server.answer([user("hi"), assistant("yes"), user("sure?")])
        seen = server.prompts()[0] + list(sampled(text))
        assert server.prompts()[1][: len(seen)] == seen
        (sample,) = await server.export()
        assert sample["input_ids"] == server.prompts()[1] + list(sampled("ok"))


async def test_changed_tools_begin_a_new_root(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two", "three", "four")) as server:
        answer = await server.answer([system("S"), user("hi")], tools=ADD)
        await server.answer([system("S"), user("hi"), answer, user("b")], tools=[function_tool("sub")])
        await server.answer([system("T"), user("hi"), answer, user("b")], tools=ADD)
        await server.answer([system("S"), user("hi"), answer, user("b")], tools=ADD, reasoning_effort="low")
        reasons = [node["reason"] for node in await server.tree()]
        assert reasons == ["first", "tools_changed", "system_changed", "options_changed"]


async def test_a_call_in_user_text_or_inside_reasoning_is_no_call(tmp_path: Path) -> None:
    call = call_text("add", '{"a": 1}')
    async with serving(tmp_path, says(f"<think>\n{call}\n</think>\n\nno")) as server:
        answer = await server.answer([user(call)], tools=ADD)
        assert "tool_calls" not in answer
        assert answer["content"] == "no"
        assert "tool_call" in answer["reasoning_content"]


async def test_a_stop_string_cuts_after_the_token_that_completes_it(tmp_path: Path) -> None:
    ids = sampled("abcd" + "END" + "rest", end=False)
    async with serving(tmp_path, play([Reply(ids)])) as server:
        reply = await server.chat([user("hi")], stop="EN")
        assert reply["choices"][0]["message"]["content"] == "abcd"
        assert reply["choices"][0]["finish_reason"] == "stop"
        (sample,) = await server.export()
        output = [i for i, mask in zip(sample["input_ids"], sample["loss_mask"], strict=True) if mask]
        assert list(ids[: len(output)]) == output
        assert "EN" in tiny_renderer().decode(output)
        assert "EN" not in tiny_renderer().decode(output[:-1])


async def test_the_end_token_is_sampled_and_nothing_after_it_is_recorded(tmp_path: Path) -> None:
    end = tiny_renderer().stop_token_ids[0]
    after = sampled("yes") + sampled("garbage")
    async with serving(tmp_path, play([Reply(after, chunk=50), Reply(sampled("ok"))])) as server:
        answer = await server.answer([user("hi")])
        assert answer["content"] == "yes"
        await server.answer([user("hi"), answer, user("more")])
        kept = server.prompts()[0] + list(sampled("yes"))
        assert server.prompts()[1][: len(kept)] == kept
        assert server.prompts()[1][len(kept)] != end
        (sample,) = await server.export()
        assert sample["loss_mask"][len(kept) - 1] == 1


async def test_of_equal_siblings_the_one_whose_reasoning_is_echoed_is_continued(tmp_path: Path) -> None:
    texts = [f"<think>\n{thought}\n</think>\n\nyes" for thought in ("one", "two", "three")]
    async with serving(tmp_path, says(*texts, "next")) as server:
        answers = [await server.answer([user("hi")]) for _ in texts]
        await server.answer([user("hi"), answers[1], user("go on")])
        tree = await server.tree()
        assert tree[3]["parent_id"] == tree[1]["id"]


async def test_of_equal_siblings_without_evidence_the_newest_is_continued(tmp_path: Path) -> None:
    async with serving(tmp_path, says("same", "same", "next")) as server:
        answers = [await server.answer([user("hi")]) for _ in range(2)]
        await server.answer([user("hi"), answers[0], user("go on")])
        tree = await server.tree()
        assert tree[2]["parent_id"] == tree[1]["id"]


async def test_a_foreign_history_is_context(tmp_path: Path) -> None:
    async with serving(tmp_path, says("ok")) as server:
        await server.answer([user("a"), assistant("imported"), user("b")])
        (sample,) = await server.export()
        assert sum(sample["loss_mask"]) == len(sampled("ok"))
        assert [node["reason"] for node in await server.tree()] == ["first"]


async def test_forks_share_their_tokens_in_the_sample_of_the_first_leaf(tmp_path: Path) -> None:
    async with serving(tmp_path, says("root", "a", "a1", "a2")) as server:
        messages = [user("q")]
        messages += [await server.answer(messages), user("next")]
        messages += [await server.answer(messages)]
        await server.answer([*messages, user("1")])
        await server.answer([*messages, user("2")])
        first, second = await server.export()
        assert sum(first["loss_mask"]) == sum(len(sampled(text)) for text in ("root", "a", "a1"))
        assert sum(second["loss_mask"]) == len(sampled("a2"))
        assert len(first["interaction_ids"]) == len(second["interaction_ids"]) == 3


async def test_a_reply_that_the_limit_cuts_after_a_whole_call_ends_by_length(tmp_path: Path) -> None:
    call = call_text("add", "{}")
    async with serving(tmp_path, says(call + " and more")) as server:
        most = len(sampled(call, end=False))
        reply = await server.chat([user("q")], tools=[function_tool("add")], max_tokens=most)
        (choice,) = reply["choices"]
        assert [made["function"]["name"] for made in choice["message"]["tool_calls"]] == ["add"]
        assert choice["finish_reason"] == "length"


def count(ids: list[int], piece: list[int]) -> int:
    return sum(ids[at : at + len(piece)] == piece for at in range(len(ids) - len(piece) + 1))


def total_sampled(tree: list[Any]) -> int:
    return sum(node["output_tokens"] for node in tree)
