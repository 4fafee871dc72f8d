"""One generation outside all sessions: token ids in, sampled tokens out, nothing recorded.

Every sampled token has a logprob and a weight version, or the call fails.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace

from proxy.engine.chunks import TokenChunk
from proxy.engine.gate import Gate
from proxy.engine.requests import GenerateRequest
from proxy.engine.versions import corrected, with_run
from proxy.turns.budgets import with_most
from proxy.types import Ids, Logprobs, VersionRuns, ids_of
from tokengrove.errors import ContextLengthExceeded, EngineFailed
from tokengrove.reasons import FinishReason, LogprobsOf


@dataclass(slots=True)
class Generation:
    """The output so far. `versions`: runs of (token count, weight version). `sampled` False: there are no logprobs.

    `logprobs_of`: of its chunks, the one furthest from the rule.
    """

    ids: Ids = field(default_factory=ids_of)
    logprobs: Logprobs = field(default_factory=lambda: Logprobs("f"))
    versions: VersionRuns = ()
    finish: FinishReason | None = None
    cached_tokens: int | None = None
    sampled: bool = True
    logprobs_of: LogprobsOf = LogprobsOf.RULE

    def take(self, chunk: TokenChunk) -> None:
        """Add a chunk. Raises EngineFailed for a chunk of text, which needs a session."""
        if chunk.text is not None:
            raise EngineFailed("the answer came as text; without a session it must be token ids ('output_ids')")
        self.ids += chunk.ids
        self.logprobs += chunk.logprobs
        self.sampled = self.sampled and chunk.sampled
        if chunk.logprobs_of is not LogprobsOf.RULE:
            self.logprobs_of = LogprobsOf.furthest((self.logprobs_of, chunk.logprobs_of))
        if chunk.cached_tokens is not None:
            self.cached_tokens = chunk.cached_tokens
        self.versions = with_run(corrected(self.versions, chunk.corrected), len(chunk.ids), chunk.version)


async def sample(gate: Gate, request: GenerateRequest, context_tokens: int | None = None) -> Generation:
    """Sample a complete output, within the engine's context length and `context_tokens` (prompt plus output).

    Raises ContextLengthExceeded and the errors of `Gate.sample`.
    """
    most = min(gate.info().context_length, context_tokens or sys.maxsize)
    room = most - len(request.prompt)
    if room < 1:
        raise ContextLengthExceeded(prompt_tokens=len(request.prompt), context_tokens=most)
    asked = request.sampling.max_tokens
    sampling = with_most(request.sampling, room if asked is None else min(asked, room))
    generation = Generation()
    generation.finish = await gate.sample(replace(request, sampling=sampling), generation.take)
    return generation
