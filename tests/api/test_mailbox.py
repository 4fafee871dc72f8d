"""The mailbox engine: agents get the delivered answers, and only token ids with logprobs are trained."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.mailboxes import MailServer, posting
from tests.support import (
    assistant,
    call_text,
    function_tool,
    sampled,
    says,
    serving,
    system,
    tiny_renderer,
    tool_result,
    user,
)

ADD = [function_tool("add", {"a": {"type": "integer"}})]
IDS = sampled("yes, indeed").tolist()
LOGPROBS = [-0.25 * (at + 1) for at in range(len(IDS))]


async def test_a_request_has_the_messages_of_the_turn_and_its_token_ids(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [system("Be brief."), user("hi"), assistant(None, tool_calls=[call]), tool_result("c1", "two")]
    async with posting(tmp_path) as server:
        agent = asyncio.create_task(server.chat(messages, tools=ADD, temperature=0.5, max_tokens=40))
        letter = await server.letter()
        assert (letter["session_id"], letter["turn"], letter["api"], letter["model"]) == ("s", 0, "chat", "m")
        shown = letter["messages"]
        assert [message["role"] for message in shown] == ["system", "user", "assistant", "tool"]
        assert shown[2]["tool_calls"] == [call]
        assert (shown[3]["tool_call_id"], shown[3]["content"]) == ("c1", "two")
        assert letter["tools"][0]["function"]["name"] == "add"
        assert (letter["sampling"]["temperature"], letter["sampling"]["max_tokens"]) == (0.5, 40)
        assert letter["stop_token_ids"] == list(tiny_renderer().stop_token_ids)
        text = tiny_renderer().decode(letter["input_ids"])
        assert text.index("Be brief.") < text.index("hi") < text.index("two")
        await server.deliver(letter, output_ids=IDS, logprobs=LOGPROBS)
        reply = await agent
        assert reply["id"] == letter["request_id"]
        assert reply["usage"]["prompt_tokens"] == len(letter["input_ids"])
        (sample,) = await server.export()
        assert sample["input_ids"] == letter["input_ids"] + IDS


async def test_delivered_text_is_encoded_and_marked_as_not_sampled(tmp_path: Path) -> None:
    async with posting(tmp_path) as server:
        agent = server.ask(logprobs=True)
        await server.deliver(await server.letter(), text="yes, indeed")
        choice = (await agent)["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("yes, indeed", "stop")
        assert choice["logprobs"] is None
        node = await server.entry()
        assert (node["notes"]["sampled"], node["trainable"], node["output_tokens"]) == (False, False, len(IDS))
        (sample,) = await server.export()
        assert sample["input_ids"][-len(IDS) :] == IDS
        assert set(sample["loss_mask"]) == {0} and set(sample["logprobs"]) == {0.0}
        assert set(sample["versions"]) == {-1}


async def test_an_output_without_logprobs_cannot_be_marked_trainable(tmp_path: Path) -> None:
    async with posting(tmp_path) as server:
        agent = server.ask()
        await server.deliver(await server.letter(), text="yes, indeed")
        body = {"interaction_id": (await agent)["id"], "trainable": True}
        refused = await server.post("/s/rl/mark", body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "trainable")
        await server.ok("/s/rl/mark", {**body, "trainable": False})
        (sample,) = await server.export()
        assert set(sample["loss_mask"]) == {0}


async def test_a_replayed_reply_is_the_same(tmp_path: Path) -> None:
    async with posting(tmp_path) as server:
        agent = server.ask(logprobs=True)
        await server.deliver(await server.letter(), text="yes, indeed")
        first = await agent
        body = {"model": "m", "messages": [user("hi")], "logprobs": True}
        again = await server.ok("/s/v1/chat/completions", body, headers={"x-stainless-retry-count": "1"})
        assert again["id"] == first["id"] and again["choices"] == first["choices"]
        assert await server.poll() == {"status": "empty"}


async def test_calls_and_reasoning_in_delivered_text_are_parsed(tmp_path: Path) -> None:
    async with posting(tmp_path) as server:
        agent = server.ask(tools=ADD)
        text = "<think>\neasy\n</think>\n\n" + call_text("add", '{"a": 1}')
        await server.deliver(await server.letter(), text=text)
        choice = (await agent)["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1})
        assert choice["message"]["reasoning_content"].strip() == "easy"


async def test_a_conversation_continues_token_by_token_after_delivered_text(tmp_path: Path) -> None:
    async with posting(tmp_path) as server:
        agent = server.ask()
        await server.deliver(first := await server.letter(), text="yes, indeed")
        history = [user("hi"), (await agent)["choices"][0]["message"], user("more")]
        follower = asyncio.create_task(server.chat(history))
        letter = await server.letter()
        assert letter["turn"] == 1
        assert letter["input_ids"][: len(first["input_ids"]) + len(IDS)] == first["input_ids"] + IDS
        await server.deliver(letter, output_ids=IDS, logprobs=LOGPROBS)
        await follower
        (sample,) = await server.export()
        assert sample["input_ids"] == letter["input_ids"] + IDS
        assert sample["loss_mask"] == [0] * len(letter["input_ids"]) + [1] * len(IDS)


async def test_ids_with_logprobs_are_trained_like_sampled_tokens(tmp_path: Path) -> None:
    async with posting(tmp_path) as server:
        agent = server.ask(logprobs=True)
        letter = await server.letter()
        await server.deliver(letter, output_ids=IDS, logprobs=LOGPROBS, version=7)
        choice = (await agent)["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("yes, indeed", "stop")
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == LOGPROBS[:-1]
        node = await server.entry()
        assert (node["trainable"], node["notes"], node["versions"]) == (True, {}, [[len(IDS), 7]])
        (sample,) = await server.export()
        context = len(letter["input_ids"])
        assert sample["input_ids"] == letter["input_ids"] + IDS
        assert sample["loss_mask"] == [0] * context + [1] * len(IDS)
        assert sample["logprobs"] == [0.0] * context + LOGPROBS
        assert sample["versions"] == [-1] * context + [7] * len(IDS)


async def test_ids_without_logprobs_are_context(tmp_path: Path) -> None:
    async with posting(tmp_path) as server:
        agent = server.ask()
        await server.deliver(await server.letter(), output_ids=IDS)
        assert (await agent)["choices"][0]["message"]["content"] == "yes, indeed"
        node = await server.entry()
        assert (node["notes"], node["trainable"]) == ({"sampled": False}, False)
        assert set((await server.export())[0]["loss_mask"]) == {0}


async def test_tokens_after_an_end_token_are_not_recorded(tmp_path: Path) -> None:
    async with posting(tmp_path) as server:
        agent = server.ask()
        more = sampled("not this").tolist()
        await server.deliver(await server.letter(), output_ids=IDS + more, logprobs=LOGPROBS + [-1.0] * len(more))
        assert (await agent)["choices"][0]["message"]["content"] == "yes, indeed"
        assert (await server.export())[0]["input_ids"][-len(IDS) :] == IDS


@pytest.mark.parametrize(
    ("answer", "finish"),
    [
        ({"text": "yes"}, "stop"),
        ({"text": "yes", "finish_reason": "length"}, "length"),
        ({"text": "yes yes yes yes yes yes yes yes yes"}, "length"),
        ({"text": ""}, "stop"),
        ({"output_ids": IDS[:3], "logprobs": LOGPROBS[:3]}, "stop"),
        ({"output_ids": IDS[:3], "logprobs": LOGPROBS[:3], "finish_reason": "length"}, "length"),
        ({"output_ids": sampled("a b c d e f", end=False).tolist()[:6]}, "length"),
    ],
)
async def test_an_answer_ends_with_its_finish_reason_and_within_the_budget(
    tmp_path: Path, answer: dict[str, Any], finish: str
) -> None:
    async with posting(tmp_path) as server:
        agent = server.ask(max_tokens=6)
        await server.deliver(await server.letter(), **answer)
        reply = await agent
        assert reply["choices"][0]["finish_reason"] == finish
        assert reply["usage"]["completion_tokens"] <= 6
        await server.export()


async def test_a_stop_string_truncates_delivered_text(tmp_path: Path) -> None:
    async with posting(tmp_path) as server:
        agent = server.ask(stop=["ndeed"])
        await server.deliver(await server.letter(), text="yes, indeed, and more")
        assert (await agent)["choices"][0]["message"]["content"] == "yes, i"


async def test_a_delivered_error_reaches_the_agent_and_fails_the_turn(tmp_path: Path) -> None:
    async with posting(tmp_path) as server:
        body = {"model": "m", "messages": [user("hi")]}
        agent = asyncio.create_task(server.post("/s/v1/chat/completions", body))
        await server.deliver(await server.letter(), error="the model outside fell over")
        response = await agent
        assert response.status_code == 502
        assert "the model outside fell over" in response.json()["error"]["message"]
        node = await server.entry()
        assert (node["status"], node["error"], node["turn"]) == ("failed", "the model outside fell over", None)
        assert await server.export() == []
        again = server.ask()
        letter = await server.letter()
        assert letter["turn"] == 0
        await server.deliver(letter, text="better")
        await again


async def test_a_delivered_error_of_an_api_reaches_the_agent_with_its_code(tmp_path: Path) -> None:
    async with posting(tmp_path) as server:
        for error, status, code in [
            ({"message": "too long", "code": "context_length_exceeded", "param": "messages"}, 400, None),
            ({"message": "over", "code": "session_closed", "type": "x"}, 403, None),
            ({"message": "busy", "code": "engine_unavailable"}, 502, "engine_failed"),
            ({"message": "odd", "code": "nobody_knows"}, 502, "engine_failed"),
        ]:
            body = {"model": "m", "messages": [user("hi")]}
            agent = asyncio.create_task(server.post("/s/v1/chat/completions", body))
            await server.deliver(await server.letter(), error=error)
            response = await agent
            told = response.json()["error"]
            assert (response.status_code, told["code"], told["message"], told["param"]) == (
                status,
                code or error["code"],
                error["message"],
                error.get("param"),
            )


async def test_a_letter_has_what_the_client_set_as_fields_of_a_chat_completion(tmp_path: Path) -> None:
    async with posting(tmp_path) as server:
        schema = {"type": "object", "properties": {"a": {"type": "string"}}}
        asked = {
            "temperature": 1.0,
            "top_p": 0.5,
            "max_tokens": 7,
            "stop": ["x"],
            "logit_bias": {"5": 1.0},
            "seed": 3,
            "chat_template_kwargs": {"enable_thinking": False},
            "parallel_tool_calls": False,
        }
        formats = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        choice = {"structured_outputs": {"choice": ["{}"]}}
        for body in ({}, asked, choice, {"response_format": formats}, {"response_format": {"type": "json_object"}}):
            agent = server.ask(**body)
            letter = await server.letter()
            assert letter["asked"] == body
            await server.deliver(letter, text="{}")
            await agent


async def test_a_completion_of_another_model_may_have_more_tokens_here_than_there(tmp_path: Path) -> None:
    async with posting(tmp_path) as server:
        agent = server.ask(max_tokens=2)
        letter = await server.letter()
        message = {"content": "a text of more than two tokens"}
        assert await server.refused(letter, message=message) == "message"
        await server.deliver(letter, response={"choices": [{"message": message, "finish_reason": "stop"}]})
        answer = (await agent)["choices"][0]
        assert (answer["message"]["content"], answer["finish_reason"]) == (message["content"], "stop")


BAD = [
    ({}, "text"),
    ({"text": "a", "output_ids": IDS}, "output_ids"),
    ({"text": "a", "error": "b"}, "error"),
    ({"text": 5}, "text"),
    ({"error": ["x"]}, "error"),
    ({"text": "a", "logprobs": [-1.0]}, "logprobs"),
    ({"output_ids": IDS, "logprobs": LOGPROBS[1:]}, "logprobs"),
    ({"output_ids": IDS, "logprobs": [*LOGPROBS, -1.0]}, "logprobs"),
    ({"output_ids": IDS, "logprobs": []}, "logprobs"),
    ({"output_ids": IDS, "logprobs": [0.5] * len(IDS)}, "logprobs"),
    ({"output_ids": IDS, "logprobs": [-1e38] * len(IDS)}, "logprobs"),
    ({"output_ids": IDS, "logprobs": [False] * len(IDS)}, "logprobs"),
    ({"output_ids": IDS, "logprobs": ["-1"] * len(IDS)}, "logprobs"),
    ({"output_ids": IDS, "logprobs": -1.0}, "logprobs"),
    ({"output_ids": []}, "output_ids"),
    ({"output_ids": [-1]}, "output_ids"),
    ({"output_ids": [tiny_renderer().vocab_size]}, "output_ids"),
    ({"output_ids": [2**40]}, "output_ids"),
    ({"output_ids": ["5"]}, "output_ids"),
    ({"output_ids": [5] * 21}, "output_ids"),
    ({"output_ids": IDS, "finish_reason": "tool_calls"}, "finish_reason"),
    ({"output_ids": IDS, "version": -1}, "version"),
    ({"output_ids": IDS, "version": 2**31}, "version"),
    ({"output_ids": IDS, "version": "7"}, "version"),
]


async def test_a_wrong_answer_is_refused_by_field_and_can_be_delivered_again(tmp_path: Path) -> None:
    async with posting(tmp_path) as server:
        agent = server.ask(max_tokens=20)
        letter = await server.letter()
        for answer, param in BAD:
            assert await server.refused(letter, **answer) == param, answer
        await server.deliver(letter, output_ids=IDS, logprobs=LOGPROBS)
        assert (await agent)["choices"][0]["message"]["content"] == "yes, indeed"


async def test_a_second_answer_is_refused_and_the_first_is_kept(tmp_path: Path) -> None:
    async with posting(tmp_path) as server:
        agent = server.ask()
        letter = await server.letter()
        await server.deliver(letter, text="first")
        assert await server.refused(letter, text="second") == "interaction_id"
        assert (await agent)["choices"][0]["message"]["content"] == "first"
        assert await server.refused(letter, text="third") == "interaction_id"
        assert await server.refused({"request_id": "chatcmpl-nobody"}, 404, text="x") == "interaction_id"


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_streaming_agents_get_what_is_delivered(tmp_path: Path, path: str) -> None:
    async with posting(tmp_path) as server:
        turns: dict[str, Any] = {"input": "hi"} if path == "responses" else {"messages": [user("hi")]}
        body = {"model": "m", "stream": True, "max_tokens": 50, **turns}
        agent = asyncio.create_task(server.post(f"/s/v1/{path}", body))
        letter = await server.letter()
        assert letter["messages"] == [{"role": "user", "content": "hi"}]
        await server.deliver(letter, text="yes, indeed")
        text = (await agent).text
        assert "yes, indeed" in text or "".join(_pieces(text)) == "yes, indeed"
        assert (await server.entry())["status"] == "complete"


def _pieces(stream: str) -> list[str]:
    """The text of a chat stream or a Messages stream."""
    pieces = []
    for line in stream.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            delta = event["choices"][0]["delta"] if event.get("choices") else event.get("delta", {})
            if isinstance(delta, dict):
                pieces.append(delta.get("content") or delta.get("text") or "")
    return pieces


async def test_a_new_weight_version_is_that_of_later_deliveries(tmp_path: Path) -> None:
    async with posting(tmp_path) as server:
        agent = server.ask()
        letter = await server.letter()
        await server.ok("/engine/update_weights", {"path": "/weights/4", "version": 4})
        await server.deliver(letter, output_ids=IDS, logprobs=LOGPROBS)
        await agent
        assert (await server.entry())["versions"] == [[len(IDS), 4]]


async def test_another_engine_has_no_mailbox(tmp_path: Path) -> None:
    async with serving(tmp_path, says()) as server:
        for path, body in (("next", {}), ("deliver", {"request_id": "x", "text": "a"})):
            response = await server.post(f"/mailbox/{path}", body)
            assert response.status_code == 501 and "--engine mailbox" in response.json()["error"]["message"]


async def generate(server: MailServer, path: str, answer: dict[str, Any]) -> Any:
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 20}}
    caller = asyncio.create_task(server.ok(path, body))
    letter = await server.letter()
    assert letter["input_ids"] == [5, 6, 7]
    await server.deliver(letter, **answer)
    return await caller


@pytest.mark.parametrize("path", ["/v1/generate", "/s/v1/generate"])
async def test_a_generate_request_gets_ids_and_their_logprobs(tmp_path: Path, path: str) -> None:
    async with posting(tmp_path) as server:
        reply = await generate(server, path, {"output_ids": IDS, "logprobs": LOGPROBS, "version": 3})
        assert (reply["output_ids"], reply["logprobs"]) == (IDS, LOGPROBS)
        assert (reply["versions"], reply["finish_reason"]) == ([3] * len(IDS), "stop")


@pytest.mark.parametrize("path", ["/v1/generate", "/s/v1/generate"])
async def test_a_generate_request_gets_no_logprobs_without_delivered_ones(tmp_path: Path, path: str) -> None:
    async with posting(tmp_path) as server:
        reply = await generate(server, path, {"output_ids": IDS})
        assert (reply["output_ids"], reply["logprobs"]) == (IDS, None)


async def test_text_is_refused_for_an_unrecorded_generate_request(tmp_path: Path) -> None:
    async with posting(tmp_path) as server:
        caller = asyncio.create_task(server.ok("/v1/generate", {"input_ids": [5]}))
        letter = await server.letter()
        assert (letter["session_id"], letter["messages"]) == ("", [])
        assert await server.refused(letter, text="yes") == "text"
        await server.deliver(letter, output_ids=IDS)
        await caller


CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
THOUGHT = {"role": "assistant", "content": None, "reasoning_content": "easy", "tool_calls": [{"id": "x", **CALL}]}


def completion(message: Any, **choice: Any) -> dict[str, Any]:
    """A chat completion, as an API of another model returns it."""
    choices = [{"index": 0, "message": message, "finish_reason": "stop", **choice}]
    return {"id": "other", "object": "chat.completion", "model": "other", "choices": choices, "usage": {}}


@pytest.mark.parametrize("kind", ["message", "response"])
async def test_a_delivered_message_is_written_in_the_format_of_the_family(tmp_path: Path, kind: str) -> None:
    async with posting(tmp_path) as server:
        agent = server.ask(tools=ADD, logprobs=True)
        answer = THOUGHT if kind == "message" else completion(THOUGHT, finish_reason="tool_calls")
        await server.deliver(await server.letter(), **{kind: answer}, version=3)
        choice = (await agent)["choices"][0]
        assert (choice["finish_reason"], choice["logprobs"]) == ("tool_calls", None)
        message = choice["message"]
        assert (message["content"], message["reasoning_content"].strip()) == (None, "easy")
        assert [call["function"] for call in message["tool_calls"]] == [CALL["function"]]
        node = await server.entry()
        assert (node["notes"], node["trainable"]) == ({"sampled": False}, False)
        written = sampled("<think>\neasy\n</think>\n\n" + call_text("add", '{"a": 1}')).tolist()
        shown = (await server.http.get("/rl/sessions/s/interactions/0?include=ids,logprobs")).json()
        assert (shown["output_ids"], shown["logprobs"], shown["versions"]) == (written, None, [[len(written), 3]])


async def test_an_agent_goes_on_after_a_delivered_message(tmp_path: Path) -> None:
    async with posting(tmp_path) as server:
        agent = server.ask(tools=ADD)
        await server.deliver(first := await server.letter(), message=THOUGHT)
        answer = (await agent)["choices"][0]["message"]
        history = [user("hi"), answer, tool_result(answer["tool_calls"][0]["id"], "1")]
        follower = asyncio.create_task(server.chat(history, tools=ADD))
        letter = await server.letter()
        assert letter["input_ids"][: len(first["input_ids"])] == first["input_ids"]
        await server.deliver(letter, response=completion({"role": "assistant", "content": "It is 1."}))
        choice = (await follower)["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("It is 1.", "stop")
        assert [node["reason"] for node in await server.tree()] == ["first", "continued"]


async def test_a_message_that_was_cut_has_no_end_token(tmp_path: Path) -> None:
    async with posting(tmp_path) as server:
        agent = server.ask()
        await server.deliver(await server.letter(), response=completion({"content": "yes"}, finish_reason="length"))
        choice = (await agent)["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("yes", "length")
        shown = (await server.http.get("/rl/sessions/s/interactions/0?include=ids")).json()
        assert shown["output_ids"][-len(sampled("yes", end=False)) :] == sampled("yes", end=False).tolist()


@pytest.mark.parametrize(
    ("answer", "param"),
    [
        ({"message": {"role": "user", "content": "hi"}}, "message.role"),
        ({"message": {"content": 3}}, "message.content"),
        ({"message": {"tool_calls": [{"function": {}}]}}, "message.tool_calls[0].function.name"),
        ({"message": "yes"}, "message"),
        ({"message": THOUGHT}, "message"),  # the request has no tools
        ({"message": {"content": "a<|im_end|>b"}}, "message"),
        ({"message": {"content": "long " * 40}}, "message"),
        ({"message": {"content": "yes"}, "finish_reason": "tool_calls"}, "finish_reason"),
        ({"message": {"content": "yes"}, "logprobs": [-1.0]}, "logprobs"),
        ({"message": {"content": "yes"}, "text": "yes"}, "text"),
        ({"response": {"choices": []}}, "response.choices"),
        ({"response": {"content": [{"type": "text", "text": "yes"}]}}, "response.choices"),
        ({"response": completion(None)}, "response.choices[0].message"),
        ({"response": completion({"content": "yes"}, finish_reason="why")}, "response.choices[0].finish_reason"),
        ({"response": completion({"content": "yes"}), "finish_reason": "stop"}, "finish_reason"),
    ],
)
async def test_a_message_that_does_not_fit_is_refused_and_the_request_waits_on(
    tmp_path: Path, answer: dict[str, Any], param: str
) -> None:
    async with posting(tmp_path) as server:
        agent = server.ask(max_tokens=60)
        letter = await server.letter()
        assert await server.refused(letter, **answer) == param
        await server.deliver(letter, message={"content": "yes"})
        assert (await agent)["choices"][0]["message"]["content"] == "yes"


async def test_after_a_prefill_a_message_is_the_rest_of_the_answer(tmp_path: Path) -> None:
    async with posting(tmp_path) as server:
        body = {"model": "m", "max_tokens": 50, "messages": [user("hi"), assistant("Sure:")]}
        agent = asyncio.create_task(server.ok("/s/v1/messages", body))
        letter = await server.letter()
        assert await server.refused(letter, message={"content": "yes", "reasoning_content": "easy"}) == "message"
        await server.deliver(letter, message={"content": " yes"})
        assert (await agent)["content"] == [{"type": "text", "text": " yes"}]
        shown = (await server.http.get("/rl/sessions/s/interactions/0?include=ids,messages")).json()
        assert shown["output_ids"] == sampled(" yes").tolist()
        assert shown["output"]["content"] == "Sure: yes"
