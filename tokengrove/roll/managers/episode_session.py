"""One episode as one session of the server. In every case it ends once, and its capacity is released."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from hashlib import blake2b
from typing import Any, cast

from tokengrove.client import Client, Export
from tokengrove.client.exit_reason import exit_reason, storable
from tokengrove.client.options import EndOptions, ExportOptions, SessionOptions
from tokengrove.client.values import SessionTree
from tokengrove.errors import EndedOtherwise, InvalidRequest, NotFound, ProxyError, SessionNotFound
from tokengrove.roll.config import sampling_of
from tokengrove.roll.values.data_proto import DataProto
from tokengrove.roll.values.episode_result import EpisodeResult, InvalidResult, status_of
from tokengrove.rollout.episode import BlockingEpisode
from tokengrove.rollout.failure_log import FailedEpisode
from tokengrove.rollout.session_start import unused_session_id

logger = logging.getLogger(__name__)

_DETERMINISTIC = "deterministic"
"""The capability of engines that sample equal tokens for equal seeds."""
_NO_TURNS = "the episode has no turn: the model was not called, or has not answered"


class EpisodeSession:
    """The session of one episode, from `start` to `finish` or `fail`.

    `session` is the client's session; `base_url` (without /v1) and `api_key` are for the agent. `traj_group_id` is the
    group of the session, which all episodes that are compared share. `discount` is the discount of its returns.
    `failure`: why the episode failed, after its end; None: it has not failed, or there was nothing to play.
    """

    def __init__(
        self,
        episode: BlockingEpisode,
        traj_group_id: str,
        env_id: int,
        api_key: str | None,
        discount: float,
    ) -> None:
        self._episode, self.client, self.session = episode, episode.client, episode.session
        self.traj_group_id, self.env_id, self.discount = traj_group_id, env_id, discount
        self.base_url = episode.root_url if api_key is None else address_of(episode.client, api_key)
        self.api_key = episode.api_key
        self.failure: FailedEpisode | None = None
        self._seen: SessionTree | None = None
        self._begun = time.monotonic()

    @classmethod
    def start(
        cls,
        client: Client,
        *,
        env_config: Any,
        worker_config: Any,
        pipeline_config: Any,
        mode: str,
        episode_id: int,
        seed: int,
        group_seed: int,
        step: int,
        api_key: str | None = None,
        may_wait: Callable[[], bool] = lambda: True,
        **options: Any,
    ) -> EpisodeSession:
        """Start the session of an episode; wait up to ten minutes while the server is full or restarts.

        `api_key`: the agent's key for all episodes of an environment, which replaces the session in its address. The
        wait ends when `may_wait` returns false. `options` are further fields of `start_session`. Raises TooManyRequests
        or ServerUnreachable if no session could start, and InvalidRequest if the server rejects the configuration.
        """
        tag, env_id = env_config.get("tag", "proxy"), env_config["env_id"]
        traj_group_id = f"{tag}_{env_config['group_id']}_{episode_id}_{group_seed}"
        numbers = {"env_id": env_id, "episode_id": episode_id, "seed": seed, "step": step}
        terms = terms_of(env_config, worker_config, pipeline_config)
        if getattr(pipeline_config, "seed_is_given", False):
            terms["sampling"] = {**_sampling_seed(client, seed, env_id), **terms["sampling"]}
        given: dict[str, Any] = {
            "session_id": unused_session_id(f"{traj_group_id}-{env_id}"),
            "group_id": traj_group_id,
            "metadata": {
                **{"tag": tag, "group_id": env_config["group_id"], "traj_id": f"{traj_group_id}_{env_id}_{_now()}"},
                **{"exp_name": getattr(pipeline_config, "exp_name", ""), "mode": mode, "validate": mode != "train"},
                **numbers,
            },
            "grant_capacity": True,
            **terms,
            **options,
        }
        if api_key is not None:
            given["api_key"] = api_key
        fields = cast(SessionOptions, given)
        episode = BlockingEpisode.start(client, str(tag), fields, delivery="runner", may_wait=may_wait)
        return cls(episode, traj_group_id, env_id, api_key, given["discount"])

    @property
    def outcome(self) -> str | None:
        """The outcome of the session; None before its end."""
        return self._episode.outcome

    def finish(
        self, result: EpisodeResult, rewards: Mapping[str, float] | None = None, score: float | None = None
    ) -> None:
        """End the session with the runner's result: outcome, reason, metrics, score and rewards.

        `score` is the score of the episode, by default the result's. It is stored in addition to the rewards, and may
        differ from their sum. `rewards`: by interaction id. Without `rewards` each step score is the reward of its
        turn, in order of completion. If there are fewer scores than turns, the last turns have none. If there are more,
        the last turn has the sum of the rest. Without step scores the last turn has the score. The episode becomes
        Failed for a score that is not a finite number, metrics that the server rejects, a status that ROLL does not
        have, and a Finished without a turn. Does nothing if the session has ended.
        """
        if self.outcome is not None:
            return
        about = {"traj_time_total": round(time.monotonic() - self._begun, 4), **result.metrics, "score": result.score}
        try:
            outcome, reason = self._judged(result)
            ending: EndOptions = {"outcome": outcome, "metrics": storable_metrics(about)}
            if reason:
                ending["exit_reason"] = reason
            if outcome == "Timeout":
                ending["finished"] = False
            self._end({**ending, **self._earned(result, rewards, float(result.score if score is None else score))})
        except (InvalidRequest, NotFound) as error:
            logger.warning("session %s: %s", self.session.session_id, error)
            self.fail(error)

    def fail(self, error: BaseException | str, outcome: str = "Failed", within_s: float | None = None) -> None:
        """End the session without rewards; retry for `within_s` seconds (None: the client's default).

        Does nothing if it has ended.
        """
        reason = exit_reason(error) if isinstance(error, BaseException) else error
        if self.outcome is None and outcome != "NoData":
            self._failed(outcome, reason, error if isinstance(error, BaseException) else None)
        self._end({"outcome": outcome, "exit_reason": reason}, within_s)

    def told_in(self, rollout: DataProto) -> DataProto:
        """The rollout of this episode; if the episode has failed, with `failure` in its `meta_info`."""
        if self.failure is not None:
            rollout.meta_info["failure"] = self.failure.as_dict()
        return rollout

    def exported(self, layout: str, **options: Any) -> Export:
        """All samples of the session; `options` are those of `Client.export`."""
        how: ExportOptions = {"layout": layout, "include": ["messages"], **options}  # type: ignore[typeddict-item]
        return self.client.export(session_id=self.session.session_id, **how)

    def turns(self) -> list[str]:
        """The ids of the complete turns of trained routes, in order of completion."""
        self._seen = self._tree()
        return [node.id for node in self._seen.interactions if node.is_step]

    def first_token_at(self) -> dict[str, float]:
        """The time of the first token of each turn, in Unix seconds, by interaction id."""
        tree = self._seen or self._tree()
        times = {node.id: (node.times or {}).get("first_token_at") for node in tree.interactions}
        return {name: at for name, at in times.items() if at is not None}

    def _judged(self, result: EpisodeResult) -> tuple[str, str]:
        """The outcome and the reason, which includes a status that ROLL does not have. Records a failure."""
        reason = str(getattr(result, "agent_exit_reason", "") or "")
        try:
            outcome = status_of(result)
        except InvalidResult as error:
            outcome, reason = "Failed", f"{error}; its agent_exit_reason: {reason}" if reason else str(error)
            self._failed("InvalidResult", reason)
            return outcome, storable(reason)
        if outcome == "Finished" and not self.turns():
            outcome, reason = "Failed", f"{_NO_TURNS}: {reason}" if reason else _NO_TURNS
            self._failed("NoTurns", reason)
        elif outcome not in ("Finished", "NoData"):
            self._failed(outcome, reason, getattr(result, "error", None))
        return outcome, storable(reason)

    def _failed(self, kind: str, reason: str, error: BaseException | None = None) -> None:
        """Record why the episode failed. A failure by an exception has the exception's type."""
        about = self.traj_group_id, self.session.session_id
        told = FailedEpisode(kind, storable(reason) or "the runner gave no agent_exit_reason", *about)
        self.failure = told if error is None else FailedEpisode.by(error, *about)

    def _tree(self) -> SessionTree:
        return self.client.session_tree(self.session.session_id, ["times"])

    def _earned(self, result: EpisodeResult, rewards: Mapping[str, float] | None, score: float) -> EndOptions:
        """The score of the episode and the rewards of its turns; {} without a turn."""
        turns = len(self.turns())
        if not turns:
            return {}
        if rewards is not None:
            return {"score": score, "rewards": rewards}
        scores = [float(each) for each in result.step_scores]
        if not scores:
            return {"score": score, "reward": score}
        if len(scores) != turns:
            logger.warning(
                "session %s: the runner has %d step scores for %d turns; %s",
                *(self.session.session_id, len(scores), turns),
                "the last turns have none" if len(scores) < turns else "the last turn has the sum of the rest",
            )
        return {"score": score, "step_scores": zipped(scores, turns), "align": "first"}

    def _end(self, options: EndOptions, within_s: float | None = None) -> None:
        try:
            self._episode.end(within_s, **options)
        except (EndedOtherwise, SessionNotFound) as error:  # expired, or ended by an operator
            logger.warning("session %s was ended elsewhere: %s", self.session.session_id, error)
            if self.failure is None:
                self._failed("Failed", f"the session was ended elsewhere: {exit_reason(error)}")
            with suppress(ProxyError):  # an expired session still accepts rewards
                self.session.end(**_rewards_of(options))


def _rewards_of(options: EndOptions) -> EndOptions:
    names = ("reward", "rewards", "step_scores", "align")
    return cast(EndOptions, {name: value for name, value in options.items() if name in names})


def address_of(client: Client, api_key: str) -> str:
    """The address, without /v1, of the live session that has the key: one for all episodes of an environment."""
    return f"{client.url}/~{api_key}"


def _now() -> str:
    return datetime.now().strftime("%Y%m%d_%H%M%S_%f")


def zipped(scores: Sequence[float], turns: int) -> list[float]:
    """At most `turns` scores: the rest is added to the last."""
    return list(scores) if len(scores) <= turns else [*scores[: turns - 1], math.fsum(scores[turns - 1 :])]


def terms_of(env_config: Any, worker_config: Any, pipeline_config: Any) -> dict[str, Any]:
    """Returns, sampling and limits of an episode: the tokens of one answer, and of prompt and answer together.

    The steps of an episode are its turns in order, even if their prompts do not continue each other. Therefore returns
    follow this order (credit `linear`), as ROLL's follow the steps of a trajectory.
    """
    sampling = sampling_of(getattr(worker_config, "generating_args", None), env_config.get("max_tokens_per_step"))
    limits = {
        "max_context_tokens": getattr(pipeline_config, "sequence_length", None),
        "max_tokens_per_turn": sampling.get("max_tokens"),
    }
    return {
        "discount": float(getattr(pipeline_config, "step_reward_gamma", 1.0)),
        "credit": "linear",
        "sampling": sampling,
        "limits": {name: most for name, most in limits.items() if most},
    }


def _sampling_seed(client: Client, seed: int, env_id: int) -> dict[str, int]:
    """The seed of sampling in an episode, different for each environment, so that the episodes of a group differ.

    {} for an engine that is not deterministic: it would ignore the seed with a notice, or reject it.
    """
    if _DETERMINISTIC not in client.engine().capabilities:
        return {}
    return {"seed": int.from_bytes(blake2b(f"{seed}\0{env_id}".encode(), digest_size=4).digest())}


def storable_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as JSON. Values that JSON cannot encode become texts, so that no metric fails an episode."""
    return {str(name): _json_value(value) for name, value in metrics.items()}


def _json_value(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    if isinstance(value, str):
        return storable(value)
    try:
        json.dumps(value, allow_nan=False)
    except RecursionError:
        return f"{type(value).__name__} of too many levels"
    except (TypeError, ValueError):
        return storable(str(value))
    return value
