"""Requests to an engine, the check of their limits, and the rest of an interrupted request."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from proxy.engine.grammar import Grammar
from proxy.images.prompt_images import PromptImages
from proxy.prompt_ids import PromptIds
from proxy.side_columns.columns import ColumnRequest
from proxy.telemetry.timeline import Timeline
from proxy.types import Ids, SamplingParams, TurnRequest
from tokengrove.errors import ContextLengthExceeded, InvalidRequest


class Failure(NamedTuple):
    """A failure of a request on an engine server. `why`: the reason. `at`: the time, in seconds of the monotonic clock.

    `lost`: the server was lost, or it lost the request. `counts`: it may be the server's fault.
    """

    url: str
    why: str
    at: float
    lost: bool
    counts: bool


@dataclass(slots=True)
class GenerateRequest:
    """A prompt of token ids to continue. `check_request` checks the limits of its fields.

    `stop_token_ids`: sampling ends after any of them (unless `ignore_eos` is set), and the output includes it; none is
    sampled before `min_tokens` other tokens. They include the stop tokens of `sampling`. `session_id`: "" if none;
    requests of one session prefer the server that has their prefix cached. `group_id`: "" if none; sessions of one
    group prefer a server that has the prompt that they share. `turn`: the client's request, for engines
    that answer from messages (mailbox, scripted). `turn_number`: the position of the turn in its session, from 0.
    `whole`: the caller reads the output only when it is complete; ignored if `turn` is set, since its `stream` then
    decides. `failures`: earlier failures on engine servers, recorded by the pool for the resubmission of the rest.
    `timeline`: the time of admission, and events in the engine. `images`: the images of the prompt, which already has
    their placeholder tokens as the model's own processor writes them; None without images. `columns`: the side columns
    to record; None: none. `adapter`: the version of the LoRA adapter that samples; None: the base model.
    `adapter_name`: its name on engine servers, which the pool sets. `scored_from`: the position of the first prompt
    token whose logprob is wanted, at least 1; `top_logprobs` then also counts alternatives of prompt tokens. None: no
    logprobs of the prompt.
    """

    request_id: str
    prompt: PromptIds
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    top_logprobs: int = 0
    session_id: str = ""
    group_id: str = ""
    turn: TurnRequest | None = None
    turn_number: int = 0
    whole: bool = False
    failures: list[Failure] = field(default_factory=list)
    timeline: Timeline = field(default_factory=Timeline, compare=False, repr=False)
    images: PromptImages | None = None
    columns: ColumnRequest | None = None
    adapter: int | None = None
    adapter_name: str = ""
    scored_from: int | None = None

    @property
    def input_ids(self) -> Ids:
        """The ids of the whole prompt in one array, which the engine must not change."""
        return self.prompt.joined

    def trace_headers(self) -> dict[str, str]:
        """The headers with which an engine server continues the trace of the turn; empty without a trace."""
        trace = self.timeline.trace
        return {} if trace is None else trace.headers(self.request_id)

    @property
    def streamed(self) -> bool:
        """True if the caller reads tokens as they are sampled."""
        return not self.whole if self.turn is None else self.turn.stream


def check_request(request: GenerateRequest, vocab_size: int, context_length: int) -> None:
    """Check a request that would otherwise fail in the batch or crash the engine.

    `vocab_size` bounds token ids; `context_length` bounds prompt plus `max_tokens`, in tokens. Raises InvalidRequest
    naming the field, or ContextLengthExceeded.
    """
    sampling, prompt = request.sampling, request.prompt
    if not 0 <= prompt.largest < vocab_size:
        raise InvalidRequest(
            f"input_ids must hold at least one id, each between 0 and {vocab_size - 1}", param="input_ids"
        )
    if sampling.max_tokens is None or sampling.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
    if prompt.length + sampling.max_tokens > context_length:
        raise ContextLengthExceeded(
            prompt_tokens=prompt.length, context_tokens=context_length, max_tokens=sampling.max_tokens
        )
    if sampling.logit_bias and not all(0 <= token < vocab_size for token, _ in sampling.logit_bias):
        raise InvalidRequest(
            f"logit_bias has a token id outside of the vocabulary (0 to {vocab_size - 1})", param="logit_bias"
        )
    if not sampling.temperature >= 0.0:
        raise InvalidRequest("temperature must not be negative", param="temperature")
    if not sampling.repetition_penalty > 0.0:
        raise InvalidRequest("repetition_penalty must be positive", param="repetition_penalty")


def rest_of(request: GenerateRequest, output: Ids, held: int = 0) -> GenerateRequest:
    """Return the rest of an interrupted request: `output` is appended to the prompt and reduces the token limits.

    `held`: the position after the last token whose experts are known.
    """
    if request.columns is not None and held > request.columns.start:
        request = replace(request, columns=replace(request.columns, start=held))
    if not output:
        return request
    most, least = request.sampling.max_tokens, request.sampling.min_tokens
    sampling = request.sampling._replace(
        max_tokens=None if most is None else most - len(output), min_tokens=max(least - len(output), 0)
    )
    prompt = request.prompt.extended(output[:])  # a copy: the output may still grow
    return replace(request, prompt=prompt, sampling=sampling)
