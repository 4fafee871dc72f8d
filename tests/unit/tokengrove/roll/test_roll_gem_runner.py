"""Runners on the environments of gem: games, tools and tool calls on a live server, with the tokens of each step."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

gem = pytest.importorskip("gem")

from proxy.app import build_app  # noqa: E402
from proxy.engine.scripted.engine import ScriptedEngine  # noqa: E402
from proxy.engine.scripted.scripts import Reply, Script, play  # noqa: E402
from proxy.settings import Settings  # noqa: E402
from tests.support import call_text, default_url, function_tool, sampled, says, tiny_renderer, user  # noqa: E402
from tests.unit.tokengrove.roll.roll_queues import Queue  # noqa: E402
from tokengrove.client import Client, Export, Session  # noqa: E402
from tokengrove.errors import InvalidRequest  # noqa: E402
from tokengrove.roll import DataProto, GEMRunner, ProxyEnvManager, Section, ToolCallRunner  # noqa: E402

SYSTEM = "You play games."
GUESSING = {
    "env_type": "game:GuessTheNumber-v0",
    "max_steps": 5,
    "max_tokens_per_step": 64,
    "agent_system_template": SYSTEM,
    "agent_template": "Turn {turn_idx}, {actions_left} left, {max_response_length} tokens:\n{observation}\n{suffix}",
    "config": {"min_number": 1, "max_number": 20, "max_turns": 5},
}


class Talk(gem.Env):  # type: ignore[misc]
    """Steps with scripted results: (reward, done, info), or an exception to raise. It keeps what it heard."""

    instances: list[Talk]

    def __init__(self, steps: Any = (), seeds: int | None = None, **params: Any) -> None:
        self.steps, self.seeds, self.params = list(steps), seeds, params
        self.heard: list[Any] = []
        self.closed = 0

    def reset(self, seed: int | None = None) -> tuple[str | None, dict[str, Any]]:
        if self.seeds is not None and seed is not None and seed >= self.seeds:
            return None, {}
        return "begin", {"env_instruction": "Say words."}

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.heard.append(action)
        step = self.steps[len(self.heard) - 1]
        if isinstance(step, Exception):
            raise step
        reward, done, info = step
        return f"heard {len(self.heard)}", reward, done, False, info

    def close(self) -> None:
        self.closed += 1


class Calls(gem.Env):  # type: ignore[misc]
    """Owns the conversation: calls get results, and a text ends it."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def reset(self, seed: int | None = None) -> tuple[list[Any], dict[str, Any]]:
        self.messages: list[Any] = [user("look, then say done")]
        return self.messages, {"tools": [function_tool("look")]}

    def step(self, action: Any) -> tuple[list[Any], float, bool, bool, dict[str, Any]]:
        self.heard.append(action)
        if isinstance(action, str):
            return self.messages, 1.0, True, False, {}
        self.messages = [*self.messages, action]
        for call in action["tool_calls"]:
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": "a door"})
        return self.messages, 0.5, False, False, {"metrics": {"calls": 1}, "metrics_agg_mode": {"calls": "sum"}}


gem.register("test:talk", entry_point=Talk)
gem.register("test:calls", entry_point=Calls)


@contextmanager
def session_on(folder: Path, script: Script, **options: Any) -> Iterator[tuple[Client, Session, ScriptedEngine]]:
    engine = ScriptedEngine(script, vocab_size=tiny_renderer().vocab_size)
    app = build_app(Settings(database_url=default_url(folder), migrate=True), engine=engine, renderer=tiny_renderer())
    with Client(app=app) as client:
        yield client, client.start_session("t", **options), engine


def runner_of(client: Client, session: Session, config: Any, kind: type[GEMRunner] = GEMRunner) -> Any:
    runner = kind(base_url=session.base_url, env_id=7, env_config=config)
    runner.http_client = client.http_client()
    return runner


def talking(*steps: Any, **more: Any) -> dict[str, Any]:
    return {"env_type": "test:talk", "agent_system_template": SYSTEM, "config": {"steps": steps, **more}}


def exported(client: Client, session: Session) -> Export:
    session.end()
    return client.export(session_id=session.session_id, layout="concat")


def conversation(engine: ScriptedEngine) -> str:
    """The last prompt, as text."""
    return tiny_renderer().decode(engine.requests[-1].input_ids)


def number_of(seed: int) -> int:
    env = gem.make("game:GuessTheNumber-v0-hard", min_number=1, max_number=20, max_turns=5)
    env.reset(seed=seed)
    return int(env.game_number)


