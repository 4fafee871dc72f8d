"""`ServerGenerate`: a session for each rollout, raw text out, and the tokens of each turn as they are stored."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.app import build_app
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import Reply, Script
from proxy.settings import Settings
from tests.support import call_text, default_url, function_tool, sampled, says, tiny_renderer, tool_result, user
from tokengrove.client import Client
from tokengrove.client.asgi import ASGIApp
from tokengrove.errors import InvalidRequest, NotFound, SessionClosed
from tokengrove.openenv import ServerGenerate
from tokengrove.rollout.contract import GenerateAPI, RolloutMessages

ADD = [function_tool("add", {"a": {"type": "integer"}})]
CALL = "<think>\nhm\n</think>\n\n" + call_text("add", '{"a": 1}')


def app_of(folder: Path, script: Script) -> tuple[ASGIApp, ScriptedEngine]:
    renderer = tiny_renderer()
    engine = ScriptedEngine(script, vocab_size=renderer.vocab_size)
    settings = Settings(database_url=default_url(folder), migrate=True)
    return build_app(settings, engine=engine, renderer=renderer), engine


def rollout(name: str = "r-1", reward: float | None = 1.0) -> RolloutMessages:
    return RolloutMessages(name, [user("hi")], reward)


def test_it_is_a_generate_api_that_takes_positions_and_names(tmp_path: Path) -> None:
    app, _ = app_of(tmp_path, says("one", "two"))
    with Client(app=app) as client:
        api: GenerateAPI = ServerGenerate(client)
        assert api.generate("r-1", 0, [user("hi")], [], {"temperature": 1.0}) == "one"
        assert api.generate(rollout_id="r-2", turn=0, messages=[user("hi")], tools=None, sampling={}) == "two"


def test_the_tokens_of_a_turn_are_those_that_were_sampled(tmp_path: Path) -> None:
    app, engine = app_of(tmp_path, says(CALL, "The sum is 2."))
    with Client(app=app) as client:
        api = ServerGenerate(client)
        first = api.generate("r-1", 0, [user("hi")], ADD, {"max_tokens": 64})
        assert first == CALL and first.finish_reason == "tool_calls"
        echo = [user("hi"), first.message, tool_result(first.message["tool_calls"][0]["id"], "2")]
        api.generate("r-1", 1, echo, ADD, {"max_tokens": 64})
        api.accept(rollout())
        told = [api.tokens("r-1", turn) for turn in api.turns("r-1")]
        assert [turn.prompt_ids for turn in told] == [list(request.input_ids) for request in engine.requests]
        assert [turn.token_ids for turn in told] == [sampled(CALL).tolist(), sampled("The sum is 2.").tolist()]
        assert all(len(turn.token_ids) == len(turn.logprobs or ()) == len(turn.versions) for turn in told)
        known = told[0].prompt_ids + told[0].token_ids
        assert told[1].prompt_ids[: len(known)] == known, "the second prompt continues the first turn's ids"
        [sample] = client.export(session_id="r-1", layout="concat").samples
        assert sample.input_ids.tolist() == told[1].prompt_ids + told[1].token_ids
        assert sample.logprobs[-len(told[1].token_ids) :].tolist() == told[1].logprobs
        assert sample.reward == 1.0


def test_a_harness_that_gets_only_the_text_still_continues_the_same_tokens(tmp_path: Path) -> None:
    """What an interception server reads out of the text has other call ids than the turn that was sampled."""
    app, _ = app_of(tmp_path, says(CALL, "done"))
    call = {"id": "call_of_another", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    echo = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    with Client(app=app) as client:
        api = ServerGenerate(client)
        api.generate("r-1", 0, [user("hi")], ADD, {})
        api.generate("r-1", 1, [user("hi"), echo, tool_result("call_of_another", "2")], ADD, {})
        assert [turn.reason for turn in client.session_tree("r-1").interactions] == ["first", "continued"]


def test_the_same_turn_again_is_not_sampled_again(tmp_path: Path) -> None:
    app, engine = app_of(tmp_path, says("one"))
    with Client(app=app) as client:
        api = ServerGenerate(client)
        first = api.generate("r-1", 0, [user("hi")], None, {})
        assert api.generate("r-1", 0, [user("hi")], [], {}) == first
        with pytest.raises(InvalidRequest, match="turn 0 of rollout 'r-1' was already generated for another request"):
            api.generate("r-1", 0, [user("other")], [], {})
        assert len(engine.requests) == 1


def test_an_answer_that_was_lost_on_the_way_is_given_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app, engine = app_of(tmp_path, says("one"))
    with Client(app=app) as client:
        send, lost = client._http.send, [0]

        def broken(request: httpx.Request, **more: Any) -> httpx.Response:
            response = send(request, **more)
            if request.url.path.endswith("chat/completions") and not lost[0]:
                lost[0] += 1
                raise httpx.ReadError("the connection was cut", request=request)
            return response

        monkeypatch.setattr(client._http, "send", broken)
        monkeypatch.setattr("tokengrove.rollout.retries._FIRST_PAUSE_S", 0.0)
        assert ServerGenerate(client).generate("r-1", 0, [user("hi")], [], {}) == "one"
        assert (lost, len(engine.requests)) == ([1], 1)


def test_a_rollout_ends_once_with_its_reward_or_its_reason(tmp_path: Path) -> None:
    app, _ = app_of(tmp_path, lambda _: Reply(sampled("one")))
    with Client(app=app) as client:
        api = ServerGenerate(client, metadata={"run": "a"})
        api.start("good", "task-7", group_id="g", group_size=2)
        api.generate("good", 0, [user("hi")], [], {})
        api.accept(rollout("good", 0.5))
        with pytest.raises(SessionClosed):
            api.accept(rollout("good", 0.5))
        api.start("bad", "task-7", group_id="g", group_size=2)
        api.fail("bad", ValueError("the harness died"))
        api.fail("bad", ValueError("again"))
        api.fail("never", ValueError("was not started"))
        api.accept(rollout("quiet", None))
        trees = {name: client.session_tree(name) for name in ("good", "bad", "quiet")}
        assert {name: tree.outcome for name, tree in trees.items()} == {
            "good": "Finished",
            "bad": "Failed",
            "quiet": "NoData",
        }
        assert trees["bad"].extra["exit_reason"] == "ValueError: the harness died"
        assert (trees["good"].task_id, trees["good"].group_id) == ("task-7", "g")
        assert trees["good"].interactions[0].reward == 0.5
        assert trees["good"].extra["metadata"]["run"] == "a"


def test_any_text_may_name_a_rollout(tmp_path: Path) -> None:
    app, _ = app_of(tmp_path, says("one"))
    with Client(app=app) as client:
        api = ServerGenerate(client)
        api.generate("task 1/übung #2", 0, [user("hi")], [], {})
        assert client.session_tree(api.session_id("task 1/übung #2")).interactions


def test_what_is_unknown_is_named(tmp_path: Path) -> None:
    app, _ = app_of(tmp_path, says("one"))
    with Client(app=app) as client:
        api = ServerGenerate(client)
        with pytest.raises(NotFound, match="no rollout 'r-1' was generated here"):
            api.tokens("r-1", 0)
        api.generate("r-1", 0, [user("hi")], [], {})
        with pytest.raises(NotFound, match="rollout 'r-1' has no turn 4"):
            api.tokens("r-1", 4)
        with pytest.raises(InvalidRequest, match="has been started already"):
            api.start("r-1")
        with pytest.raises(InvalidRequest, match="'sampling' must not have 'stream'"):
            api.generate("r-1", 1, [user("hi")], [], {"stream": True})
        api.forget("r-1")
        with pytest.raises(NotFound):
            api.tokens("r-1", 0)


def test_turns_of_one_rollout_may_be_asked_for_at_once(tmp_path: Path) -> None:
    """Its session is started once, whoever comes first, and each turn is sampled once."""
    app, engine = app_of(tmp_path, lambda _: Reply(sampled("one")))
    with Client(app=app) as client, ThreadPoolExecutor(8) as pool:
        api = ServerGenerate(client)
        asked = [pool.submit(api.generate, "r-1", turn, [user(str(turn))], [], {}) for turn in range(8)]
        assert [found.result() for found in asked] == ["one"] * 8
        assert api.session_id("r-1") == "r-1" and len(engine.requests) == len(set(api.turns("r-1"))) == 8


def test_a_start_that_fails_may_be_tried_again(tmp_path: Path) -> None:
    app, _ = app_of(tmp_path, says("one"))
    with Client(app=app) as client:
        api = ServerGenerate(client)
        with pytest.raises(InvalidRequest, match="discount"):
            api.start("r-1", discount=7.0)
        assert api.generate("r-1", 0, [user("hi")], [], {}) == "one"
