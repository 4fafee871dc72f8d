"""The tokens that the engine sampled in one turn, with the names of AReaL's `ModelResponse`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class ModelResponse:
    """The exact tokens of one turn.

    `output_logprobs` (natural logarithms) and `output_versions` (weight versions) have one entry for each of
    `output_tokens`. `stop_reason` is length, stop, tool_calls or abort. `latency` and `ttft` are the seconds from the
    request to the complete answer and to its first token; infinity if unknown. `tokenizer` is None unless the caller
    sets it. `input_images` are the images of the prompt, in base64 and otherwise unchanged. The server stores no times
    between tokens, so `itl` is empty. `routed_experts` int32 [tokens - 1, layers * k] are the experts of all tokens of
    prompt and output but the last, as in AReaL (`areal/engine/sglang_remote.py`, 4aef98d); None if the session
    recorded none. `logprobs_of` is the distribution that `output_logprobs` are of, as in `tokengrove.client.Sample`.
    """

    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_versions: list[int] = field(default_factory=list)
    stop_reason: str = "stop"
    tokenizer: Any = None
    input_images: list[Any] = field(default_factory=list)
    processor: Any = None
    latency: float = float("inf")
    ttft: float = float("inf")
    itl: list[float] = field(default_factory=list)
    routed_experts: Any = None
    logprobs_of: str = "rule"

    @property
    def input_len(self) -> int:
        """The number of tokens of the prompt."""
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        """The number of sampled tokens."""
        return len(self.output_tokens)

    @property
    def end_with_stop(self) -> bool:
        """Whether the last sampled token is the tokenizer's end or padding. Raises ValueError without a tokenizer."""
        return bool(self.output_tokens) and self.output_tokens[-1] in self._stops()

    @property
    def output_tokens_without_stop(self) -> list[int]:
        """The sampled tokens without trailing end tokens, if the model ended the turn.

        A turn that ended at a stop string has no end tokens. Raises ValueError without a tokenizer.
        """
        stops, end = self._stops(), self.output_len
        if self.stop_reason in ("length", "abort"):
            return self.output_tokens
        while end and self.output_tokens[end - 1] in stops:
            end -= 1
        return self.output_tokens[:end]

    def _stops(self) -> set[int]:
        if self.tokenizer is None:
            raise ValueError("'tokenizer' is None, but its end and padding tokens are needed: set it first")
        return {self.tokenizer.eos_token_id, self.tokenizer.pad_token_id} - {None}
