"""AReaL's client: the life of a session, rewards, discounts, and exports with the tokens of the server's own export."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxy.engine.scripted.scripts import Reply, play
from tests.support import Server, assistant, function_tool, real_server, sampled, says, serving, user
from tokengrove.areal import ApiType, OpenAIProxyClient
from tokengrove.client import AsyncClient, ServerUnreachable
from tokengrove.client.adapters import areal
from tokengrove.errors import InvalidRequest, NotFound, RequestTimeout, StoreUnavailable
from tokengrove.reasons import LogprobsOf

KEY = "a-key-of-the-administrator"


def client_of(server: Server) -> AsyncClient:
    """A client of a server in process, which the test stops."""
    return AsyncClient(app=server.app)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(tmp_path, says("one", "two", "three", "four", "five", "six")) as server:
        yield server


async def ask(server: Server, client: OpenAIProxyClient, *messages: Any, **more: Any) -> tuple[str, list[Any]]:
    """Run a turn as an agent does; return its id and the conversation with its answer."""
    assert client.session_id is not None
    reply = await server.chat(messages, client.session_id, **more)
    return reply["id"], [*messages, reply["choices"][0]["message"]]


async def chain(server: Server, client: OpenAIProxyClient, turns: int) -> list[str]:
    """Run a conversation; return the ids of its turns."""
    ids, messages = [], []
    for turn in range(turns):
        name, messages = await ask(server, client, *messages, user(f"question {turn}"))
        ids.append(name)
    return ids


@pytest.mark.parametrize("key", [None, KEY], ids=["open", "keyed"])
async def test_the_addresses_and_the_key_reach_the_session(tmp_path: Path, key: str | None) -> None:
    import httpx

    with real_server(tmp_path, engine_arg=("tokens=4",), **({"admin_key": key} if key else {})) as url:
        client = OpenAIProxyClient(session=object(), base_url=f"{url}/", task_id="task-1", admin_api_key=key or "any")
        body = {"model": "default", "messages": [user("Hi")]}
        async with client, httpx.AsyncClient() as http:
            bare = f"{client.session_url}/chat/completions"  # as an agent that sends a placeholder as its key
            assert (await http.post(bare, json=body, headers={"authorization": "Bearer DUMMY"})).status_code == 200
            by_key = {"authorization": f"Bearer {client.session_api_key}"}
            assert (await http.post(f"{url}/v1/chat/completions", json=body, headers=by_key)).status_code == 200
            anthropic = {**body, "max_tokens": 8}
            assert (await http.post(f"{client.session_url}/v1/messages", json=anthropic)).status_code == 200
            assert client.session.base_url == f"{client.session_url}/v1"
            await client.set_last_reward(2.0)
        assert client.session_id == "task-1-0"
        interactions = await client.export_interactions()
        assert [interaction.reward for interaction in interactions.values()] == [0.0, 0.0, 2.0]


async def test_the_session_has_the_fields_that_the_client_was_given(server: Server) -> None:
    async with OpenAIProxyClient(client=client_of(server), task_id="t", group_id="g", metadata={"step": 3}) as client:
        entry = await client_of(server).session_tree(str(client.session_id))
    assert (entry.task_id, entry.group_id, entry.extra["metadata"]) == ("t", "g", {"step": 3})
    assert (await client_of(server).session_tree(str(client.session_id))).status == "ended"


async def test_an_exception_ends_the_session_as_failed_and_leaves_the_block(server: Server) -> None:
    client = OpenAIProxyClient(client=client_of(server), task_id="t")
    with pytest.raises(KeyError, match="no answer"):
        async with client:
            raise KeyError("no answer")
    tree = await client_of(server).session_tree("t-0")
    assert (tree.status, tree.outcome, tree.extra["exit_reason"]) == ("ended", "Failed", "KeyError: 'no answer'")


async def test_cancellation_ends_the_session_as_failed(server: Server) -> None:
    client, begun = OpenAIProxyClient(client=client_of(server), task_id="t"), asyncio.Event()

    async def episode() -> None:
        async with client:
            begun.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(episode())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await client_of(server).session_tree("t-0")).outcome == "Failed"


async def test_an_end_that_fails_hides_no_exception_of_the_block(server: Server) -> None:
    inside = client_of(server)
    with pytest.raises(KeyError):
        async with OpenAIProxyClient(client=inside, task_id="t"):
            await inside.delete_session("t-0")
            raise KeyError
    with pytest.raises(NotFound):
        async with OpenAIProxyClient(client=inside, task_id="t", session_id="other"):
            await inside.delete_session("other")


async def test_what_fails_for_now_is_sent_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that restarts between the end of an episode and its export loses no result."""
    monkeypatch.setattr("tokengrove.client.retries._FIRST_PAUSE_S", 0.0)
    inside = client_of(server)
    errors = [StoreUnavailable("down", retry_after_s=0.0), ServerUnreachable("gone", retry_after_s=0.0)]
    send = inside._send

    async def failing(call: Any) -> Any:
        if errors:
            raise errors.pop(0)
        return await send(call)

    again = list(errors)
    async with OpenAIProxyClient(client=inside, task_id="t") as client:
        [name] = await chain(server, client, 1)
        monkeypatch.setattr(inside, "_send", failing)
    assert errors == []
    assert (await inside.session_tree("t-0")).status == "ended"
    errors.extend(again)
    assert list(await client.export_interactions()) == [name]
    assert errors == []