def test_a_game_is_played_with_a_turn_for_each_step(tmp_path: Path) -> None:
    number = number_of(11)
    wrong = "1" if number != 1 else "2"
    guesses = [f"\\boxed{{{wrong}}}", f"I say \\boxed{{{number}}}"]
    with session_on(tmp_path, says(*guesses)) as (client, session, engine):
        with runner_of(client, session, GUESSING) as runner:
            result = runner.run_job(11)
        (sample,) = exported(client, session).samples
    assert (result.status, result.score, result.step_scores) == ("Finished", 1.0, [0.0, 1.0])
    assert sample.input_ids[sample.loss_mask == 1].tolist() == [*sampled(guesses[0]), *sampled(guesses[1])]
    shown = conversation(engine)
    assert "Turn 1, 5 left, 64 tokens:\nYou are playing Guess The Number" in shown
    assert f"Turn 2, 4 left, 64 tokens:\nAt turn 1, you guessed {wrong}" in shown
    assert "Enter your next guess." in shown  # the suffix


def test_an_episode_ends_after_max_steps(tmp_path: Path) -> None:
    steps = [(0.25, False, {})] * 9
    with session_on(tmp_path, says("a", "b")) as (client, session, _):
        runner = runner_of(client, session, {**talking(*steps), "max_steps": 2})
        result = runner.run_job(1)
    assert (result.status, result.score, runner.env.heard) == ("Finished", 0.5, ["a", "b"])


def test_the_system_message_has_the_instruction_of_the_environment(tmp_path: Path) -> None:
    with session_on(tmp_path, says("a")) as (client, session, engine):
        runner_of(client, session, talking((1, True, {}))).run_job(1)
    assert f"{SYSTEM}\n\nSay words." in conversation(engine)
    assert "begin" in conversation(engine)


def test_metrics_of_the_steps_become_those_of_the_episode(tmp_path: Path) -> None:
    modes = {"valid": "mean", "success": "last", "pushed": "sum", "best": "max"}
    told = [
        {"valid": True, "success": False, "pushed": 1, "best": 5},
        {"valid": False, "success": True, "pushed": 2, "best": 3},
    ]
    steps = [(0, number == 1, {"metrics": each, "metrics_agg_mode": modes}) for number, each in enumerate(told)]
    with session_on(tmp_path, says("a", "b")) as (client, session, _):
        result = runner_of(client, session, talking(*steps)).run_job(1)
    assert result.metrics == {"valid": 0.5, "success": 1.0, "pushed": 3.0, "best": 5.0}


def test_an_environment_that_fails_keeps_what_was_earned_and_plays_the_next_episode(tmp_path: Path) -> None:
    steps = [(0.5, False, {"metrics": {"moves": 1}}), OSError("the board is gone"), (2.0, True, {})]
    with session_on(tmp_path, says("a", "b", "c")) as (client, session, _):
        runner = runner_of(client, session, talking(*steps))
        failed, finished = runner.run_job(1), runner.run_job(2)
    assert (failed.status, failed.score, failed.step_scores) == ("Failed", 0.5, [0.5])
    assert failed.agent_exit_reason == "OSError: the board is gone"
    assert failed.metrics == {"moves": 1.0}
    assert (finished.status, finished.score, finished.metrics) == ("Finished", 2.0, {})


def test_an_engine_that_fails_keeps_what_was_earned(tmp_path: Path) -> None:
    with session_on(tmp_path, says("a")) as (client, session, _):
        result = runner_of(client, session, talking(*[(0.5, False, {})] * 3)).run_job(1)
    assert (result.status, result.score) == ("Failed", 0.5)
    assert "the script has no reply left" in result.agent_exit_reason


def test_a_full_context_ends_the_episode_with_what_was_earned(tmp_path: Path) -> None:
    steps = [(0.5, False, {"metrics": {"moves": 1}})] * 9
    limits = {"max_context_tokens": 150, "on_context_overflow": "error"}
    with session_on(tmp_path, says(*["some words"] * 9), limits=limits) as (client, session, _):
        result = runner_of(client, session, talking(*steps)).run_job(1)
        turns = len(client.session_tree(session.session_id).interactions)
    assert result.status == "Finished"
    assert 0 < len(result.step_scores) < 9 and result.score == sum(result.step_scores)
    assert result.agent_exit_reason.startswith("RequestError: 4")
    assert result.metrics == {"moves": 1.0, "truncated": True}
    assert turns == len(result.step_scores)


def test_an_environment_without_data_gives_no_data(tmp_path: Path) -> None:
    with session_on(tmp_path, says("a")) as (client, session, engine):
        runner = runner_of(client, session, talking((1, True, {}), seeds=1))
        assert [runner.run_job(seed).status for seed in (0, 1)] == ["Finished", "NoData"]
    assert len(engine.requests) == 1


