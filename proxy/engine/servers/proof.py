"""The proof that an engine server works: it samples a token and returns its logprob.

A paused server, or a server that has released memory, is not asked: it would hold the request, or crash. Proofs in
progress end before a pause begins.
"""

from __future__ import annotations

import asyncio
import itertools

from proxy.engine.chunks import TokenChunk, check_chunk
from proxy.engine.requests import GenerateRequest
from proxy.engine.servers.remote import RemoteEngine
from proxy.prompt_ids import PromptIds
from proxy.types import SamplingParams, ids_of
from tokengrove.errors import EngineFailed, EngineLost
from tokengrove.reasons import FinishReason

_PROOF_S = 20.0
"""Limit in seconds: the first request to a server may compile kernels."""

_FOLLOWING_S = 2.0
"""Limit in seconds for a server that another process has admitted, and may have paused since."""

_END_S = 2.0
"""Seconds that a proof in progress may continue when a pause begins; then it is cancelled."""

_TOP_K = 64
"""vLLM with `--return-sampling-mask` refuses requests without `top_k`."""

_serials = itertools.count()


async def prove(engine: RemoteEngine, *, follows: bool = False) -> bool:
    """Make a server sample one token; return False if it cannot because it is paused.

    `follows`: another process has admitted the server, so it is paused if it returns no token. Raises the error of a
    server that fails: EngineFailed, EngineUnavailable, EngineLost or InvalidRequest.
    """
    vocab_size, count = engine.info().vocab_size, 0

    def take(chunk: TokenChunk) -> None:
        nonlocal count
        check_chunk(chunk, vocab_size, 1 - count)
        count += len(chunk.ids)

    sampling = SamplingParams(max_tokens=1, ignore_eos=True, top_k=_TOP_K)
    request = GenerateRequest(f"proof-{next(_serials)}", PromptIds(ids_of((0,))), sampling, whole=True)
    try:
        async with asyncio.timeout(_FOLLOWING_S if follows else _PROOF_S):
            finish = await engine.sample(request, take)
    except TimeoutError:
        if follows or await engine.rests():
            return False
        raise EngineLost(f"{engine.url} gave no token within {_PROOF_S:g} s") from None
    if finish is FinishReason.ABORT:
        return False
    if not count:
        raise EngineFailed(f"{engine.url} was asked for a token and gave none")
    return True


class Proofs:
    """The proofs in progress."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[bool]] = set()

    async def prove(self, engine: RemoteEngine, *, follows: bool = False) -> bool:
        """Like the function `prove`. Also return False if `end` cancelled the proof."""
        proof = asyncio.create_task(prove(engine, follows=follows))
        self._running.add(proof)
        proof.add_done_callback(self._running.discard)
        try:
            await asyncio.wait({proof})
        finally:
            proof.cancel()
        return not proof.cancelled() and proof.result()

    async def end(self) -> None:
        """Wait until no proof is in progress. The caller must ensure that none begins."""
        if not self._running:
            return
        _, slow = await asyncio.wait(self._running, timeout=_END_S)
        for proof in slow:
            proof.cancel()
        if slow:
            await asyncio.wait(slow)
