"""Samples as an export returns them, for tests of readers and adapters. Logprobs and versions follow from tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tokengrove.client.values import Sample, sample_of


def sample(prompt: Sequence[int], output: Sequence[int], *, reward: float = 0.0, **more: Any) -> Sample:
    """One turn."""
    return chain([(prompt, output)], rewards=[reward], **more)


def chain(
    turns: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    rewards: Sequence[float],
    session: str = "s",
    group: str | None = None,
    first_version: int = 0,
    trained: bool = True,
    **more: Any,
) -> Sample:
    """Join turns of (new context, output) as layout concat does; turn k has weight version first_version + k."""
    ids: list[int] = []
    mask: list[int] = []
    versions: list[int] = []
    turn_ids: list[int] = []
    entries = []
    for number, (context, output) in enumerate(turns):
        ids += context
        start = len(ids)
        ids += output
        mask += [0] * len(context) + [int(trained)] * len(output)
        versions += [-1] * len(context) + [first_version + number if trained else -1] * len(output)
        turn_ids += [-1] * len(context) + [number if trained else -1] * len(output)
        entries.append(
            {
                "interaction_id": f"{session}-{number}",
                "reward": rewards[number],
                "return": sum(rewards[number:]),
                "state_hash": f"h{number}",
                "span": [start, len(ids)],
                "created_at": 100.0 + 10 * number,
                "completed_at": 104.0 + 10 * number,
            }
        )
    logprobs = [-0.25 * token if on else 0.0 for token, on in zip(ids, mask, strict=True)]
    return sample_of(
        {
            "session_id": session,
            "group_id": group,
            "interaction_id": f"{session}-{len(turns) - 1}",
            "interaction_ids": [entry["interaction_id"] for entry in entries],
            "turns": entries,
            "input_ids": ids,
            "loss_mask": mask,
            "logprobs": logprobs,
            "versions": versions,
            "turn_ids": turn_ids,
            "attention_mask": np.ones(len(ids), bool),
            "rewarded": True,
            "score": sum(rewards),
            "reward_scope": "session",
            "rewards": [sum(rewards)],
            "raw_rewards": [rewards[-1]],
            **more,
        }
    )
