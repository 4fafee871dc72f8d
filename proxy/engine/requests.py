"""What may go to an engine at all, and what is left of a request that was cut short."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from proxy.engine.grammar import Grammar
from proxy.errors import ContextLengthExceeded, InvalidRequest
from proxy.types import Ids, SamplingParams, TurnRequest


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Token in, token out. `input_ids` were checked against the vocabulary; `sampling.max_tokens` is set and positive.

    Sampling ends after any of `stop_token_ids` (it is part of the output). `turn` rides along for engines that answer
    from messages (mailbox, scripted); `turn_number` counts the turns of its session from 0. `whole`: nobody reads
    tokens before the last one, so they may come at once; where there is a `turn`, that says it.
    """

    request_id: str
    input_ids: Ids
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    top_logprobs: int = 0
    session_id: str = ""
    turn: TurnRequest | None = None
    turn_number: int = 0
    whole: bool = False

    @property
    def streamed(self) -> bool:
        """Whether somebody reads tokens as they come."""
        return not self.whole if self.turn is None else self.turn.stream


def check_request(request: GenerateRequest, vocab_size: int, context_length: int) -> None:
    """Refuse by name what would fail, or take the engine down, once it is in the batch.

    Raises InvalidRequest, or ContextLengthExceeded when prompt plus `max_tokens` is more than `context_length`.
    """
    sampling, prompt = request.sampling, request.input_ids
    if not prompt or np.frombuffer(prompt, np.uint32).max() >= vocab_size:  # a negative id is a large one
        raise InvalidRequest(f"input ids must be between 0 and {vocab_size - 1}, and at least one", param="input_ids")
    if sampling.max_tokens is None or sampling.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
    if len(prompt) + sampling.max_tokens > context_length:
        raise ContextLengthExceeded(
            prompt_tokens=len(prompt), context_tokens=context_length, max_tokens=sampling.max_tokens
        )
    if any(not 0 <= token < vocab_size for token, _ in sampling.logit_bias):
        raise InvalidRequest("logit_bias names a token outside of the vocabulary", param="logit_bias")
    if not sampling.temperature >= 0.0:
        raise InvalidRequest("temperature must not be negative", param="temperature")
    if not sampling.repetition_penalty > 0.0:
        raise InvalidRequest("repetition_penalty must be positive", param="repetition_penalty")


def rest_of(request: GenerateRequest, output: Ids) -> GenerateRequest:
    """What is still to be sampled after `output`: prompt plus tokens so far, and the rest of the budget."""
    if not output:
        return request
    most = request.sampling.max_tokens
    sampling = replace(request.sampling, max_tokens=None if most is None else most - len(output))
    return replace(request, input_ids=request.input_ids + output, sampling=sampling)