async def test_before_the_start_everything_that_needs_a_session_says_so() -> None:
    client = OpenAIProxyClient(base_url="http://127.0.0.1:9", task_id="t")
    assert client.session_id is None
    for name in ("session_url", "session_api_key", "session"):
        with pytest.raises(ValueError, match="async with"):
            getattr(client, name)
    for call in (client.set_last_reward(1.0), client.set_reward("id", 1.0), client.export_interactions()):
        with pytest.raises(ValueError, match="async with"):
            await call


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"base_url": "http://t"}, "task_id"),
        ({"task_id": "t"}, "base_url"),
        ({"task_id": "t", "base_url": "http://t", "client": AsyncClient("http://t")}, "client"),
    ],
)
def test_arguments_that_are_missing_or_contradict_each_other_are_named(arguments: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        OpenAIProxyClient(**arguments)


async def test_rewards_are_of_the_named_turn_or_of_the_last_complete_one(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, says("one", "two")) as server,  # a third turn fails
        OpenAIProxyClient(client=client_of(server), task_id="t") as client,
    ):
        first, second = await chain(server, client, 2)
        assert (await server.post("/t-0/v1/chat/completions", {"model": "m", "messages": [user("x")]})).is_error
        await client.set_last_reward(1.0)
        await client.set_reward(first, 0.25)
        await client.set_reward(first, 0.5)
        with pytest.raises(NotFound):
            await client.set_reward("chatcmpl-unknown", 1.0)
        interactions = await client.export_interactions(discount=0.0)
    assert {name: found.original_reward for name, found in interactions.items()} == {first: 0.5, second: 1.0}


