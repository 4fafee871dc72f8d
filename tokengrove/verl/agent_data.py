"""The state of one run of a tool loop, with verl's names. Tools receive it, and subclasses of the loop change it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from tokengrove.reasons import LogprobsOf
from tokengrove.verl.tool_parsers import FunctionCall


class AgentState(Enum):
    """The next step of the loop."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    TERMINATED = "terminated"


class AgentData:
    """The mutable state of a run. Tools may store any value in `extra_fields`, which become those of the output.

    `prompt_ids`: all ids so far. `response_ids`: the ids of the last answer. `response_mask`: 1 for sampled ids, 0 for
    ids of tool messages, starting after the first prompt. `response_logprobs`: as long as the mask; None after an
    answer without logprobs. `tool_rewards`: the rewards of all calls, in order. `turn_rewards`: the sums of the calls'
    rewards, by the id of the turn that made the calls. `tool_errors`: the reasons of failed calls. `reward_scores`: the
    last `calc_reward` of each tool. `stop_reason`: why the run ended.
    `routed_experts`: those of the last answer that has them, for all ids up to it.
    """

    def __init__(
        self,
        messages: list[dict[str, Any]],
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        metrics: dict[str, Any] | None = None,
        request_id: str = "",
        tools_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.messages = messages
        self.image_data, self.video_data, self.audio_data = image_data, video_data, audio_data
        self.mm_processor_kwargs = mm_processor_kwargs or {}
        self.metrics: dict[str, Any] = {} if metrics is None else metrics
        self.request_id = request_id
        self.tools_kwargs: Mapping[str, Any] = tools_kwargs or {}
        self.tools: dict[str, Any] = {}
        self.prompt_ids: list[int] = []
        self.response_ids: list[int] = []
        self.response_mask: list[int] = []
        self.response_logprobs: list[float] | None = []
        self.turn_scores: list[float] = []
        self.tool_rewards: list[float] = []
        self.turn_rewards: dict[str, float] = {}
        self.tool_errors: list[str] = []
        self.reward_scores: dict[str, float] = {}
        self.user_turns = 0
        self.assistant_turns = 0
        self.interaction_id: str | None = None
        self.tool_calls: list[FunctionCall] = []
        self.routed_experts: Any = None
        self.stop_reason: str | None = None
        self.extra_fields: dict[str, Any] = {}

    def stopped(self, reason: str) -> AgentState:
        """Record why the run ends, and return the final state."""
        self.stop_reason = reason
        return AgentState.TERMINATED

    def call_id(self, index: int) -> str:
        """An id for a call of the last answer that has no id."""
        return f"call_{self.assistant_turns}_{index}"

    def add_answer(self, output: Any) -> None:
        """Append sampled ids. `output`: a TokenOutput or a list of ids."""
        self.response_ids = list(getattr(output, "token_ids", output))
        logprobs = getattr(output, "log_probs", None)
        self.interaction_id = getattr(output, "interaction_id", None)
        self.assistant_turns += 1
        self.prompt_ids = [*self.prompt_ids, *self.response_ids]
        self.response_mask += [1] * len(self.response_ids)
        if logprobs is None and self.response_ids:
            self.response_logprobs = None
        elif self.response_logprobs is not None:
            self.response_logprobs += logprobs or []
        self._add_fields(getattr(output, "extra_fields", {}))
        if (experts := getattr(output, "routed_experts", None)) is not None:
            self.routed_experts = experts
        preempted = getattr(output, "num_preempted", None)
        self.metrics["num_preempted"] = _added(self.metrics.get("num_preempted", -1), preempted)

    def add_context(self, prompt_ids: list[int]) -> None:
        """Replace the ids by `prompt_ids`, which must begin with the old ones; the new ids are context, with mask 0."""
        new = len(prompt_ids) - len(self.prompt_ids)
        self.prompt_ids = prompt_ids
        self.response_mask += [0] * new
        if self.response_logprobs is not None:
            self.response_logprobs += [0.0] * new

    def add_result(self, name: str, reward: float | None, metrics: Mapping[str, Any]) -> None:
        """Record the call of a tool: its reward, and its metrics as `tool/NAME/METRIC`, where numbers are summed."""
        for metric, value in {"calls": 1, **metrics}.items():
            key = f"tool/{name}/{metric}"
            before = self.metrics.get(key)
            is_sum = isinstance(before, int | float) and isinstance(value, int | float)
            self.metrics[key] = before + value if is_sum else value
        if reward is None:
            return
        self.tool_rewards.append(reward)
        if self.interaction_id is not None:
            self.turn_rewards[self.interaction_id] = self.turn_rewards.get(self.interaction_id, 0.0) + reward

    def _add_fields(self, fields: Mapping[str, Any]) -> None:
        """Keep the fields of the first answer, with the newest weight version and the sum of the cached tokens.

        `logprobs_of` is that of the answer which is furthest from the rule.
        """
        cached = self.extra_fields.get("num_cached_tokens", 0)
        if self.assistant_turns == 1:
            self.extra_fields.update(fields)
        if fields.get("num_cached_tokens") is not None:
            self.extra_fields["num_cached_tokens"] = cached + fields["num_cached_tokens"]
        if (of := fields.get("logprobs_of")) is not None:
            before = self.extra_fields.get("logprobs_of", of)
            self.extra_fields["logprobs_of"] = LogprobsOf.furthest((LogprobsOf(before), LogprobsOf(of))).value
        for name in ("global_steps", "max_global_steps"):
            if fields.get(name) is not None:
                self.extra_fields[name] = fields[name]


def _added(total: int, more: int | None) -> int:
    """The number of preemptions; -1 until an answer reports a number."""
    return total if more is None else max(total, 0) + more
