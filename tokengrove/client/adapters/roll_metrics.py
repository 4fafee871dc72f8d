"""The metrics of ROLL's managers for an episode, by ROLL's names, from the samples of its session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from tokengrove.client.adapters.parts import is_timed
from tokengrove.client.values import Json, Sample

# Metrics of ROLL's sandbox runners: the name of ROLL's metric, and the name of the session's metric.
_RATIOS = {
    "logic": "agent_execution_time_ratio",
    "env_setup": "env_setup_time_ratio",
    "agent_setup": "agent_setup_time_ratio",
}


def session_metrics(
    samples: Sequence[Sample], metrics: Mapping[str, float], episode_score: float, first_token_at: Mapping[str, float]
) -> dict[str, float]:
    """ROLL's metrics of one session, in addition to the session's own `metrics`. `samples` are all samples of it.

    Lengths are means over the samples, in tokens: the response is the trained tokens, the prompt is the rest. `step_rt`
    is the time from the request to the complete answer. If the time of the first token is known, `pure_inf` is the time
    after it, and `proxy_ovh` the time before it: the prompt, the queue and the prefill. `env_exec` is the time between
    an answer and the next request.
    """
    trained, lengths = (
        [int(sample.loss_mask.sum()) for sample in samples],
        [len(sample.input_ids) for sample in samples],
    )
    turns = _turns(samples)
    timed = [turn for turn in turns if is_timed(turn)]
    total_s = metrics.get("traj_time_total", _wall_s(timed))
    times = _latencies(timed, first_token_at)
    return {
        **metrics,
        "num_actions": len(turns),
        "response_length": float(np.mean(trained)),
        "prompt_length": float(np.mean(np.subtract(lengths, trained))),
        "total_tokens": sum(lengths),
        "num_branches_or_steps": len(samples),
        "episode_score": episode_score,
        "traj_time_total": total_s,
        "throughput/step_per_sec": len(samples) / total_s if total_s > 0 else 0.0,
        **{f"efficiency/{name}_pct": metrics.get(ratio, 0.0) for name, ratio in _RATIOS.items()},
        **{
            f"latency/{name}_{how}": value
            for name, found in times.items()
            for how, value in zip(("avg", "p99", "max"), _statistics(found), strict=True)
        },
    }


def _turns(samples: Sequence[Sample]) -> list[Mapping[str, Json]]:
    """The distinct turns of a session, in the order of their requests."""
    turns = {turn["interaction_id"]: turn for sample in samples for turn in sample.turns}
    return sorted(turns.values(), key=lambda turn: float(turn.get("created_at") or 0.0))


def _wall_s(turns: Sequence[Mapping[str, Json]]) -> float:
    if not turns:
        return 0.0
    return max(float(turn["completed_at"]) for turn in turns) - float(turns[0]["created_at"])


def _latencies(turns: Sequence[Mapping[str, Json]], first_token_at: Mapping[str, float]) -> dict[str, list[float]]:
    answers = [float(turn["completed_at"] - turn["created_at"]) for turn in turns]
    gaps = [float(later["created_at"] - turn["completed_at"]) for turn, later in pairwise(turns)]
    found = {"step_rt": answers, "env_exec": [max(gap, 0.0) for gap in gaps]}
    if first_token_at:
        known = [turn for turn in turns if turn["interaction_id"] in first_token_at]
        begun = [first_token_at[turn["interaction_id"]] for turn in known]
        found["pure_inf"] = [float(turn["completed_at"]) - at for turn, at in zip(known, begun, strict=True)]
        found["proxy_ovh"] = [at - float(turn["created_at"]) for turn, at in zip(known, begun, strict=True)]
    return found


def _statistics(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, 99th percentile and maximum; 0 without values, as in ROLL."""
    if not values:
        return 0.0, 0.0, 0.0
    return float(np.mean(values)), float(np.percentile(values, 99)), float(np.max(values))
