"""The batch of ROLL's `formulate_rollouts` for an episode that has ended, from the export of its session."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from tokengrove.client import Sample
from tokengrove.client.adapters import roll
from tokengrove.errors import InvalidRequest
from tokengrove.roll.managers.episode_session import EpisodeSession
from tokengrove.roll.values.data_proto import DataProto

_LAYOUTS = {"traj": "concat", "step": "individual"}


def rollout_of(
    session: EpisodeSession,
    *,
    mode: Literal["traj", "step"] | str,
    sequence_length: int | None,
    pad_token_id: int = 0,
    score: float | None = None,
    discounted: bool = False,
    amended: Callable[[Sequence[Sample]], list[Sample]] = list,
    **options: Any,
) -> DataProto:
    """The rows of an episode: one for each branch (`traj`), or one for each turn (`step`), padded to `sequence_length`.

    The columns are those of `roll.RollFields`; `meta_info` also has the `session_id`. An episode in which nothing was
    sampled has one row of padding, as in ROLL. `score` is the score of the episode, by default the sum of its rewards.
    With `discounted` the scores are returns, with the discount of the session; in `traj` they add up to the `score`,
    and the last turn has earned the difference between `score` and the rewards of turns. `amended` may change the
    samples before. `options` are those of `Client.export`. Rows of a vision model have the tensors and positions of
    their images. Raises InvalidRequest for another `mode`, and for a sample longer than `sequence_length`.
    """
    if mode not in _LAYOUTS:
        raise InvalidRequest(f"trajectory_mode is {mode!r}; it must be traj or step", param="trajectory_mode")
    export = session.exported(_LAYOUTS[mode], **{"multi_modal_inputs": "auto", **options})
    name, samples = session.session.session_id, amended(export.samples)
    scores = {} if score is None else {name: float(score)}
    more: dict[str, Any] = {}
    if discounted and score is not None and mode == "traj":
        more["more_returned"] = _returns_beyond_rewards(score, samples, session)
    if not samples:
        samples, scores = [roll.placeholder(name, session.traj_group_id, pad_token_id)], {name: 0.0}
    make = roll.trajectories if mode == "traj" else roll.steps
    fields = make(
        samples,
        sessions=export.sessions,
        sequence_length=sequence_length,
        pad_token_id=pad_token_id,
        episode_scores=scores,
        discounted=discounted,
        first_token_at=session.first_token_at(),
        **more,
    )
    return DataProto(fields.batch, fields.non_tensor_batch, {**fields.meta_info, "session_id": name})


def _returns_beyond_rewards(score: float, samples: Sequence[Sample], session: EpisodeSession) -> dict[str, float]:
    """The amounts added to the returns of turns, by id, because the last turn also earns `score` minus the rewards."""
    rewards = {turn["interaction_id"]: float(turn.get("reward") or 0.0) for each in samples for turn in each.turns}
    beyond = score - math.fsum(rewards.values())
    if math.isclose(beyond, 0.0, abs_tol=1e-9 * max(1.0, abs(score))):
        return {}
    names = session.turns()
    return {name: beyond * session.discount ** (len(names) - 1 - at) for at, name in enumerate(names)}
