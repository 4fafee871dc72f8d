"""What a session sets for its turns: sampling and whose wins, the format of tool calls, chat template options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import Server, call_text, function_tool, says, serving, user

GREEDY_AGENT = {
    **{"temperature": 0.2, "top_p": 0.5, "top_k": 3, "presence_penalty": 0.5, "logit_bias": {"5": 1.0}, "seed": 7},
    **{"max_tokens": 50, "min_tokens": 9, "stop": ["STOP"], "repetition_penalty": 1.5, "length_penalty": 1.2},
}


async def start(server: Server, **options: Any) -> Any:
    return await server.ok("/rl/start_session", {"session_id": "s", **options})


async def turn(server: Server, number: int, session: str = "s") -> Any:
    path = f"/rl/sessions/{session}/interactions/{number}?include=messages,reply,ids"
    return (await server.http.get(path)).raise_for_status().json()


async def test_the_sessions_sampling_wins_over_the_requests_where_it_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two", "three")) as server:
        trainers = {"temperature": 0.8, "top_k": 3, "max_tokens": 20}
        await start(server, sampling=trainers, sampling_policy="override")
        response = await server.post("/s/v1/chat/completions", {"messages": [user("a")], "model": "m", **GREEDY_AGENT})
        ignored = response.headers["x-tokengrove-ignored"].replace(" ", "").split(",")
        expected = ["length_penalty", "logit_bias", "min_tokens", "presence_penalty", "repetition_penalty", "seed"]
        expected += ["temperature", "top_p", "max_tokens"]
        assert response.status_code == 200 and ignored == expected
        asked = server.engine.requests[-1].sampling
        assert asked.to_json() == {"temperature": 0.8, "top_k": 3, "max_tokens": 20, "stop": ["STOP"]}
        shown = await turn(server, 0)
        assert shown["sampling"] == asked.to_json() and shown["notes"]["dropped"] == expected
        # A shorter answer may be asked for; what says nothing else is not named.
        body = {"model": "m", "messages": [user("b")], "temperature": 0.8, "max_tokens": 5}
        short = await server.post("/s/v1/chat/completions", body)
        assert "x-tokengrove-ignored" not in short.headers and server.engine.requests[-1].sampling.max_tokens == 5
        await server.ok("/s/v1/messages", {"model": "m", "max_tokens": 500, "messages": [user("c")], "temperature": 0})
        assert server.engine.requests[-1].sampling.to_json() == trainers


async def test_the_sessions_sampling_fills_what_a_request_leaves_out(tmp_path: Path, database_url: str) -> None:
    sampling = {"temperature": 0.8, "stop": ["END"], "max_tokens": 20}
    async with serving(tmp_path, says(), database_url=database_url) as server:
        await start(server, sampling=sampling, sampling_policy="default")
    async with serving(tmp_path, says("one END two", "one END two"), database_url=database_url) as server:
        assert (await server.answer([user("a")], temperature=0.1))["content"] == "one"
        first = server.engine.requests[-1].sampling
        assert first.to_json() == {**sampling, "temperature": 0.1}
        assert (await server.answer([user("b")], stop="two", max_tokens=30))["content"] == "one END"
        assert server.engine.requests[-1].sampling.to_json() == {"temperature": 0.8, "stop": ["two"], "max_tokens": 30}


async def test_the_text_ends_with_the_stop_string_where_that_is_asked_for(tmp_path: Path) -> None:
    """Environments read `<answer>...</answer>`: without its end the action would be lost."""
    said = "<answer>Up</answer> and more"
    async with serving(tmp_path, says(*[said] * 7)) as server:
        await start(server, sampling={"stop": ["</answer>", "</answer>\n"], "include_stop_str_in_output": True})
        answer = await server.answer([user("a")])
        assert answer["content"] == "<answer>Up</answer>"
        await server.answer([user("a"), answer, user("b")])
        first, second = [await turn(server, number) for number in (0, 1)]
        assert second["parent_id"] == first["interaction_id"] and second["aligned"]
        assert first["finish_reason"] == "stop_string" and first["stop_string"] == "</answer>"
        assert (await server.answer([user("c")], include_stop_str_in_output=False))["content"] == "<answer>Up"
        for path, body in (
            ("chat/completions", {"messages": [user("d")]}),
            ("completions", {"prompt": "d"}),
            ("responses", {"input": "d"}),
        ):
            more = {"model": "m", "stop": "</answer>", "include_stop_str_in_output": True, **body}
            response = await server.post(f"/free/v1/{path}", more)
            assert "<answer>Up</answer>" in response.text and "more" not in response.text
            assert "x-tokengrove-ignored" not in response.headers
        body = {"messages": [user("e")], "stop": "</answer>", "include_stop_str_in_output": True, "stream": True}
        streamed = await server.post("/free/v1/chat/completions", body)
        assert "and more" not in streamed.text and "</" in streamed.text
        wrong = await server.post("/free/v1/chat/completions", {**body, "include_stop_str_in_output": 1})
        assert wrong.json()["error"]["param"] == "include_stop_str_in_output"


async def test_a_session_reads_tool_calls_by_the_parser_that_it_names(tmp_path: Path, database_url: str) -> None:
    """The built-in model writes calls as qwen25 does; as mistral reads them, they are text."""
    written = call_text("f", '{"a": 1}')
    tools = [function_tool("f", {"a": {"type": "integer"}})]
    async with serving(tmp_path, says(), database_url=database_url) as server:
        for name in ("qwen25", "mistral"):
            await server.ok("/rl/start_session", {"session_id": name, "tool_parser": name})
    async with serving(tmp_path, says(written, written, "forced"), database_url=database_url) as server:
        body = {"model": "m", "messages": [user("go")], "tools": tools}
        replies = {}
        for name in ("qwen25", "mistral"):
            headers = {"idempotency-key": name}
            reply = await server.ok(f"/{name}/v1/chat/completions", body, headers=headers)
            replies[name] = reply["choices"][0]["message"]
            assert await server.ok(f"/{name}/v1/chat/completions", body, headers=headers) == reply  # a replay
            shown = await turn(server, 0, name)
            assert shown["reply"]["choices"][0]["message"] == replies[name]
            parsed = await server.ok(f"/{name}/v1/parse", {"tokens": shown["output_ids"], "tools": tools})
            assert bool(parsed["message"].get("tool_calls")) == bool(replies[name].get("tool_calls"))
        assert replies["qwen25"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
        assert replies["mistral"]["content"] == written and not replies["mistral"].get("tool_calls")
        await server.ok("/mistral/v1/chat/completions", {**body, "tool_choice": "required"})
        grammar = server.engine.requests[-1].grammar
        assert grammar is not None and grammar.alternatives[0][0].text.startswith("[TOOL_CALLS]")


async def test_a_session_may_take_one_tool_call_a_turn(tmp_path: Path) -> None:
    two = call_text("f", '{"a": 1}') + "\n" + call_text("f", '{"a": 2}')
    async with serving(tmp_path, says(two, two)) as server:
        await start(server, parallel_tool_calls=False)
        tools = [function_tool("f", {"a": {"type": "integer"}})]
        for session, calls in (("s", 1), ("free", 2)):
            answer = await server.answer([user("go")], session, tools=tools, parallel_tool_calls=True)
            assert len(answer["tool_calls"]) == calls


@pytest.mark.parametrize("policy", ["default", "override"])
async def test_a_session_has_options_of_the_chat_template(tmp_path: Path, policy: str) -> None:
    async with serving(tmp_path, says(*["ok"] * 8)) as server:
        await start(server, chat_template_kwargs={"enable_thinking": False, "x": 1}, sampling_policy=policy)
        plain = {"model": "m", "messages": [user("a")]}
        without = {**plain, "chat_template_kwargs": {"enable_thinking": False}}
        with_thinking = {**plain, "chat_template_kwargs": {"enable_thinking": True}}
        prompts = {}
        for session, body in (("free", plain), ("free", without), ("s", plain), ("s", with_thinking)):
            await server.ok(f"/{session}/v1/chat/completions", body)
            prompts[session, body is with_thinking, body is without] = server.prompts()[-1]
            counted = await server.ok(f"/{session}/v1/tokenize", body)
            assert counted["tokens"] == server.prompts()[-1]
        thinking, quiet = prompts["free", False, False], prompts["free", False, True]
        assert thinking != quiet and prompts["s", False, False] == quiet
        assert prompts["s", True, False] == (thinking if policy == "default" else quiet)
        shown = [await turn(server, number) for number in (0, 1)]
        wins = policy == "override"
        assert [each["template_options"] for each in shown] == [
            {"enable_thinking": False, "x": 1},
            {"enable_thinking": not wins, "x": 1},
        ]
        assert [each["notes"].get("dropped", []) for each in shown] == [[], ["chat_template_kwargs"] if wins else []]
        # Turns over ids have no template.
        await server.ok("/s/v1/generate", {"input_ids": [1, 2]})
        assert (await turn(server, 2))["template_options"] == {}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"sampling_policy": "always"}, "sampling_policy"),
        ({"sampling_policy": True}, "sampling_policy"),
        ({"tool_parser": "qwen26"}, "tool_parser"),
        ({"tool_parser": 5}, "tool_parser"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs"),
        ({"parallel_tool_calls": 0}, "parallel_tool_calls"),
        ({"sampling": {"stop": [5]}}, "sampling.stop[0]"),
        ({"sampling": {"stop": [""]}}, "sampling.stop"),
        ({"sampling": {"stop_token_ids": [1]}}, "sampling.stop_token_ids"),
        ({"sampling": {"logit_bias": {"1": 1}}}, "sampling.logit_bias"),
    ],
)
async def test_wrong_options_of_a_session_are_named(tmp_path: Path, options: dict[str, Any], param: str) -> None:
    async with serving(tmp_path, says()) as server:
        refused = await server.post("/rl/start_session", {"session_id": "s", **options})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
