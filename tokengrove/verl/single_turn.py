"""A loop of one prompt and one answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from tokengrove.verl.loop_base import AgentLoopBase
from tokengrove.verl.outputs import AgentLoopOutput
from tokengrove.verl.registry import register
from tokengrove.verl.tracing import rollout_trace_op, simple_timer


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """Samples one answer to the messages. `stop_reason` of the output is `stop`, `length`, `abort` or
    `content_filter`, or `response_length` if the answer was longer and has been cut.
    """

    @rollout_trace_op
    async def run(self, messages: Any = None, sampling_params: Any = None, **kwargs: Any) -> AgentLoopOutput:
        """Run one sample: `run(messages, sampling_params)`, or `run(sampling_params, raw_prompt=messages)`."""
        if isinstance(messages, Mapping):
            messages, sampling_params = None, messages
        asked = kwargs["raw_prompt"] if messages is None else messages
        media = await self.process_multi_modal_info(asked)
        prompt_ids = await self.build_prompt(asked)
        metrics: dict[str, Any] = {}
        with simple_timer("generate_sequences", metrics):
            output = await self.server_manager.generate(
                request_id=uuid4().hex,
                prompt_ids=prompt_ids,
                sampling_params=dict(sampling_params or {}),
                **self.media_options(media.get("images")),
            )
        length: int = self.rollout_config.response_length
        logprobs = output.log_probs
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output[:length],
            response_mask=[1] * min(len(output), length),
            response_logprobs=None if logprobs is None else logprobs[:length],
            num_turns=2,
            metrics=metrics,
            multi_modal_data=media or None,
            routed_experts=output.routed_experts,
            extra_fields={**output.extra_fields, "turn_scores": [], "tool_rewards": []},
            stop_reason="response_length" if len(output) > length else output.finish_reason,
        )