def test_reasoning_is_part_of_the_action_and_stays_in_the_conversation(tmp_path: Path) -> None:
    spoken = "<think>\nleft or right\n</think>\n\n<answer>left</answer>"
    script = play([Reply(sampled(spoken)), Reply(sampled("done"))])
    with session_on(tmp_path, script) as (client, session, _):
        runner = runner_of(client, session, talking((0, False, {}), (1, True, {})))
        runner.run_job(1)
        (sample,) = exported(client, session).samples
    assert runner.env.heard == [spoken, "done"]
    assert sample.input_ids[sample.loss_mask == 1].tolist() == [*sampled(spoken), *sampled("done")]


def test_code_in_an_answer_is_run_and_the_environment_grades_the_final_answer(tmp_path: Path) -> None:
    config = {
        "env_type": "rg:basic_arithmetic",
        "agent_template": "{observation}",
        "config": {"size": 3, "seed": 1},
        "tool_wrapper": {
            "wrapper_args": {"tool_reward": 0, "tool_success_reward": 0.25, "max_tool_uses": 2},
            "tool_configs": [{"tool_id": "python_code", "tool_args": {"timeout": 60, "sandbox_type": "none"}}],
        },
    }
    replies = ["<code>print(6 * 7)</code>", "The answer is \\boxed{no number}."]
    with session_on(tmp_path, says(*replies)) as (client, session, engine):
        result = runner_of(client, session, config).run_job(3)
        (sample,) = exported(client, session).samples
    assert (result.status, result.step_scores) == ("Finished", [0.25, 0.0])
    assert result.metrics == {"tool_use_counter": 1.0, "tool_success_counter": 1.0}
    assert "Code execution result: 42" in conversation(engine)
    assert sample.input_ids[sample.loss_mask == 1].tolist() == [*sampled(replies[0]), *sampled(replies[1])]


def test_tool_calls_are_given_to_the_environment_whole_and_texts_as_texts(tmp_path: Path) -> None:
    call = call_text("look", '{"at": "the wall"}')
    script = play([Reply(sampled(call)), Reply(sampled("done"))])
    config = {"env_type": "test:calls", "max_steps": 4}
    with session_on(tmp_path, script) as (client, session, _):
        runner = runner_of(client, session, config, ToolCallRunner)
        result = runner.run_job(1)
        (sample,) = exported(client, session).samples
    assert (result.status, result.step_scores, result.metrics) == ("Finished", [0.5, 1.0], {"calls": 1.0})
    message, text = runner.env.heard
    assert message["role"] == "assistant" and message["tool_calls"][0]["function"]["name"] == "look"
    assert text == "done"
    assert sample.input_ids[sample.loss_mask == 1].tolist() == [*sampled(call), *sampled("done")]


@pytest.mark.parametrize(("kind", "env_type"), [(ToolCallRunner, "test:talk"), (GEMRunner, "test:calls")])
def test_a_runner_for_the_other_kind_of_environment_is_named(tmp_path: Path, kind: Any, env_type: str) -> None:
    with session_on(tmp_path, says("a")) as (client, session, engine):
        result = runner_of(client, session, {"env_type": env_type}, kind).run_job(1)
    assert result.status == "Failed"
    assert ("GEMRunner" if kind is ToolCallRunner else "ToolCallRunner") in result.agent_exit_reason
    assert engine.requests == []


def test_the_environment_is_made_once_and_closed_at_the_teardown() -> None:
    runner = GEMRunner("http://t", 1, Section(talking(size=3)))
    env = runner.env
    assert env.params == {"size": 3}
    runner.setup()
    assert runner.env is env
    runner.teardown()
    assert (env.closed, runner.env) == (1, None)
    runner.setup()
    assert runner.env is not env


