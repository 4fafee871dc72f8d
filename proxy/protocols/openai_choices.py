"""The parts that replies of the chat API and the completions API share: finish reasons and the usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.protocols.wire_protocol import Answer, usage_of
from proxy.types import Interaction
from tokengrove.reasons import FinishReason

FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
    FinishReason.CONTENT_FILTER: "content_filter",
    FinishReason.ABORT: "stop",
}


def finish_reason(interaction: Interaction) -> str:
    """Return why a choice ended."""
    assert interaction.finish_reason is not None
    return FINISH_REASONS[interaction.finish_reason]


def usage_json(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the usage. The prompt counts once, for any number of choices."""
    first = usage_of(answers[0].interaction)
    prompt, cached = first.prompt_tokens, first.cached_tokens
    completion, reasoning = first.completion_tokens, first.reasoning_tokens
    for answer in answers[1:]:
        usage = usage_of(answer.interaction)
        completion += usage.completion_tokens
        reasoning += usage.reasoning_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
