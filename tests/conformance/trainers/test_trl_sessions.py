"""TRL's own rollout loop on OpenEnv sessions from here, called as TRL calls it for one rollout."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.engine.tiny.model import build_tiny_model
from tests.conformance.packages import package
from tests.conformance.trainers import trl_agents
from tokengrove.client import Client
from tokengrove.client.adapters.openenv import training_trace
from tokengrove.trl import SessionFactory

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tiny_model(folder, seed=0)
    tokenizer = package("transformers").AutoTokenizer.from_pretrained(folder)
    tokenizer.response_template = {}  # TRL looks for one that it knows, to parse answers that it samples itself
    return tokenizer


@pytest.fixture
def make_loop(url: str, tokenizer: Any) -> Iterator[Callable[..., Any]]:
    """TRL's loop, which otherwise lives in a process of its own; its factory is closed after the test."""
    package("trl")
    package("openenv")
    harness: Any = package("trl.experimental.async_grpo.openenv_harness")
    package("accelerate").PartialState()  # its log needs it
    made: list[Any] = []

    def make(agent: Any, temperature: float = 0.9, **options: Any) -> Any:
        shared = {name: queue.Queue() for name in ("rollout_buffer", "exception_info_queue", "metrics_queue")}
        values = {name: SimpleNamespace(value=0) for name in ("model_version_value", "heartbeat_value")}
        loop = harness._HarnessRolloutLoop(
            harness_session_factory=partial(SessionFactory, url, agent=agent, **options),
            model_name="any",
            dataset=[],
            reward_funcs=[],
            processing_class=tokenizer,
            eos_token_ids=[tokenizer.eos_token_id],
            temperature=temperature,
            failed_event=None,
            **shared,
            **values,
        )
        made.append(loop)
        return loop

    yield make
    for loop in made:
        loop._factory.close()
        loop._session_pool.shutdown()
        loop._tool_pool.shutdown()
        loop._loop.close()


def stored(url: str, group: int) -> tuple[Any, list[dict[str, Any]]]:
    """The session that was played last, and its turns."""
    with Client(url) as client:
        listed = [entry for entry in client.sessions() if str(entry["group_id"]).endswith(f"-{group}")]
        tree = client.session_tree(listed[-1]["session_id"])
        turns = [
            client.show_turn(tree.session_id, node.id, ["ids", "logprobs", "messages"]) for node in tree.interactions
        ]
        return tree, turns


def test_a_rollout_is_one_row_with_the_stored_tokens_and_the_reward(url: str, make_loop: Callable[..., Any]) -> None:
    loop = make_loop(trl_agents.talk)
    (completion, completion_ids, sequences, _, _, reward), metrics = loop._run_session(HELLO, 101)
    tree, turns = stored(url, 101)
    assert tree.outcome == "Finished" and len(turns) == 2
    (row,) = sequences
    assert row.input_ids == turns[1]["prompt_ids"] + turns[1]["output_ids"]
    trained = [at for at, on in enumerate(row.completion_mask) if on]
    assert [row.input_ids[at] for at in trained] == completion_ids == turns[0]["output_ids"] + turns[1]["output_ids"]
    assert [row.old_log_probs[at] for at in trained] == turns[0]["logprobs"] + turns[1]["logprobs"]
    assert reward == turns[1]["reward"] is not None
    assert [message["role"] for message in completion] == ["user", "assistant", "user", "assistant"]
    assert metrics["turns"] == 2 and not metrics["loop_exhausted"]
    assert {turn["sampling"]["temperature"] for turn in turns} == {0.9}


def test_the_column_prompt_may_have_all_that_the_agent_needs(url: str, make_loop: Callable[..., Any]) -> None:
    loop = make_loop(trl_agents.ask, reward=trl_agents.matches)
    (*_, reward), _ = loop._run_session({"prompt": HELLO, "answer": "no such answer"}, 102)
    assert reward == 0.0


def test_an_agent_that_fails_is_unscorable_and_one_whose_time_is_over_is_flagged(
    url: str, make_loop: Callable[..., Any]
) -> None:
    (*_, reward), metrics = make_loop(trl_agents.fails)._run_session(HELLO, 103)
    assert (reward, metrics["turns"], metrics["loop_exhausted"]) == (None, 1, False)
    (_, _, sequences, *_, reward), metrics = make_loop(trl_agents.late)._run_session(HELLO, 104)
    assert (reward, len(sequences), metrics["loop_exhausted"]) == (None, 1, True)
    assert [stored(url, group)[0].outcome for group in (103, 104)] == ["Failed", "Timeout"]


def test_a_turn_that_is_not_trained_is_context_in_trls_row(url: str, make_loop: Callable[..., Any]) -> None:
    (_, completion_ids, sequences, *_), _ = make_loop(trl_agents.forced)._run_session(HELLO, 105)
    _, turns = stored(url, 105)
    (row,) = sequences
    trained = [token for token, on in zip(row.input_ids, row.completion_mask, strict=True) if on]
    assert trained == turns[1]["output_ids"] != completion_ids


def test_a_session_has_openenvs_types(url: str, make_loop: Callable[..., Any]) -> None:
    openenv: Any = package("openenv.core.harness")
    session = make_loop(trl_agents.ask, reward=trl_agents.answer_length)._factory.create(HELLO, 106)
    assert isinstance(session, openenv.TrainableSession) and isinstance(session, openenv.LoopOwningSession)
    assert session.wait_for_completion() == 0
    trace, verified = session.fetch_training_trace(), session.verify([])
    assert isinstance(trace, openenv.TrainingTrace) and isinstance(verified, openenv.VerifyResult)
    assert trace.to_trace_entries() == [
        {name: value for name, value in entry.items() if name != "reward"} for entry in session.fetch_proxy_trace()
    ]
    (turn,) = trace.turns
    assert set(turn.model_dump()) == {*openenv.TrainingTrace.model_fields["turns"].annotation.__args__[0].model_fields}
    assert verified.env_reward == len(turn.response["choices"][0]["message"]["content"]) > 0
    with Client(url) as client:
        assert training_trace(client, session.session_id) == trace
        assert training_trace(client, session.session_id, {"turns": []}).turns[0].loss_mask == [0] * len(turn.loss_mask)
