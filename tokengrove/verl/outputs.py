"""Results of the model and of agent loops, with verl's names.

An `AgentLoopOutput` is checked on creation: the response, its mask and its logprobs must have the same length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import index
from typing import Any

from tokengrove.errors import InvalidRequest


class TokenOutput(list[int]):
    """The sampled token ids of one call: a list with the attributes of verl's TokenOutput.

    `log_probs`: one for each id; None if they were not requested or are unknown. `stop_reason`: `completed`,
    `aborted` or `content_filter`. `finish_reason`: `stop`, `length`, `abort` or `content_filter`. `versions`: the
    weight version of each id. `extra_fields`: the weight versions as `global_steps`, `min_global_steps` and
    `max_global_steps`, None if nothing was sampled, `num_cached_tokens`, and the distribution that `log_probs` are of,
    as `logprobs_of`. `interaction_id`: the id of the recorded
    turn, or of the call outside sessions. `num_preempted` is None: no engine here reports it. `routed_experts` is None
    unless a server manager of one's own sets it: the experts of a session are read once, at its end, for its
    AgentLoopOutput.
    """

    def __init__(
        self,
        token_ids: Iterable[int] = (),
        log_probs: list[float] | None = None,
        *,
        finish_reason: str | None = None,
        versions: Sequence[int] = (),
        interaction_id: str | None = None,
        extra_fields: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(token_ids)
        self.log_probs = log_probs
        self.finish_reason = finish_reason
        self.versions = list(versions)
        self.interaction_id = interaction_id
        self.num_preempted: int | None = None
        self.routed_experts: Any = None
        newest, oldest = max(self.versions, default=None), min(self.versions, default=None)
        self.extra_fields: dict[str, Any] = {
            "global_steps": newest,
            "min_global_steps": oldest,
            "max_global_steps": newest,
            **(extra_fields or {}),
        }

    @property
    def token_ids(self) -> list[int]:
        """The ids as a plain list."""
        return list(self)

    @property
    def stop_reason(self) -> str | None:
        """verl's stop reason: `aborted`, or `completed` for `stop` and `length`; others are unchanged."""
        return {"abort": "aborted", "stop": "completed", "length": "completed"}.get(
            self.finish_reason or "", self.finish_reason
        )


@dataclass(slots=True)
class AgentLoopMetrics:
    """Seconds that a loop spent in each phase, and the number of preemptions of its requests (-1: unknown).

    `more`: metrics that the loop added.
    """

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1
    more: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, metrics: Any) -> AgentLoopMetrics:
        """Read metrics from a mapping or an object with `model_dump`."""
        if isinstance(metrics, AgentLoopMetrics):
            return metrics
        dump = getattr(metrics, "model_dump", None)
        given = dict(dump() if callable(dump) else metrics) if metrics is not None else {}
        known = {name: given.pop(name) for name in _TIMED if given.get(name) is not None}
        return cls(**known, more={name: value for name, value in given.items() if name not in _TIMED})

    def model_dump(self) -> dict[str, Any]:
        """All metrics as one dict."""
        return {**{name: getattr(self, name) for name in _TIMED}, **self.more}


_TIMED = tuple(each.name for each in fields(AgentLoopMetrics) if each.name != "more")


@dataclass(slots=True)
class AgentLoopOutput:
    """One trajectory: the ids of the prompt, and the ids of everything after it.

    `response_mask` is 1 for sampled ids and 0 for ids of tool results and other turns. `response_logprobs` (or
    `logprobs`) has one value for each id of the response, 0 where the mask is 0. `num_turns` counts the messages of all
    roles. `metrics`: a dict, which becomes AgentLoopMetrics. `reward_score` becomes the reward of the session's last
    turn; `named_rewards` are other rewards, by name and by the id of the turn. `stop_reason`: why the loop ended.
    `multi_modal_data`: the images of the trajectory in order, as `images`. `routed_experts`: the experts of all ids,
    [tokens, layers, k]; rows after the last but one sampled id may be left out. The runner of the loop sets
    `session_id`, for a trajectory with images `sample`, the recorded sample of the session, and with verl's
    `enable_rollout_routing_replay` the experts that the session recorded, unless the loop has set them.

    Raises InvalidRequest if the lengths differ, the mask has other values, or a logprob or the reward is not finite.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: Any = field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] | None = None
    mm_processor_output: list[dict[str, Any]] | None = None
    stop_reason: str | None = None
    named_rewards: dict[str, dict[str, float]] = field(default_factory=dict)
    session_id: str | None = None
    logprobs: Any = None
    sample: Any = None

    def __post_init__(self) -> None:
        if self.logprobs is not None:
            if self.response_logprobs is not None:
                raise InvalidRequest("give 'logprobs' or 'response_logprobs', not both", param="logprobs")
            self.response_logprobs = self.logprobs
        self.metrics = AgentLoopMetrics.of(self.metrics)
        self.check()

    def check(self) -> None:
        """Convert the ids, the mask and the logprobs to plain lists. Raises InvalidRequest if they are inconsistent."""
        self.prompt_ids = _ids(self.prompt_ids, "prompt_ids")
        self.response_ids = _ids(self.response_ids, "response_ids")
        self.response_mask = _ids(self.response_mask, "response_mask")
        length = len(self.response_ids)
        _same_length("response_mask", len(self.response_mask), length)
        if not {0, 1}.issuperset(self.response_mask):
            raise InvalidRequest("'response_mask' has values other than 0 and 1", param="response_mask")
        if self.response_logprobs is not None:
            self.response_logprobs = [float(each) for each in self.response_logprobs]
            _same_length("response_logprobs", len(self.response_logprobs), length)
            if not all(map(math.isfinite, self.response_logprobs)):
                raise InvalidRequest("'response_logprobs' has a value that is not finite", param="response_logprobs")
        if self.reward_score is not None and not math.isfinite(self.reward_score):
            raise InvalidRequest(f"'reward_score' is {self.reward_score}, which is not finite", param="reward_score")
        self.logprobs = self.response_logprobs


def _ids(values: Any, name: str) -> list[int]:
    """Plain integers from a list, an array or a tensor."""
    try:
        return [int(index(each)) for each in (values.tolist() if hasattr(values, "tolist") else values)]
    except TypeError:
        raise InvalidRequest(f"'{name}' must be a list of integers", param=name) from None


def _same_length(name: str, length: int, expected: int) -> None:
    if length != expected:
        message = f"'{name}' has {length} values, but 'response_ids' has {expected} token ids: cut both alike"
        raise InvalidRequest(message, param=name)
