"""`/v1/completions`: a prompt as text or ids goes to the engine as it is, and a completion is a turn like any other."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.grammar import GrammarPart
from proxy.engine.scripted.scripts import Fault, Reply, Script, babble, play
from proxy.turns import turns
from tests.api.test_streaming import events
from tests.logs import fields_of
from tests.support import Server, let_pass, sampled, says, serving, tiny_renderer, until, user

PATH = "/s/v1/completions"
PROMPT = "Once upon a time"
IDS = tiny_renderer().encode(PROMPT).tolist()
END = tiny_renderer().stop_token_ids[0]
TEXT = "  there <think>was</think> <tool_call>\n one. \n"
OUTPUT = sampled(TEXT).tolist()


def always(text: str = TEXT, chunk: int = 1, *, end: bool = True) -> Script:
    reply = Reply(sampled(text, end=end), chunk=chunk)
    return lambda _: reply


async def complete(server: Server, **body: Any) -> Any:
    return await server.ok(PATH, {"model": "m", "prompt": PROMPT, "max_tokens": 500, **body})


async def streamed(server: Server, **body: Any) -> list[Any]:
    whole = {"model": "m", "prompt": PROMPT, "max_tokens": 500, "stream": True, **body}
    response = await server.post(PATH, whole)
    assert response.status_code == 200, response.text
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    return chunks


async def refused(server: Server, **body: Any) -> Any:
    response = await server.post(PATH, {"model": "m", "prompt": PROMPT, **body})
    assert response.status_code == 400, response.text
    assert server.engine.requests == []
    return response.json()["error"]


@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT], IDS, [IDS]], ids=["text", "texts", "ids", "lists of ids"])
async def test_a_completion_is_recorded_as_a_root_with_exactly_these_ids(tmp_path: Path, prompt: Any) -> None:
    async with serving(tmp_path, always()) as server:
        reply = await complete(server, prompt=prompt)
        assert reply["id"].startswith("cmpl-") and reply["object"] == "text_completion" and reply["model"] == "m"
        assert reply["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
        usage = reply["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(IDS), len(OUTPUT))
        assert usage["total_tokens"] == len(IDS) + len(OUTPUT)
        (node,) = await server.tree()
        assert (node["id"], node["api"], node["parent_id"], node["reason"]) == (
            reply["id"],
            "completions",
            None,
            "first",
        )
        assert server.prompts() == [IDS]
        (sample,) = await server.export()
        assert sample["input_ids"] == IDS + OUTPUT
        assert sample["loss_mask"] == [0] * len(IDS) + [1] * len(OUTPUT)


async def test_a_text_without_max_tokens_has_at_most_16(tmp_path: Path) -> None:
    async with serving(tmp_path, always("one two three four five six seven eight nine ten eleven twelve")) as server:
        reply = await server.ok(PATH, {"prompt": PROMPT})
        assert reply["choices"][0]["finish_reason"] == "length" and reply["usage"]["completion_tokens"] == 16


async def test_the_sessions_own_max_tokens_come_before_the_default(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        started = await server.ok("/rl/start_session", {"task_id": "t", "sampling": {"max_tokens": 3}})
        reply = await server.ok(f"/{started['session_id']}/v1/completions", {"prompt": PROMPT})
        assert reply["usage"]["completion_tokens"] == 3


async def test_a_prompt_that_begins_with_an_earlier_turn_continues_it(tmp_path: Path) -> None:
    """Gateways that keep the ids of a conversation send all of them: its turns become one sample."""
    async with serving(tmp_path, says("one", "two", "three")) as server:
        first = await server.chat([user("hi")], return_token_ids=True)
        ids = first["prompt_token_ids"] + first["choices"][0]["token_ids"] + [70, 71]
        second = await complete(server, prompt=ids, return_token_ids=True)
        await complete(server, prompt=ids + second["choices"][0]["token_ids"] + [72])
        nodes = await server.tree()
        assert [node["reason"] for node in nodes] == ["first", "continued", "continued"]
        assert all(node["aligned"] for node in nodes[1:])
        assert len(await server.export()) == 1


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("number", [1, 3])
async def test_a_stream_has_the_text_the_ids_and_the_logprobs_of_the_whole_reply(
    tmp_path: Path, chunk: int, number: int
) -> None:
    async with serving(tmp_path, always(chunk=chunk)) as server:
        fields: dict[str, Any] = {"n": number, "logprobs": 2, "return_token_ids": True}
        whole = await complete(server, **fields)
        chunks = await streamed(server, **fields, stream_options={"include_usage": True})
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
        for index, choice in enumerate(whole["choices"]):
            parts = [part for item in chunks for part in item["choices"] if part["index"] == index]
            assert "".join(part["text"] for part in parts) == choice["text"] == TEXT
            assert [token for part in parts for token in part.get("token_ids", ())] == choice["token_ids"] == OUTPUT
            assert [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part] == [IDS]
            assert choice["prompt_token_ids"] == IDS and "prompt_token_ids" in parts[0]
            for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
                told = [value for part in parts if part["logprobs"] for value in part["logprobs"][name]]
                assert told == choice["logprobs"][name]
            assert parts[-1]["finish_reason"] == choice["finish_reason"] == "stop"
        assert len({item["id"] for item in chunks}) == 1 and chunks[0]["object"] == "text_completion"


async def test_logprobs_have_the_older_shape_with_an_entry_for_each_id(tmp_path: Path) -> None:
    text = "grün, ja"
    async with serving(tmp_path, always(text)) as server:
        reply = await complete(server, logprobs=2, return_token_ids=True)
        (choice,) = reply["choices"]
        told, ids = choice["logprobs"], choice["token_ids"]
        assert ids == sampled(text).tolist()
        assert all(len(told[name]) == len(ids) for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"))
        assert [round(math.exp(value), 5) for value in told["token_logprobs"]] == [0.5] * len(ids)
        assert told["tokens"][0] == tiny_renderer().decode(ids[:1]) and told["text_offset"][0] == 0
        assert all(told["tokens"][at] in entry for at, entry in enumerate(told["top_logprobs"]))
        assert told["top_logprobs"][0][told["tokens"][0]] == told["token_logprobs"][0]
        none = (await complete(server))["choices"][0]
        assert none["logprobs"] is None and "token_ids" not in none
        for value in (0, True):
            told = (await complete(server, logprobs=value))["choices"][0]["logprobs"]
            assert [list(entry) for entry in told["top_logprobs"]] == [[token] for token in told["tokens"]]
        named = (await complete(server, logprobs=1, return_tokens_as_token_ids=True))["choices"][0]["logprobs"]
        assert named["tokens"] == [f"token_id:{token}" for token in ids]


@pytest.mark.parametrize("chunk", [1, 64])
async def test_a_stop_string_ends_the_text_before_it(tmp_path: Path, chunk: int) -> None:
    async with serving(tmp_path, always(" one two END three", chunk)) as server:
        reply = await complete(server, stop=["END"], return_token_ids=True)
        assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == (" one two ", "stop")
        chunks = await streamed(server, stop=["END"], return_token_ids=True)
        parts = [part for item in chunks for part in item["choices"]]
        assert "".join(part["text"] for part in parts) == " one two "
        ids = [token for part in parts for token in part.get("token_ids", ())]
        assert ids == reply["choices"][0]["token_ids"]
        assert tiny_renderer().decode(ids).endswith("END")


@pytest.mark.parametrize("prompt", [PROMPT, IDS], ids=["text", "ids"])
async def test_echo_repeats_the_prompt_before_the_text(tmp_path: Path, prompt: Any) -> None:
    async with serving(tmp_path, always()) as server:
        reply = await complete(server, prompt=prompt, echo=True, n=2)
        assert [choice["text"] for choice in reply["choices"]] == [PROMPT + TEXT] * 2
        chunks = await streamed(server, prompt=prompt, echo=True)
        assert "".join(part["text"] for item in chunks for part in item["choices"]) == PROMPT + TEXT


async def test_a_long_text_is_encoded_as_a_short_one(tmp_path: Path) -> None:
    """In a thread, so that other turns go on meanwhile."""
    text = PROMPT + " and a day" * 5000
    async with serving(tmp_path, always()) as server:
        ids = (await server.ok("/s/v1/tokenize", {"prompt": text}))["tokens"]
        assert ids == tiny_renderer().encode(text).tolist()
        assert (await server.ok("/s/v1/detokenize", {"tokens": ids}))["prompt"] == text
        await complete(server, prompt=text)
        assert server.prompts() == [ids]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_gets_the_same_completion_again(tmp_path: Path, stream: bool) -> None:
    async with serving(tmp_path, play([Reply(sampled(TEXT))])) as server:
        body = {"prompt": PROMPT, "max_tokens": 500, "logprobs": 0, "return_token_ids": True}
        first = await server.ok(PATH, body, headers={"idempotency-key": "k"})
        again = await server.post(PATH, {**body, "stream": stream}, headers={"idempotency-key": "k"})
        if stream:
            *chunks, _ = events(again.text)
            parts = [part for item in chunks for part in item["choices"]]
            assert "".join(part["text"] for part in parts) == TEXT
            assert [token for part in parts for token in part.get("token_ids", ())] == OUTPUT
        else:
            assert again.json() == first


async def test_a_json_answer_is_sampled_under_its_grammar(tmp_path: Path) -> None:
    async with serving(tmp_path, always('{"a": 1}')) as server:
        await complete(server, response_format={"type": "json_object"})
        assert server.engine.requests[0].grammar is not None


async def test_a_demanded_format_is_the_grammar_of_the_engines_request(tmp_path: Path) -> None:
    ebnf = 'root ::= "a"'
    async with serving(tmp_path, always("a")) as server:
        for demanded, alternatives in [
            ({"regex": "a+"}, ((GrammarPart(regex="a+"),),)),
            ({"ebnf": ebnf}, ((GrammarPart(ebnf=ebnf),),)),
            ({"structured_outputs": {"choice": ["a", "b"]}}, ((GrammarPart(text="a"),), (GrammarPart(text="b"),))),
        ]:
            await complete(server, **demanded)
            grammar = server.engine.requests[-1].grammar
            assert grammar is not None and (grammar.alternatives, grammar.repeat) == (alternatives, False)


async def test_rewards_and_keys_are_those_of_any_turn(tmp_path: Path) -> None:
    async with serving(tmp_path, always(), admin_key="root") as server:
        started = await server.ok("/rl/start_session", {"task_id": "t"}, headers={"authorization": "Bearer root"})
        agent = {"authorization": f"Bearer {started['api_key']}"}
        assert (await server.post("/v1/completions", {"prompt": PROMPT})).status_code == 401
        reply = await server.ok("/v1/completions", {"prompt": PROMPT, "max_tokens": 500}, headers=agent)
        control = {"authorization": f"Bearer {started['control_key']}"}
        reward = {"reward": 0.5, "interaction_id": reply["id"]}
        await server.ok(f"/{started['session_id']}/rl/set_reward", reward, headers=control)
        body = {"session_id": started["session_id"], "layout": "individual"}
        (sample,) = (await server.ok("/trajectories/export", body, headers={"authorization": "Bearer root"}))["samples"]
        assert sample["turns"][0]["reward"] == 0.5


@pytest.mark.parametrize("path", ["/s/v1/completions", "/s/completions", "/v1/completions", "/completions"])
async def test_it_is_at_every_address_of_a_turn(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, always()) as server:
        assert (await server.ok(path, {"prompt": PROMPT}))["object"] == "text_completion"
        chat = await server.ok(path.replace("completions", "chat/completions"), {"messages": [user("a")]})
        assert chat["object"] == "chat.completion"


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [tiny_renderer().vocab_size]}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt[1]"),
    ({"prompt": ["a", None]}, "prompt[1]"),
    ({"prompt": [[1], []]}, "prompt[1]"),
    ({"prompt": [[1], [2, -1]]}, "prompt[1]"),
    ({"prompt": [[1], "a", 7]}, "prompt[2]"),
    ({"prompt": ["a"] * 257}, "prompt"),
    ({"prompt": ["a", "b"], "stream": True}, "stream"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 0, "echo": True}, "max_tokens"),
    ({"echo": "yes"}, "echo"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": "yes"}, "logprobs"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"n": 0}, "n"),
    ({"stop": 5}, "stop"),
    ({"stream": "yes"}, "stream"),
]


async def test_errors_name_the_field(tmp_path: Path) -> None:
    async with serving(tmp_path, says()) as server:
        named = [(fields, (await refused(server, **fields))["param"]) for fields, _ in ERRORS]
    assert named == ERRORS


async def test_an_engine_that_scores_no_prompts_refuses_a_request_for_their_logprobs(tmp_path: Path) -> None:
    """The body by which lm-eval asks for a log-likelihood: an answer without it would be a wrong score."""
    async with serving(tmp_path, says()) as server:
        body = {"prompt": [IDS], "max_tokens": 1, "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}
        response = await server.post(PATH, body)
        assert (response.status_code, response.json()["error"]["code"]) == (501, "engine_incapable")
        assert server.engine.requests == [] and await server.tree() == []


@pytest.mark.parametrize("given", ["texts", "ids", "both"])
async def test_each_prompt_of_a_request_is_a_turn(tmp_path: Path, given: str) -> None:
    texts = [PROMPT, "A second prompt", "A third one"]
    ids = [tiny_renderer().encode(text).tolist() for text in texts]
    prompts = {"texts": texts, "ids": ids, "both": [texts[0], *ids[1:]]}[given]
    async with serving(tmp_path, says("one", "two", "three")) as server:
        reply = await complete(server, prompt=prompts, echo=True, return_token_ids=True)
        choices = reply["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        assert [choice["text"] for choice in choices] == [
            text + said for text, said in zip(texts, ("one", "two", "three"), strict=True)
        ]
        assert [choice["prompt_token_ids"] for choice in choices] == ids == server.prompts()
        nodes = await server.tree()
        assert [(node["api"], node["reason"], node["parent_id"]) for node in nodes] == [
            ("completions", "first", None),
            ("completions", "new_root", None),
            ("completions", "new_root", None),
        ]
        assert reply["id"] == nodes[0]["id"]
        usage = reply["usage"]
        assert usage["prompt_tokens"] == sum(map(len, ids))
        assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_equal_prompts_of_a_request_are_samples_of_their_own(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*"abcdef")) as server:
        reply = await complete(server, prompt=[PROMPT] * 3, n=2)
        assert sorted(choice["text"] for choice in reply["choices"]) == list("abcdef")
        assert [choice["index"] for choice in reply["choices"]] == list(range(6))
        assert len(await server.export()) == 6


async def test_a_repeated_request_with_several_prompts_is_answered_again(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        body = {"prompt": [PROMPT, PROMPT], "max_tokens": 500}
        first = await server.ok(PATH, body, headers={"idempotency-key": "k"})
        assert await server.ok(PATH, body, headers={"idempotency-key": "k"}) == first
        assert [choice["text"] for choice in first["choices"]] == ["one", "two"]
        assert len(await server.tree()) == 2


async def test_nothing_begins_if_one_of_several_prompts_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one")) as server:
        await refused(server, prompt=[PROMPT, [1, "a"]])
        assert await server.tree() == []


async def test_a_client_that_leaves_ends_the_turns_of_all_its_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "proxy")
    monkeypatch.setattr(turns, "GRACE_S", 0.0)
    async with serving(tmp_path, babble(8, 200, 1, delay_s=60.0)) as server:
        body = json.dumps({"prompt": [PROMPT, PROMPT, "Another"]}).encode()
        parts = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]

        async def receive() -> Any:
            return parts.pop(0)

        scope = {"type": "http", "method": "POST", "path": PATH, "query_string": b""}
        await server.app({**scope, "headers": [(b"content-type", b"application/json")]}, receive, lambda _: None)  # type: ignore[arg-type, return-value]
        await let_pass(0.1, monkeypatch)
        await until(lambda: len(fields_of(caplog, "turn")) == 3)
        assert [line["status"] for line in fields_of(caplog, "turn")] == ["aborted"] * 3
        assert [node["status"] for node in await server.tree()] == ["aborted"] * 3


async def test_if_the_turn_of_one_prompt_fails_the_request_fails_and_the_others_are_recorded(tmp_path: Path) -> None:
    faults = [Fault.ERROR]

    def script(request: Any) -> Reply:
        if request.input_ids[: len(IDS)].tolist() == IDS:
            return Reply(sampled("fine"))
        return Reply(sampled("other"), fault=faults.pop() if faults else None, fault_after=1)

    async with serving(tmp_path, script) as server:
        body, key = {"prompt": [PROMPT, "Another"], "max_tokens": 500}, {"idempotency-key": "k"}
        response = await server.post(PATH, body, headers=key)
        assert response.status_code == 502, response.text
        assert sorted(node["status"] for node in await server.tree()) == ["complete", "failed"]
        again = await server.ok(PATH, body, headers=key)
        assert [choice["text"] for choice in again["choices"]] == ["fine", "other"]
        assert len(server.engine.requests) == 3, "only the failed turn is sampled again"


async def test_ignored_fields_are_named(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        body = {"prompt": PROMPT, "user": "u", "use_beam_search": False, "best_of": 1, "suffix": None}
        response = await server.post(PATH, body)
        assert response.headers["x-tokengrove-ignored"] == "use_beam_search,user"


async def test_the_openai_client_reads_both_kinds_of_reply(tmp_path: Path) -> None:
    import openai

    async with serving(tmp_path, always()) as server:
        client = openai.AsyncOpenAI(base_url="http://t/s/v1", api_key="any", http_client=server.http)
        fields: dict[str, Any] = {"model": "m", "prompt": PROMPT, "max_tokens": 500, "logprobs": 1}
        more = {"return_token_ids": True}
        whole = await client.completions.create(**fields, extra_body=more)
        choice: Any = whole.choices[0]
        assert (choice.text, choice.token_ids, choice.prompt_token_ids) == (TEXT, OUTPUT, IDS)
        assert choice.logprobs.text_offset[0] == 0 and len(choice.logprobs.token_logprobs) == len(OUTPUT)
        text, ids = "", []
        stream: Any = await client.completions.create(**fields, stream=True, extra_body=more)
        async for part in stream:
            text += part.choices[0].text
            ids += getattr(part.choices[0], "token_ids", None) or []
        assert (text, ids) == (TEXT, OUTPUT)
        assert json.loads(whole.model_dump_json())["usage"]["prompt_tokens"] == len(IDS)
