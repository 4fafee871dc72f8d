"""Rewards and samples in the history of a direct manager."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from tokengrove.client import Sample
from tokengrove.roll.managers.episode_session import EpisodeSession

Layout = Literal["concat", "individual"]
Entries = Sequence[Mapping[str, Any]]


def earned(history: Entries) -> tuple[dict[str, float], float]:
    """The rewards by interaction id, and their sum.

    The reward of a step without a turn, such as the end of an episode that was cut off, is added to the previous turn.
    """
    rewards: dict[str, float] = {}
    score, turn = 0.0, None
    for entry in history:
        turn = entry.get("interaction_id") or turn
        if (reward := entry.get("reward")) is not None:
            score += float(reward)
            if turn is not None:
                rewards[turn] = rewards.get(turn, 0.0) + float(reward)
    return rewards, score


def amended(
    samples: Sequence[Sample], history: Entries, episode: EpisodeSession, layout: Layout, tools: Sequence[Any]
) -> list[Sample]:
    """The exported samples, with the messages and tools of their prompts.

    If some answers were not sampled as turns, the samples are made from the history, and such answers are not trained.
    With images no answer is trained then, since the tensors of the images are missing.
    """
    answered = [entry for entry in history if "response_ids" in entry]
    if any("interaction_id" not in entry for entry in answered):
        steps = [
            {**entry, "reward": reward, "return": value}
            for entry, (reward, value) in zip(answered, _returns(history, episode.discount), strict=True)
        ]
        groups = [steps] if layout == "concat" else [[step] for step in steps]
        return [_sample(entries, episode, history, layout) for entries in groups]
    told = {entry["interaction_id"]: {"messages": entry["messages"], "tools": list(tools)} for entry in answered}
    return [
        replace(sample, turns=tuple({**turn, **told.get(_id(turn), {})} for turn in sample.turns)) for sample in samples
    ]


def _returns(history: Entries, discount: float) -> list[tuple[float, float]]:
    """The reward of each answer, including later steps without an answer, and its discounted return."""
    rewards: list[float] = []
    for entry in history:
        if "response_ids" in entry:
            rewards.append(0.0)
        if rewards:
            rewards[-1] += float(entry.get("reward") or 0.0)
    returns, future = [0.0] * len(rewards), 0.0
    for at in reversed(range(len(rewards))):
        returns[at] = future = rewards[at] + discount * future
    return list(zip(rewards, returns, strict=True))


def _id(turn: Mapping[str, Any]) -> str:
    return str(turn.get("interaction_id"))


def _sample(entries: Entries, episode: EpisodeSession, history: Entries, layout: Layout) -> Sample:
    """These steps as one sample, in the format of an export."""
    ids: list[int] = []
    logprobs: list[float] = []
    turn_ids: list[int] = []
    turns = []
    shows_images = any(entry.get("images") for entry in history)
    for at, entry in enumerate(entries):
        start = len(ids) + len(entry["prompt_ids"])
        ids += [*entry["prompt_ids"], *entry["response_ids"]]
        is_trained = "interaction_id" in entry and "infer_logprobs" in entry and not shows_images
        logprobs += [0.0] * (start - len(logprobs))
        logprobs += entry["infer_logprobs"] if is_trained else [0.0] * len(entry["response_ids"])
        turn_ids += [-1] * (start - len(turn_ids)) + [at if is_trained else -1] * len(entry["response_ids"])
        turns.append(_turn(entry, at, (start, len(ids))))
    score = earned(history)[1]
    reward = score if layout == "concat" else turns[-1]["return"]
    trained = np.array(turn_ids, np.int32)
    return Sample(
        session_id=episode.session.session_id,
        group_id=episode.traj_group_id,
        interaction_id=turns[-1]["interaction_id"],
        interaction_ids=tuple(turn["interaction_id"] for turn in turns),
        input_ids=np.array(ids, np.int32),
        loss_mask=(trained >= 0).astype(np.int32),
        logprobs=np.array(logprobs, np.float32),
        versions=np.full(len(ids), -1, np.int32),
        turn_ids=trained,
        attention_mask=np.ones(len(ids), np.bool_),
        rewards=np.array([reward], np.float32),
        raw_rewards=np.array([turns[-1]["reward"]], np.float32),
        rewarded=True,
        score=score,
        reward_scope="session",
        turns=tuple(turns),
    )


def _turn(entry: Mapping[str, Any], at: int, span: tuple[int, int]) -> dict[str, Any]:
    about = {**{name: entry[name] for name in ("reward", "return", "messages")}, "span": list(span)}
    return {"interaction_id": entry.get("interaction_id", f"step_{at}"), "state_hash": entry.get("state_hash"), **about}
