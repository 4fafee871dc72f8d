"""The examples work as their first lines say: an agent solves its task, and a training step uses its samples."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from proxy.app import write_tiny_model
from proxy.serving.server import serving
from proxy.settings import Settings
from tests.docs.pages import ROOT
from tokengrove import Client


def run(example: str, *arguments: str, timeout: float = 240, path: Path = ROOT) -> str:
    """What the example prints. `path`: a folder of further modules that it may import."""
    command = [sys.executable, str(ROOT / "examples" / example), *arguments]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{path}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def settings(folder: Path, **more: object) -> Settings:
    return Settings(port=0, database_url=f"sqlite:///{folder / 't.db'}", log_level="warning", **more)  # type: ignore[arg-type]


def test_the_calculator_agent_is_rewarded_for_the_right_answer_and_exports_as_one_sample(tmp_path: Path) -> None:
    with serving(settings(tmp_path, engine="scripted", engine_arg=("play=agent",))) as url, Client(url) as client:
        assert "rewards [1.0, 1.0]" in run("calculator_agent.py", "--url", url, "--rollouts", "2")
        with pytest.warns(UserWarning, match="35 grammar"):  # its first turn is a forced call
            samples = client.export(filter={"group_id": "calculator-0"}, layout="concat").samples
    assert [(len(sample.turns), float(sample.rewards[0])) for sample in samples] == [(2, 1.0), (2, 1.0)]


@pytest.mark.engines
def test_a_grpo_step_on_the_calculator_starts_at_ratio_one_and_changes_the_weights_served(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", 0)
    out = tmp_path / "out"
    with serving(settings(tmp_path, model=str(tmp_path / "model"), engine="transformers")) as url:
        run("calculator_agent.py", "--url", url, "--rollouts", "8")
        printed = run("grpo_step.py", "--url", url, "--model", str(tmp_path / "model"), "--out", str(out))
        with Client(url) as client:
            assert client.claim().sessions == {}
    assert "8 samples" in printed and "now weight version 1" in printed
    assert float(printed.split("+- ")[1].split(",")[0]) < 1e-3
    before, after = (folder / "model.safetensors" for folder in (tmp_path / "model", out))
    assert before.read_bytes() != after.read_bytes()


MINE = """
import itertools
from my_agents import plain
calls = itertools.count(1)
async def agent(base_url, api_key, question):
    answer = await plain(base_url, api_key, question)
    if next(calls) % 100 == 0:
        raise ValueError("no tool")
    return answer
def init(project):
    print("tracks", project)
def log(values):
    print("tracked", values["reward"])
