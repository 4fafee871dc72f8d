"""The worker plays environments with the ReAct harness through the interception server; the trainer has the tokens."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from tests.support import call_text, user
from tests.unit.tokengrove.openenv.openenv_play import AddingFactory, Score, Servers, both
from tokengrove.errors import InvalidRequest
from tokengrove.openenv import (
    EnvironmentSessionFactory,
    HarnessRolloutWorker,
    HarnessSessionFactory,
    RolloutTimeout,
    ServerGenerate,
)
from tokengrove.rollout.contract import RolloutMessages
from tokengrove.rollout.failure_log import TooManyFailedEpisodes

__all__ = ["both"]
TASK = {"prompt": "What is 3 plus 4?"}
SAMPLING = {"temperature": 1.0, "max_tokens": 256}


def test_an_environment_is_played_scored_and_exported(both: Servers) -> None:
    environments, generate = AddingFactory(), ServerGenerate(both.sampling)
    worker = HarnessRolloutWorker(
        EnvironmentSessionFactory(both.interception, environments), generate, sampling=SAMPLING
    )
    [[rollout]] = worker.run([TASK])
    assert [message["role"] for message in rollout.messages] == ["user", "assistant", "tool", "assistant"]
    assert rollout.messages[1]["tool_calls"][0]["function"]["name"] == "add"
    assert rollout.reward == 7.0 and environments.made[0].closed == 1
    tree = both.sampling.session_tree(generate.session_id(rollout.rollout_id))
    assert [turn.reason for turn in tree.interactions] == ["first", "continued"]
    assert (tree.outcome, tree.status) == ("Finished", "ended")
    [sample] = both.sampling.export(session_id=tree.session_id, layout="concat").samples
    ids = [generate.tokens(rollout.rollout_id, turn) for turn in generate.turns(rollout.rollout_id)]
    assert sample.input_ids.tolist() == ids[-1].prompt_ids + ids[-1].token_ids
    assert sample.loss_mask.sum() == sum(len(turn.token_ids) for turn in ids)
    assert sample.rewards.tolist()[-1] == 7.0


def test_groups_play_side_by_side_and_a_failure_touches_no_other(both: Servers) -> None:
    environments, generate = AddingFactory(), ServerGenerate(both.sampling)
    told: list[Any] = []
    worker = HarnessRolloutWorker(
        EnvironmentSessionFactory(both.interception, environments),
        generate,
        sampling=SAMPLING,
        group_size=3,
        concurrency=4,
        on_failure=told.append,
    )
    groups = worker.run([TASK, {**TASK, "broken": True}, {"prompt": "What is 5 plus 6?"}])
    assert [[rollout.reward for rollout in group] for group in groups] == [[7.0] * 3, [], [11.0] * 3]
    assert told == worker.failures and [failure.group for failure in told] == [1, 1, 1]
    assert all("the environment is gone" in str(failure.error) for failure in told)
    assert [made.closed for made in environments.made] == [1] * 9
    for failure in told:
        session = both.sampling.session_tree(generate.session_id(failure.rollout_id))
        assert session.outcome == "Failed" and "the environment is gone" in session.extra["exit_reason"]
    group = both.sampling.session_tree(generate.session_id(groups[0][0].rollout_id)).group_id
    exported = both.sampling.export(filter={"group_id": group})
    assert exported.sessions.keys() == {generate.session_id(rollout.rollout_id) for rollout in groups[0]}


def answers(*_: Any) -> str:
    return "yes"


@pytest.mark.parametrize(("options", "most"), [({}, 6), ({"max_failed_episodes": 4}, 4)])
def test_so_many_failed_rollouts_in_a_row_end_the_run_with_the_reasons(
    caplog: pytest.LogCaptureFixture, options: dict[str, Any], most: int
) -> None:
    factory = ScriptedFactory()
    worker = HarnessRolloutWorker(factory, answers, group_size=2, concurrency=1, **options)
    with pytest.raises(
        TooManyFailedEpisodes, match=rf"^{most} episodes in a row.* {most} x KeyError, such as .*'oops'"
    ):
        worker.run([[asked("one"), KeyError("oops")]] * 10)
    assert len(worker.failures) == most and all(made.closed for made in factory.made)
    told = caplog.records[0].getMessage()
    assert told.startswith("a rollout failed: KeyError: 'oops' (task rollout-0, session rollout-0-")
    assert "Traceback" in told and len(caplog.records) == 3


def test_a_run_says_how_many_rollouts_failed_and_one_that_goes_well_begins_the_count_anew() -> None:
    worker = HarnessRolloutWorker(ScriptedFactory(), answers, concurrency=1, max_failed_episodes=2)
    for _ in range(2):
        groups = worker.run([[KeyError("oops")], [asked("one")], [], [asked("one")]])
        assert ([len(group) for group in groups], groups.failed_episodes) == ([0, 1, 0, 1], 2)
    assert "NoTurns" in str(worker.failures[-1].error)


@dataclass
class Scripted:
    """A session of the contract as its text has it: requests that are known from the start, and a reward."""

    requests: list[Any]
    reward: float | None = 1.0
    delivered: list[str] = field(default_factory=list)
    closed: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    def next_request(self) -> dict[str, Any] | None:
        request = self.requests.pop(0) if self.requests else None
        if request == "wait":
            self.stop.wait()
            return None
        if isinstance(request, Exception):
            raise request
        return request

    def deliver(self, intercept: dict[str, Any], completion_text: str) -> None:
        self.delivered.append(completion_text)

    def verify(self) -> Any:
        return Score(self.reward)

    def close(self) -> None:
        self.closed += 1
        self.stop.set()


class ScriptedFactory:
    def __init__(self, **more: Any) -> None:
        self._more, self.made = more, list[Scripted]()

    def create(self, *, task: Any, rollout_id: str) -> Scripted:
        if isinstance(task, Exception):
            raise task
        self.made.append(Scripted(list(task), **self._more))
        return self.made[-1]


def asked(text: str, number: int = 0, **more: Any) -> dict[str, Any]:
    return {"messages": [user(text)], "tools": [], "request_id": str(number), **more}


def test_a_session_and_a_generate_of_the_printed_contract_are_enough() -> None:
    """A session whose requests are plain dicts, and a trainer that is one function."""
    calls: list[Any] = []

    def generate(rollout_id: str, turn: int, messages: Any, tools: Any, sampling: Any) -> str:
        calls.append((rollout_id, turn, messages[-1]["content"], tools, sampling))
        return f"answer {turn}"

    factory = ScriptedFactory()
    worker = HarnessRolloutWorker(factory, generate, sampling={"temperature": 0.7})
    [rollout] = worker.rollouts([[asked("one"), asked("two", 1)]])
    assert isinstance(rollout, RolloutMessages)
    assert [call[1:] for call in calls] == [
        (0, "one", [], {"temperature": 0.7}),
        (1, "two", [], {"temperature": 0.7}),
    ]
    assert {call[0] for call in calls} == {rollout.rollout_id}
    assert rollout.messages == [user("two"), {"role": "assistant", "content": "answer 1"}]
    assert (factory.made[0].delivered, factory.made[0].closed) == (["answer 0", "answer 1"], 1)


@pytest.mark.parametrize(
    ("task", "error"),
    [
        (ConnectionError("no sandbox"), "no sandbox"),
        ([RuntimeError("the harness died")], "the harness died"),
        ([asked("fail")], "the engine failed"),
    ],
)
def test_wherever_a_rollout_fails_its_session_is_closed_and_others_go_on(task: Any, error: str) -> None:
    def generate(rollout_id: str, turn: int, messages: Any, tools: Any, sampling: Any) -> str:
        if messages[-1]["content"] == "fail":
            raise RuntimeError("the engine failed")
        return "yes"

    factory = ScriptedFactory()
    worker = HarnessRolloutWorker(factory, generate, concurrency=2)
    groups = worker.run([task, [asked("one")]])
    assert [len(group) for group in groups] == [0, 1]
    assert [str(failure.error) for failure in worker.failures] == [error]
    assert all(made.closed == 1 for made in factory.made)


def test_a_rollout_that_takes_too_long_is_closed_and_fails() -> None:
    factory = ScriptedFactory()
    worker = HarnessRolloutWorker(factory, lambda *_: "yes", timeout_s=0.05)
    assert worker.run([["wait"], [asked("one")]])[1][0].reward == 1.0
    [failure] = worker.failures
    assert isinstance(failure.error, RolloutTimeout)
    assert sorted(made.closed for made in factory.made) == [1, 2]  # made in any order, by two threads


def test_after_max_turns_a_rollout_is_scored_as_it_is() -> None:
    factory = ScriptedFactory(reward=0.25)
    worker = HarnessRolloutWorker(factory, lambda *_: "yes", max_turns=2)
    [[rollout]] = worker.run([[asked("one"), asked("two"), asked("three")]])
    assert (rollout.reward, len(factory.made[0].delivered)) == (0.25, 2)


def test_leaving_the_loop_closes_what_still_plays() -> None:
    factory = ScriptedFactory()
    worker = HarnessRolloutWorker(factory, lambda *_: "yes", concurrency=2)
    for rollout in worker.rollouts(iter([[asked("one")], ["wait"]])):
        assert rollout.reward == 1.0
        break
    assert all(made.closed for made in factory.made)


def test_no_more_tasks_are_taken_than_play() -> None:
    taken: list[int] = []

    def tasks() -> Any:
        for number in range(100):
            taken.append(number)
            yield [asked("one")]

    worker = HarnessRolloutWorker(ScriptedFactory(), lambda *_: "yes", concurrency=3)
    next(worker.rollouts(tasks()))
    assert len(taken) <= 3


def test_the_conversation_with_tools_is_the_rollouts() -> None:
    """A harness that also asks for a title, without tools, is trained on the conversation in which it works."""
    tools = [{"type": "function", "function": {"name": "add"}}]
    task = [asked("title"), asked("work", tools=tools), asked("summary")]
    [rollout] = HarnessRolloutWorker(ScriptedFactory(), lambda *_: "yes").rollouts([task])
    assert rollout.messages[0]["content"] == "work"


def test_the_workers_sampling_holds_over_what_a_harness_asks_for() -> None:
    told: list[Any] = []

    def generate(rollout_id: str, turn: int, messages: Any, tools: Any, sampling: Any) -> str:
        told.append(sampling)
        return "yes"

    wants = {"temperature": 0.0, "stop": ["x"], "max_tokens": 5}
    task = [asked("one", sampling=wants), asked("two", sampling={**wants, "max_tokens": 50})]
    own = {"temperature": 1.0, "max_tokens": 20}
    list(HarnessRolloutWorker(ScriptedFactory(), generate, sampling=own).rollouts([task]))
    assert told == [{"temperature": 1.0, "stop": ["x"], "max_tokens": tokens} for tokens in (5, 20)]


@pytest.mark.parametrize("name", ["group_size", "concurrency", "timeout_s", "max_turns"])
def test_numbers_that_make_no_sense_are_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"'{name}' must be above 0"):
        HarnessRolloutWorker(ScriptedFactory(), lambda *_: "yes", **{name: 0})


def test_the_harness_tells_the_model_of_calls_that_fail(both: Servers) -> None:
    """A call without JSON, one of a tool that is not there and one that works, then an answer."""
    environments = AddingFactory()
    answers = [call_text("sub", '{"a": 1}'), call_text("add", '{"a": 1}'), call_text("add", '{"a": 1, "b": 2}'), "3"]
    worker = HarnessRolloutWorker(
        EnvironmentSessionFactory(both.interception, environments), lambda _, turn, *rest: answers[turn]
    )
    [[rollout]] = worker.run([TASK])
    results = [message["content"] for message in rollout.messages if message["role"] == "tool"]
    assert results == ["error: Unknown tool: sub", "error: b", '{"sum": 3}']
    transcript, state = environments.made[0].told
    assert len(transcript) == 8 and state["metrics"] == {"turns": 4, "tool_calls": 3}
    assert [entry["result"]["error"] for entry in state["tool_trace"]] == ["Unknown tool: sub", "b", None]


def test_the_harness_stops_when_the_episode_is_over_or_its_turns_are(both: Servers) -> None:
    environments = AddingFactory()
    factory = EnvironmentSessionFactory(both.interception, environments, max_turns=3)
    worker = HarnessRolloutWorker(factory, lambda *_: call_text("add", '{"a": 1, "b": 2}'), concurrency=1)
    rollouts = [group[0] for group in worker.run([{**TASK, "one_call": True, "seed": 5}, TASK])]
    assert [len([m for m in rollout.messages if m["role"] == "assistant"]) for rollout in rollouts] == [1, 3]
    assert [made.told[1]["done"] for made in environments.made] == [True, False]
    assert [made.seed for made in environments.made] == [5, None]


def test_an_agent_of_the_users_own_is_trained_on_its_exact_tokens(both: Servers) -> None:
    """It rewrites its history: both branches are exported, and the tokens of the first turn are trained once."""

    def agent(task: Any, base_url: str, api_key: str, http_client: Any) -> None:
        def ask(*texts: str) -> str:
            messages = [
                user(text) if n % 2 == 0 else {"role": "assistant", "content": text} for n, text in enumerate(texts)
            ]
            body = {"model": "m", "messages": messages}
            return str(
                http_client.post(f"{base_url}/chat/completions", json=body).json()["choices"][0]["message"]["content"]
            )

        first = ask("Say exactly: one")
        ask("Say exactly: one", first, "Say exactly: two")
        ask("Say exactly: one", "an answer of its own", "Say exactly: three")

    generate = ServerGenerate(both.sampling)
    factory = HarnessSessionFactory(both.interception, agent, lambda task, messages: messages[-1]["content"] == "three")
    [[rollout]] = HarnessRolloutWorker(factory, generate, sampling=SAMPLING).run([None])
    assert rollout.reward == 1.0
    session = generate.session_id(rollout.rollout_id)
    assert [turn.reason for turn in both.sampling.session_tree(session).interactions][:2] == ["first", "continued"]
    samples = both.sampling.export(session_id=session, layout="concat").samples
    sampled = sum(len(generate.tokens(rollout.rollout_id, turn).token_ids) for turn in range(3))
    assert len(samples) == 2 and sum(int(sample.loss_mask.sum()) for sample in samples) == sampled


def test_a_worker_plays_again_after_a_run() -> None:
    worker = HarnessRolloutWorker(ScriptedFactory(), lambda *_: "yes")
    assert [len(group) for group in worker.run([[asked("one")]])] == [1]
    assert worker.play([asked("one")], "by-hand").reward == 1.0
    assert len(list(worker.rollouts([[asked("one")]]))) == 1


def test_a_run_that_is_closed_begins_nothing_else() -> None:
    factory = ScriptedFactory()
    worker = HarnessRolloutWorker(factory, lambda *_: "yes", concurrency=1)

    def tasks() -> Any:
        yield [asked("one")]
        worker.close()
        yield [asked("two")]

    [first, second] = worker.run(tasks())
    assert (len(first), len(second), len(worker.failures)) == (1, 0, 1)
    assert "the worker was closed" in str(worker.failures[0].error)
    assert all(made.closed for made in factory.made)


def test_a_run_that_is_closed_reads_no_more_tasks() -> None:
    worker = HarnessRolloutWorker(ScriptedFactory(), lambda *_: "yes", concurrency=1)
    rollouts = worker.rollouts([asked(str(number))] for number in count())
    assert next(rollouts).reward == 1.0
    worker.close()
    assert list(rollouts) == []


def test_only_a_trainer_that_keeps_tokens_has_training_traces() -> None:
    worker = HarnessRolloutWorker(ScriptedFactory(), lambda *_: "yes")
    with pytest.raises(InvalidRequest, match="ServerGenerate does"):
        worker.fetch_training_trace("r")


@pytest.mark.parametrize(
    ("score", "why"),
    [({"env_reward": 1.0}, "an object with 'env_reward', not 'dict'"), (Score("much"), "must be a number or None")],  # type: ignore[arg-type]
)
def test_a_score_that_cannot_be_read_fails_its_rollout(score: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scripted, "verify", lambda self: score)
    worker = HarnessRolloutWorker(ScriptedFactory(), lambda *_: "yes")
    assert worker.run([[asked("one")]]) == [[]]
    assert why in str(worker.failures[0].error)


def test_an_async_verify_is_awaited(both: Servers) -> None:
    async def verify(task: Any, messages: Any) -> float:
        return 0.5

    def ask(task: Any, base_url: str, http_client: Any) -> None:
        http_client.post(f"{base_url}/chat/completions", json={"model": "m", "messages": [user("Well?")]})

    worker = HarnessRolloutWorker(HarnessSessionFactory(both.interception, ask, verify), lambda *_: "yes")
    assert [rollout.reward for rollout in worker.rollouts([None])] == [0.5]


def test_a_class_in_place_of_a_factory_is_refused(both: Servers) -> None:
    with pytest.raises(InvalidRequest, match="'factory' is the class ScriptedFactory; pass an instance"):
        HarnessRolloutWorker(ScriptedFactory, lambda *_: "yes")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="'environments' is the class AddingFactory"):
        EnvironmentSessionFactory(both.interception, AddingFactory)