@pytest.mark.parametrize(
    ("rewards", "discount", "returns"),
    [
        ([None, None, 1.0], 0.9, [0.81, 0.9, 1.0]),
        ([None, None, 10.0], 0.9, [8.1, 9.0, 10.0]),
        ([None, None, 2.0], 0.9, [1.62, 1.8, 2.0]),
        ([None, 1.5, 2.5], 0.85, [3.08125, 3.625, 2.5]),
        ([None, 1.0, 2.0], 0.8, [2.08, 2.6, 2.0]),
        ([3.0, 2.0], 0.9, [4.8, 2.0]),
        ([1.0, 2.0, 1.5], 0.9, [4.015, 3.35, 1.5]),
    ],
)
async def test_a_chain_has_the_discounted_rewards_of_areals_documentation(
    server: Server, rewards: Sequence[float | None], discount: float, returns: Sequence[float]
) -> None:
    async with OpenAIProxyClient(client=client_of(server), task_id="t") as client:
        for name, reward in zip(await chain(server, client, len(rewards)), rewards, strict=True):
            if reward is not None:
                await client.set_reward(name, reward)
        applied = await client.apply_reward_discount(turn_discount=discount)
    for credit in ("tree", "linear"):
        exported = await client.export_interactions(credit=credit)
        assert [found.reward for found in exported.values()] == pytest.approx(list(returns))
        assert [found.original_reward for found in exported.values()] == list(rewards)
    assert [found.reward for found in applied.values()] == pytest.approx(list(returns))


async def test_a_reward_flows_to_its_own_ancestors_only_unless_credit_is_linear(server: Server) -> None:
    async with OpenAIProxyClient(client=client_of(server), task_id="t") as client:
        await ask(server, client, user("a conversation"))
        await ask(server, client, user("another"))
        await client.set_last_reward(1.0)
    exports = {credit: await client.export_interactions(0.9, credit=credit) for credit in ("tree", "linear")}
    assert [found.reward for found in exports["tree"].values()] == [0.0, 1.0]
    assert [found.reward for found in exports["linear"].values()] == [0.9, 1.0]


async def test_a_discount_is_applied_once_and_not_contradicted(server: Server) -> None:
    async with OpenAIProxyClient(client=client_of(server), task_id="t", discount=0.5) as client:
        await chain(server, client, 2)
        await client.set_last_reward(1.0)
    assert [found.reward for found in (await client.export_interactions()).values()] == [0.5, 1.0]
    assert [found.reward for found in (await client.export_interactions(0.25)).values()] == [0.25, 1.0]
    with pytest.raises(InvalidRequest, match="between 0 and 1"):
        client.apply_reward_discount(turn_discount=1.5)
    client.apply_reward_discount(turn_discount=0.9)
    with pytest.raises(RuntimeError, match=r"^apply_reward_discount should only be called once\.$"):
        client.apply_reward_discount(turn_discount=0.9)
    for _ in range(2):
        assert [found.reward for found in (await client.export_interactions()).values()] == [0.9, 1.0]
    with pytest.raises(InvalidRequest, match="apply_reward_discount"):
        await client.export_interactions(discount=0.5)


async def test_the_leaves_of_a_tree_are_exported_each_with_the_rewards_of_its_path(server: Server) -> None:
    async with OpenAIProxyClient(client=client_of(server), task_id="t") as client:
        root, told = await ask(server, client, user("root"))
        a, told_a = await ask(server, client, *told, user("a"))
        a1, _ = await ask(server, client, *told_a, user("a1"))
        a2, _ = await ask(server, client, *told_a, user("a2"))
        b, told_b = await ask(server, client, *told, user("b"))
        b1, _ = await ask(server, client, *told_b, user("b1"))
        for name, reward in ((a1, 2.0), (a2, 1.5), (b1, 3.0), (a, 0.5)):
            await client.set_reward(name, reward)
    leaves = await client.export_interactions(style="concat")
    assert {name: leaf.reward for name, leaf in leaves.items()} == {a1: 2.5, a2: 2.0, b1: 3.0}
    every = await client.export_interactions()
    assert list(every) == [root, a, a1, a2, b, b1]
    parents = {name: found.parent.interaction_id for name, found in every.items() if found.parent is not None}
    assert parents == {a: root, a1: a, a2: a, b: root, b1: b}
    assert every[a1].parent is every[a]
    assert [message["content"] for message in every[a1].remaining_messages] == ["a1"]
    trained = sum(int(leaf.to_tensor_dict()["loss_mask"].sum()) for leaf in leaves.values())
    assert trained == sum(len(sampled(text)) for text in ("one", "two", "three", "four", "five", "six"))


