"""include=request: the request of a stored turn, written again. Sent, it gives the same prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest

from proxy.engine.scripted.scripts import Fault, Reply, play
from tests.support import Server, assistant, call_text, function_tool, sampled, says, serving, system, tool_result, user

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ADD = function_tool("add", {"a": {"type": "integer"}})
SCHEMA = ADD["function"]["parameters"]
THINKS = "<think>\nwhy\n</think>\n\nText." + call_text("add", '{"a":  1}')
CHAT_TURN = {
    "model": "m",
    "tools": [ADD],
    "temperature": 0.5,
    "stop": ["END"],
    "logit_bias": {"5": -1},
    "max_tokens": 90,
}
RESPONSES_TURN = {
    **{"model": "m", "instructions": "Be brief.", "temperature": 0.5, "max_output_tokens": 90},
    "tools": [
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}]},
    ],
    **{"include": ["reasoning.encrypted_content"], "metadata": {"a": "b"}, "reasoning": {"effort": "low"}},
}
MESSAGES_TURN = {
    **{"model": "m", "system": "Be brief.", "max_tokens": 90, "stop_sequences": ["END"], "top_k": 7},
    "tools": [{"name": "add", "description": "adds", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
}


async def written(server: Server, turn: str | int, session: str = "s") -> Any:
    response = await server.http.get(f"/rl/sessions/{session}/interactions/{turn}?include=request")
    return response.raise_for_status().json()["request"]


async def send(server: Server, request: Any, session: str | None = None) -> list[int]:
    """Send a written request, to another `session` if it is given; return the ids of its prompt."""
    path = request["path"] if session is None else request["path"].replace("/s/", f"/{session}/")
    await server.ok(path, request["body"])
    return server.prompts()[-1]


async def chat(server: Server) -> None:
    messages = [system("Be brief."), user("q")]
    answer = await server.answer(messages, **CHAT_TURN)
    result = tool_result(answer["tool_calls"][0]["id"], "1")
    await server.chat([*messages, answer, result, user("more")], **{**CHAT_TURN, "tool_choice": "required"})


async def responses(server: Server) -> None:
    first = await server.ok(f"/s{RESPONSES}", {**RESPONSES_TURN, "input": "q"})
    (call,) = [item for item in first["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "1"}
    more = {"input": [result, user("more")], "previous_response_id": first["id"]}
    await server.ok(f"/s{RESPONSES}", {**RESPONSES_TURN, **more})


async def messages(server: Server) -> None:
    first = await server.ok(f"/s{MESSAGES}", {**MESSAGES_TURN, "messages": [user("q")]})
    (call,) = [block for block in first["content"] if block["type"] == "tool_use"]
    result = [{"type": "tool_result", "tool_use_id": call["id"], "content": "1"}, {"type": "text", "text": "more"}]
    history = [user("q"), {"role": "assistant", "content": first["content"]}, {"role": "user", "content": result}]
    await server.ok(f"/s{MESSAGES}", {**MESSAGES_TURN, "messages": history})


@pytest.mark.parametrize("talk", [chat, responses, messages])
async def test_a_written_request_gives_the_same_prompt_in_its_session_and_elsewhere(tmp_path: Path, talk: Any) -> None:
    async with serving(tmp_path, says(THINKS, "two", "again", "again", "again", "again")) as server:
        await talk(server)
        prompts = server.prompts()
        for number in range(2):
            request = await written(server, number)
            asked = server.engine.requests[number]
            assert request["lacks"] == [] and request["method"] == "POST"
            assert await send(server, request) == prompts[number]
            again = server.engine.requests[-1]
            assert (again.sampling, again.grammar) == (asked.sampling, asked.grammar)
            assert request["same_elsewhere"] or number > 0  # the text of a call may be written with other white space
            assert (await send(server, request, f"other-{number}") == prompts[number]) is request["same_elsewhere"]
        assert {turn["reason"] for turn in (await server.tree())[2:]} == {"resampled"}


async def test_the_form_of_the_reply_is_asked_for_again(tmp_path: Path) -> None:
    asked = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2}
    body = {
        "model": "m",
        "messages": [user("q")],
        "temperature": 1.0,
        "max_tokens": 9,
        "return_token_ids": True,
        **asked,
    }
    async with serving(tmp_path, says("one", "two")) as server:
        await server.post(f"/s{CHAT}", body)
        assert (await written(server, 0))["body"] == body


async def test_a_prefill_is_written_as_the_client_wrote_it(tmp_path: Path) -> None:
    async with serving(tmp_path, says(" one", " one", " two", " two")) as server:
        await server.chat([user("q"), assistant("A")], continue_final_message=True, add_generation_prompt=False)
        await server.ok(f"/s{MESSAGES}", {"model": "m", "max_tokens": 9, "messages": [user("r"), assistant("B")]})
        for number, prompt in enumerate(server.prompts()):
            request = await written(server, number)
            assert request["body"]["messages"][-1] == assistant("AB"[number])
            assert (request["lacks"], request["same_elsewhere"]) == ([], True)
            assert await send(server, request) == prompt


async def test_prompts_of_ids_are_written_as_ids(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two", "one", "two")) as server:
        await server.ok("/s/v1/generate", {"input_ids": [5, 6, 7], "sampling_params": {"ignore_eos": True}})
        await server.ok("/s/v1/completions", {"prompt": "Once upon", "max_tokens": 5, "echo": True, "logprobs": None})
        for number, prompt in enumerate(server.prompts()):
            request = await written(server, number)
            assert (request["lacks"], request["same_elsewhere"]) == ([], True)
            assert await send(server, request) == prompt


async def test_what_the_session_set_is_said_and_what_cannot_be_said_is_named(tmp_path: Path) -> None:
    options = {"sampling": {"top_k": 3, "min_p": 0.1}, "chat_template_kwargs": {"tone": "dry"}}
    async with serving(tmp_path, says("one", "two", "{}")) as server:
        await server.ok("/rl/start_session", {"session_id": "s", **options})
        await server.chat([user("q")], top_k=0)
        await server.ok(f"/s{MESSAGES}", {"model": "m", "max_tokens": 9, "messages": [user("r")]})
        await server.chat([user("j")], response_format={"type": "json_object"})
        first, second, third = [await written(server, number) for number in range(3)]
        assert (first["body"]["top_k"], first["body"]["min_p"]) == (0, 0.1) and first["lacks"] == []
        assert first["body"]["chat_template_kwargs"] == {"tone": "dry"}
        assert second["lacks"] == ["template_options", "sampling.min_p"] and second["body"]["top_k"] == 3
        assert third["lacks"] == ["response_format"]


async def test_answers_that_no_text_says_are_told_to_differ_elsewhere(tmp_path: Path) -> None:
    spelled = sampled("h", end=False) + sampled("e", end=False) + sampled("llo")
    assert spelled != sampled("hello")
    async with serving(tmp_path, play([Reply(spelled), Reply(sampled("x")), Reply(sampled("y"))])) as server:
        answer = await server.answer([user("q")])
        await server.chat([user("q"), answer, user("n")])
        request = await written(server, 1)
        assert (request["lacks"], request["same_elsewhere"]) == ([], False)
        assert await send(server, request) == server.prompts()[1]


async def test_failed_turns_have_their_request(tmp_path: Path) -> None:
    async with serving(
        tmp_path, play([Reply(sampled("a", end=False), fault=Fault.ERROR), Reply(sampled("b"))])
    ) as server:
        body = {"model": "m", "messages": [user("q")]}
        assert (await server.post(f"/s{CHAT}", body)).status_code >= 500
        (failed,) = await server.tree()
        assert failed["status"] == "failed"
        request = await written(server, failed["id"])
        assert await send(server, request) == server.prompts()[0]


async def test_a_session_shows_once_what_each_turn_brought(tmp_path: Path) -> None:
    async with serving(tmp_path, says(THINKS, "two")) as server:
        await chat(server)
        shown = (await server.http.get("/rl/sessions/s?include=added")).json()["interactions"]
        first, second = [turn["added"] for turn in shown]
        assert [message["content"] for message in first["messages"]] == ["Be brief.", "q"]
        assert [message["role"] for message in second["messages"]] == ["tool", "user"]
        assert (first["tools"], second["tools"], second["template_options"]) == ([ADD], None, None)
        assert (first["output"]["content"], second["sampling"]["temperature"]) == ("Text.", 0.5)
        whole = (await server.http.get("/rl/sessions/s/interactions/1?include=messages,added")).json()
        assert (whole["added"], whole["inherited"]) == (second, 3)
        assert whole["messages"][3:] == second["messages"]


async def test_the_path_is_percent_encoded_and_one_choice_is_asked_for(tmp_path: Path) -> None:
    name = "a@b/\u65e5+c"
    async with serving(tmp_path, says("one", "two")) as server:
        started = await server.ok("/rl/start_session", {"session_id": name})
        headers = {"authorization": f"Bearer {started['api_key']}"}
        body = {"messages": [user("q")], "n": 2}
        assert (await server.http.post(CHAT, json=body, headers=headers)).status_code == 200
        listed = (await server.http.get("/rl/sessions")).json()["sessions"]
        assert [entry["session_id"] for entry in listed] == [name]
        request = await written(server, 0, session=quote(name))
        assert request["path"].isascii() and unquote(request["path"]) == f"/{name}{CHAT}"
        assert "n" not in request["body"] or request["body"]["n"] == 1