"""


@pytest.mark.engines
def test_the_loop_of_one_screen_learns_with_an_agent_of_ones_own_that_sometimes_fails_and_is_tracked(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    printed = run("my_loop.py", "mine:agent", "mine", path=tmp_path)
    rewards = [float(reward) for reward in re.findall(r"^tracked (\S+)$", printed, re.M)]
    assert [f"{reward:.2f}" for reward in rewards] == re.findall(r"mean reward (\S+)", printed)
    assert len(rewards) == 20 and printed.count("1 rollouts failed, the first with ValueError('no tool')") == 6
    assert sum(rewards[:3]) / 3 < 0.5 and sum(rewards[-3:]) / 3 > 0.7
    assert "tracks my-loop" in printed


@pytest.mark.engines
@pytest.mark.timeout(600)
def test_the_policy_learns_from_a_running_chat_whose_users_rate_answers_later() -> None:
    steps = run("online_chat.py", timeout=540).splitlines()
    rewards = [float(line.split("mean reward ")[1].split()[0]) for line in steps]
    assert len(rewards) == 24
    assert sum(rewards[:3]) / 3 < 0.5 and sum(rewards[-3:]) / 3 > 0.6


@pytest.mark.engines
@pytest.mark.timeout(900)  # 20 to 60 steps, by chance, of 3 to 8 seconds each
def test_the_loop_for_a_model_that_sees_learns_shapes_and_names_new_ones() -> None:
    """Whoever does not look is right in half of the cases."""
    *steps, last = run("train_vision.py", timeout=840).splitlines()
    rewards = [float(line.split("mean reward ")[1].split()[0]) for line in steps]
    assert sum(rewards[:3]) / 3 < 0.5
    assert sum(rewards[-5:]) / 5 > 0.69  # it ends above 0.9, but prints each mean rounded, up to 0.005 below
    assert int(last.split(", ")[1].split("%")[0]) > 75


@pytest.mark.engines
@pytest.mark.parametrize("seed", [0, 1])
def test_the_replay_loop_starts_at_ratio_one_only_with_both_columns(seed: int) -> None:
    printed = run("train_replay.py", "--steps", "2", "--seed", str(seed))
    pattern = r"^  (.+?) +first ratio (\S+) +farthest 1 \+- (\S+) +KL (\S+)$"
    found = [(name, *map(float, figures)) for name, *figures in re.findall(pattern, printed, re.M)]
    assert [name for name, *_ in found] == ["replay", "no kept sets", "no experts", "neither"] * 2
    for step in (found[:4], found[4:]):
        (_, mean, farthest, divergence), *others = step
        assert abs(mean - 1) < 1e-4 and farthest < 1e-4
        assert all(off > 10 * farthest and other > 10 * divergence for _, _, off, other in others), step
        assert abs(step[3][1] - 1) > 10 * max(abs(mean - 1), 1e-6)


@pytest.mark.engines
@pytest.mark.timeout(900)  # 10 to 25 steps, by chance, of 3 to 10 seconds each
@pytest.mark.parametrize("seed", [0, 1])
def test_the_policy_learns_to_beat_the_frozen_opponent_which_is_never_trained(seed: int) -> None:
    printed = run("two_players.py", *f"--seed {seed} --steps 40 --until 0.74 --games 200".split(), timeout=840)
    assert final_win_rate(printed) > 0.65
    counts = re.findall(r"policy: (\d+) tokens, all trained  opponent: (\d+) tokens, (\d+) trained", printed)
    assert len(counts) > 5
    assert all(int(policy) and int(opponent) and trained == "0" for policy, opponent, trained in counts)


@pytest.mark.engines
@pytest.mark.parametrize("seed", [0, 1])
def test_the_student_comes_closer_to_the_teacher_that_scores_its_answers(seed: int) -> None:
    printed = run("distill.py", "--seed", str(seed))
    divergence = [float(each) for each in re.findall(r"reverse KL (\S+) nats", printed)]
    assert len(divergence) == 20
    assert divergence[0] > 1.1 and sum(divergence[-3:]) / 3 < 0.85  # 0.55 to 0.73 were seen


@pytest.mark.engines
@pytest.mark.timeout(600)
def test_packed_sequences_train_as_samples_do_with_fewer_tokens() -> None:
    printed = run("train_forest.py", timeout=540)
    found = re.findall(
        r"reward (\S+)  rows (\d+) tokens \S+ s  forest (\d+) tokens \S+ s  gradients apart (\S+)", printed
    )
    assert len(found) == 40
    assert all(int(rows) > 4 * int(forest) and float(apart) < 1e-4 for _, rows, forest, apart in found)
    rewards = [float(reward) for reward, *_ in found]
    assert rewards[0] < 0.5 and sum(rewards[-5:]) / 5 > 0.6


@pytest.mark.engines
@pytest.mark.timeout(600)
def test_the_policy_learns_nothing_from_shuffled_rewards() -> None:
    printed = run("two_players.py", "--shuffle-rewards", "--steps", "12", timeout=540)
    assert 0.4 < final_win_rate(printed) < 0.6  # of 400 games: four standard deviations


def final_win_rate(printed: str) -> float:
    return float(printed.split("final win rate ")[1].split()[0])


def test_drawn_shapes_differ_by_seed_and_not_by_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    draw = importlib.import_module("shapes_agent").draw
    files = {draw(shape, seed) for shape in ("ring", "cross") for seed in range(5)}
    assert len(files) == 10 and draw("ring", 3) in files


@pytest.mark.parametrize(("said", "taken"), [("a", 1), (" an", 1), ("", 2), ("of", 2), ("12", 2)])
def test_every_answer_is_a_move_of_one_or_two_stones(monkeypatch: pytest.MonkeyPatch, said: str, taken: int) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    assert importlib.import_module("nim_game").stones(said) == taken


@pytest.mark.parametrize(
    ("answer", "kind", "right"),
    [
        (" And", "vowel", True),
        ("tree", "vowel", False),
        ("x", "consonant", True),
        ("7", "consonant", False),
        ("", "vowel", False),
    ],
)
def test_a_letter_is_right_if_it_is_of_the_kind_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, answer: str, kind: str, right: bool
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    assert importlib.import_module("letters_agent").is_right(answer, kind) is right