def _same(tensors: Any, arrays: Any) -> None:
    assert set(tensors) == set(arrays)
    for name, values in arrays.items():
        assert tensors[name].numpy().dtype == values.dtype, name
        assert np.array_equal(tensors[name].numpy(), values), name


@pytest.mark.parametrize("style", ["individual", "concat"])
async def test_the_tensors_are_those_of_the_same_layout(server: Server, style: str) -> None:
    client = OpenAIProxyClient(client=client_of(server), task_id="t")
    async with client:
        first, told = await ask(server, client, user("root"))
        second, _ = await ask(server, client, *told, user("a"), max_tokens=2)
        tools = [function_tool("add")]
        await ask(server, client, *told, user("b"), tools=tools, tool_choice="required")
        await ask(server, client, user("edited"), assistant("another answer"), user("c"))
        await server.ok("/t-0/rl/mark", {"interaction_id": second, "spans": [[1, 2]], "trainable": True})
        await server.ok("/t-0/rl/mark", {"interaction_id": first, "trainable": False})
        await client.set_last_reward(1.0)
    found = await client.export_interactions(0.5, style)
    export = await client_of(server).export(session_id="t-0", layout=style, discount=0.5, reward_scope="path")
    entries = areal.interactions(export.samples)
    assert set(found) == set(entries)
    for name, entry in entries.items():
        _same(found[name].to_tensor_dict(), entry["tensor_dict"])
        assert found[name].reward == pytest.approx(entry["reward"])
    turns = await client.export_interactions()
    for name in turns:
        shown = await client_of(server).show_turn("t-0", name, ["ids", "logprobs", "reply"])
        response = turns[name].model_response
        assert response is not None
        assert (response.input_tokens, response.output_tokens) == (shown["prompt_ids"], shown["output_ids"])
        assert response.output_logprobs == shown["logprobs"]
        assert response.output_versions == [0] * response.output_len
        assert turns[name].completion.id == name
        assert turns[name].completion.choices[0].message.content == shown["reply"]["choices"][0]["message"]["content"]


async def test_turns_of_each_api_have_its_reply(server: Server) -> None:
    async with OpenAIProxyClient(client=client_of(server), task_id="t") as client:
        chat = await server.chat([user("q")], "t-0")
        response = await server.ok("/t-0/v1/responses", {"model": "m", "input": "q"})
        body = {"model": "m", "max_tokens": 9, "messages": [user("q")]}
        message = await server.ok("/t-0/v1/messages", body)
    one, two, three = (await client.export_interactions()).values()
    assert (one.api_type, two.api_type, three.api_type) == (ApiType.COMPLETION, ApiType.RESPONSE, ApiType.COMPLETION)
    assert [found.interaction_id for found in (one, two, three)] == [chat["id"], response["id"], message["id"]]
    assert one.completion.model_dump(exclude_unset=True) == chat == one.reply
    assert (two.response.output_text, two.completion) == ("two", None)
    assert three.completion.choices[0].message.content == message["content"][0]["text"] == "three"
    assert three.reply == message
    assert all(found.created_at and found.has_tensor_data for found in (one, two, three))
    assert [found.output_message_list for found in (one, two)] == [[assistant("one")], [assistant("two")]]


async def test_choices_and_turns_of_token_ids_are_interactions_too(server: Server) -> None:
    async with OpenAIProxyClient(client=client_of(server), task_id="t") as client:
        choices = await server.chat([user("q")], "t-0", n=2)
        ids = [*server.prompts()[0], 5]
        generated = await client.session.generate(ids, sampling_params={"max_new_tokens": 9})
        await client.session.set_reward(1.0, turn=1)
    one, two, three = (await client.export_interactions()).values()
    texts = sorted(choice["message"]["content"] for choice in choices["choices"])
    assert sorted(found.output_message_list[0]["content"] for found in (one, two) if found.output_message_list) == texts
    assert one.interaction_id != two.interaction_id
    assert one.completion.model_dump(exclude_unset=True) == choices
    assert (one.reward, two.reward, three.reward) == (0.0, 1.0, 0.0)
    assert three.interaction_id == generated.id
    response = three.model_response
    assert response is not None
    assert (response.input_tokens, response.output_tokens) == (ids, list(generated.output_ids))
    assert three.completion.choices[0].message.content == "three"