@pytest.mark.parametrize(
    ("template", "said"), [("{board}", "agent_template has {board}"), ("{observation", "agent_template cannot")]
)
def test_a_template_with_other_fields_is_refused_when_the_runner_is_made(template: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        GEMRunner("http://t", 1, {**talking(), "agent_template": template})


@pytest.mark.parametrize("path", [f"{__name__}:Talk", f"{__name__}.Talk"])
def test_an_environment_may_be_named_by_the_path_of_its_class(path: str) -> None:
    assert GEMRunner("http://t", 1, {"env_type": path, "config": {"size": 2}}).env.params == {"size": 2}


def test_an_unknown_environment_is_refused_with_what_may_be_meant() -> None:
    with pytest.raises(InvalidRequest, match=r"no environment 'game:GuesTheNumber'.*is it game:GuessTheNumber-v0"):
        GEMRunner("http://t", 1, {"env_type": "game:GuesTheNumber"})


def test_a_seed_is_one_episode_however_many_threads_play() -> None:
    """Minesweeper hides its mines at the first step, and draws from generators that the threads share."""
    config = {"env_type": "game:Minesweeper-v0", "config": {"rows": 6, "cols": 6, "num_mines": 9}}
    envs = [GEMRunner("http://closed.invalid", number, config).env for number in range(4)]

    def played(env: Any, between: Callable[[], object] = lambda: None) -> list[Any]:
        boards = []
        for seed in range(16):
            env.reset(seed=seed)
            between()
            env.step("\\boxed{reveal 0 0}")
            boards.append([row[:] for row in env.grid])
        return boards

    envs[0].max_turns = 99
    assert envs[0].unwrapped.max_turns == 99
    random.seed(5)
    expected = played(envs[0], random.random)  # which another part of the program draws
    drawn = random.random()
    with ThreadPoolExecutor(len(envs)) as threads:
        assert list(threads.map(played, envs)) == [expected] * len(envs)
    random.seed(5)
    assert [random.random() for _ in range(17)][16] == drawn  # the generators of the program were left alone


def test_making_an_environment_leaves_the_root_logger_as_it_was() -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    GEMRunner("http://t", 1, talking())
    assert (root.handlers, root.level) == (handlers, level)


def test_a_manager_plays_it_by_its_path_and_zips_the_scores_to_the_turns(tmp_path: Path) -> None:
    metrics = {"metrics": {"pushed": 2}, "metrics_agg_mode": {"pushed": "sum"}}
    steps = [(0.25, False, metrics), (1.0, True, metrics)]
    env = {"tag": "Talk", "group_id": 3, "env_id": 7, "group_seed": 11, "max_tokens_per_step": 64, **talking(*steps)}
    queue = Queue(1)
    with session_on(tmp_path, says("one", "two")) as (client, _, _):
        ProxyEnvManager(
            worker_config=Section(generating_args={"max_new_tokens": 32}),
            pipeline_config=Section(exp_name="e", sequence_length=512),
            env_config=Section(env, agent_runner_cls="tokengrove.roll.GEMRunner"),
            tokenizer=None,
            generate_scheduler=client,
            output_queue=queue,
            thread_lock=None,
        ).run_rollout_loop(DataProto(meta_info={"seed": 100}))
    (rollout,) = queue.rollouts
    trained = rollout.batch["input_ids"][0][rollout.batch["response_mask"][0].astype(bool)].tolist()
    assert trained == [*sampled("one"), *sampled("two")]
    assert list(rollout.non_tensor_batch["step_scores"][0]) == [0.25, 1.0]
    assert rollout.non_tensor_batch["episode_scores"].tolist() == [1.25]
    assert rollout.meta_info["metrics"]["env/Talk/pushed"] == 4.0


@pytest.mark.parametrize(
    ("env_type", "sizes"), [("sokoban", {"dim_room": (6, 6), "num_boxes": 1}), ("frozen_lake", {"is_slippery": False})]
)
def test_the_games_of_roll_are_played_with_the_tokens_of_each_move(
    tmp_path: Path, env_type: str, sizes: dict[str, Any]
) -> None:
    moves = [
        "<answer>Up</answer>",
        "no action",
        "<answer>Up</answer>",
    ]  # which ends no game of this seed
    config = {"env_type": env_type, "max_steps": 3, "config": {"max_steps": 9, "format_penalty": -0.5, **sizes}}
    with session_on(tmp_path, says(*moves)) as (client, session, _):
        result = runner_of(client, session, config).run_job(1)
        (sample,) = exported(client, session).samples
    assert (result.status, len(result.step_scores)) == ("Finished", 3)
    assert result.step_scores[1] <= -0.5
    assert result.metrics["action_is_valid"] == pytest.approx(2 / 3)
    assert sample.input_ids[sample.loss_mask == 1].tolist() == [token for move in moves for token in sampled(move)]


def test_a_history_that_its_environment_rewrites_becomes_branches_and_loses_no_turn(tmp_path: Path) -> None:
    calls = [call_text("move_player", f'{{"direction": "{to}"}}') for to in ("up", "nowhere", "down")]
    config = {
        "env_type": "sokoban_tool_call",
        "max_steps": 3,
        "config": {"dim_room": (6, 6), "num_boxes": 1, "max_steps": 9, "full_history": True, "format_penalty": -0.5},
    }
    script = play([Reply(sampled(call)) for call in calls])
    with session_on(tmp_path, script) as (client, session, _):
        result = runner_of(client, session, config, ToolCallRunner).run_job(1)
        samples = exported(client, session).samples
    assert (result.status, len(result.step_scores)) == ("Finished", 3)
    assert result.step_scores[1] <= -0.5
    trained = [sample.input_ids[sample.loss_mask == 1].tolist() for sample in samples]
    first, wrong, last = map(sampled, calls)
    assert trained == [[*first, *wrong], [*last]]  # each turn is trained once, where it was first