async def test_calls_that_failed_or_run_are_left_out(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one")) as server:
        async with OpenAIProxyClient(client=client_of(server), task_id="t") as client:
            assert await client.export_interactions() == {}
            [first] = await chain(server, client, 1)
            assert (await server.post("/t-0/v1/chat/completions", {"model": "m", "messages": [user("x")]})).is_error
            assert list(await client.export_interactions()) == [first]
        assert list(await client.export_interactions()) == [first]


async def test_an_export_waits_for_an_end_that_another_sends(server: Server) -> None:
    async with OpenAIProxyClient(client=client_of(server), task_id="t") as other:
        [name] = await chain(server, other, 1)
        client = OpenAIProxyClient(client=client_of(server), task_id="t")
        client.session_id = other.session_id
        with pytest.raises(RequestTimeout, match="has not ended within 0 s"):
            await client.export_interactions(timeout_s=0.0)
        waiting = asyncio.create_task(client.export_interactions())
        await asyncio.sleep(0)
    assert list(await waiting) == [name]


async def test_an_unknown_style_is_named_with_those_that_there_are(server: Server) -> None:
    async with OpenAIProxyClient(client=client_of(server), task_id="t") as client:
        with pytest.raises(ValueError, match="'merged'; the styles are individual and concat"):
            await client.export_interactions(style="merged")


async def test_turns_of_two_conversations_come_in_the_order_of_their_completion(server: Server) -> None:
    async with OpenAIProxyClient(client=client_of(server), task_id="t") as client:
        first, one = await ask(server, client, user("one"))
        second, _ = await ask(server, client, user("two"))
        third, _ = await ask(server, client, *one, user("more"))
    assert list(await client.export_interactions()) == [first, second, third]


async def test_each_branch_of_a_turn_leaves_its_tokens_trained(server: Server) -> None:
    async with OpenAIProxyClient(client=client_of(server), task_id="t") as client:
        _, told = await ask(server, client, user("root"))
        for branch in ("left", "right"):
            await ask(server, client, *told, user(branch))
    interactions = await client.export_interactions()
    assert len(interactions) == 3
    for interaction in interactions.values():
        assert interaction.model_response is not None
        assert int(interaction.to_tensor_dict()["loss_mask"].sum()) == interaction.model_response.output_len


async def test_the_times_of_a_turn_are_those_of_its_record(server: Server) -> None:
    async with OpenAIProxyClient(client=client_of(server), task_id="t") as client:
        name, _ = await ask(server, client, user("q"))
    (node,) = (await client_of(server).session_tree("t-0", include=["times"])).interactions
    response = (await client.export_interactions())[name].model_response
    assert node.times is not None and response is not None
    assert response.latency == node.times["completed_at"] - node.times["created_at"]
    assert response.ttft == node.times["first_token_at"] - node.times["created_at"]


async def test_a_response_says_which_distribution_its_logprobs_are_of(tmp_path: Path) -> None:
    replies = [Reply(sampled("one")), Reply(sampled("two"), logprobs_of=LogprobsOf.SAMPLED)]
    async with serving(tmp_path, play(replies)) as server:
        client = OpenAIProxyClient(client=client_of(server), task_id="t")
        async with client:
            names = await chain(server, client, 2)
            await client.set_last_reward(1.0)
        with pytest.warns(UserWarning, match="logprobs"):
            found = await client.export_interactions()
    responses = [found[name].model_response for name in names]
    assert [response and response.logprobs_of for response in responses] == ["rule", "sampled"]
