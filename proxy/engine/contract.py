"""The test suite that every engine must pass. To run it: `for check in CHECKS: await check(engine, prompt_ids)`.

A check takes a started engine and a valid prompt, leaves the state of the engine unchanged, and raises AssertionError
naming the first violation. Checks of capabilities that the engine lacks (`info().capabilities`) do nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from proxy.engine.chunks import TokenChunk
from proxy.engine.grammar import Grammar, GrammarPart
from proxy.engine.interface import AdapterEngine, AdapterSource, Capability, Engine, EngineInfo, PauseMode
from proxy.engine.requests import GenerateRequest
from proxy.images.prompt_images import PromptImages
from proxy.prompt_ids import PromptIds
from proxy.types import Ids, SamplingParams, ids_of
from tokengrove.errors import EngineUnavailable, InvalidRequest
from tokengrove.reasons import FinishReason

ContractCheck = Callable[[Engine, Ids], Awaitable[None]]

TIMEOUT_S = 120.0
"""The limit in seconds for each of these small requests; an engine that takes longer is considered hung."""

_LONG = 1000
_UNKNOWN_VERSION = 987_654_321
_ROUNDED = 0.25
"""How far logprobs of one token may be apart if two passes in bfloat16 computed them."""
_SUMS = """
root ::= sum | "(" sum ")"
sum ::= digit
    | digit " + " digit
digit ::= [1-3]
"""
_serials = itertools.count()


@dataclass(slots=True)
class CollectedReply:
    """The joined chunks of one request: per-token lists, and the number of `chunks`."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    finish: FinishReason | None = None
    chunks: int = 0

    def add(self, chunk: TokenChunk) -> None:
        """Append a chunk. Raises AssertionError if it breaks an invariant of chunks."""
        assert self.finish is None, "a chunk came after the one with a finish reason"
        assert len(chunk.ids) == len(chunk.logprobs), "a chunk must have one logprob per id"
        assert chunk.ids or chunk.finish or chunk.corrected or chunk.unsure, (
            "a chunk without tokens must be the last, or correct versions or how many are uncertain"
        )
        if chunk.corrected:
            versions = [version for count, version in chunk.corrected for _ in range(count)]
            assert len(versions) <= len(self.versions), (
                "a chunk corrects the versions of more tokens than came before it"
            )
            self.versions[-len(versions) :] = versions
        self.ids.extend(chunk.ids)
        self.logprobs.extend(chunk.logprobs)
        self.versions.extend([chunk.version] * len(chunk.ids))
        self.top_logprobs.extend(chunk.top_logprobs)
        self.finish = chunk.finish
        self.chunks += 1


async def complete(engine: Engine, request: GenerateRequest) -> CollectedReply:
    """Generate the whole reply to `request`. Raises AssertionError if a chunk breaks an invariant."""
    reply = CollectedReply()
    async with asyncio.timeout(TIMEOUT_S):
        async for chunk in engine.generate(request):
            reply.add(chunk)
    assert reply.finish is not None, "the last chunk must have a finish reason"
    return reply


def request_for(prompt_ids: Ids, max_tokens: int, temperature: float = 1.0, seed: int | None = None) -> GenerateRequest:
    """A request with a new id and no stop tokens, so that it ends at `max_tokens`."""
    sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    return GenerateRequest(f"contract-{next(_serials)}", PromptIds(prompt_ids), sampling)


async def check_info_is_sane(engine: Engine, prompt_ids: Ids) -> None:
    """`info()` has names, and limits above the prompt."""
    info = engine.info()
    assert isinstance(info, EngineInfo), "info() must return an EngineInfo"
    assert info.name and info.model, "info() must name the engine and its model"
    assert info.vocab_size > max(prompt_ids), "info().vocab_size must be above every prompt id"
    assert info.context_length > len(prompt_ids), "info().context_length must be above the length of the prompt"
    assert info.weight_version >= 0, "info().weight_version must be at least 0"


async def check_chunks_keep_the_invariants(engine: Engine, prompt_ids: Ids) -> None:
    """Chunks keep the invariants of `CollectedReply.add`, and sampled ids are in the vocabulary."""
    reply = await complete(engine, request_for(prompt_ids, 8))
    assert reply.ids, "a request must sample tokens"
    assert all(0 <= token < engine.info().vocab_size for token in reply.ids), "sampled ids must be in the vocabulary"


async def check_max_tokens_is_exact(engine: Engine, prompt_ids: Ids) -> None:
    """Without a stop token, the output has exactly `max_tokens` tokens and finishes with length."""
    for max_tokens in (1, 2, 17):
        reply = await complete(engine, request_for(prompt_ids, max_tokens))
        assert len(reply.ids) == max_tokens, f"max_tokens {max_tokens} gave {len(reply.ids)} tokens"
        assert reply.finish is FinishReason.LENGTH, (
            f"an output of max_tokens must finish with length, not {reply.finish}"
        )


async def check_a_stop_token_ends_and_is_included(engine: Engine, prompt_ids: Ids) -> None:
    """The first stop token ends the output, is its last token, and finishes it with stop."""
    free = await complete(engine, request_for(prompt_ids, 16, temperature=0.0))
    stop = free.ids[len(free.ids) // 2]
    expected = free.ids[: free.ids.index(stop) + 1]
    request = replace(request_for(prompt_ids, 16, temperature=0.0), stop_token_ids=(stop,))
    reply = await complete(engine, request)
    assert reply.ids == expected, "the output must end with the first stop token, and include it"
    assert reply.finish is FinishReason.STOP, (
        f"an output that a stop token ends must finish with stop, not {reply.finish}"
    )


async def check_ignore_eos_passes_stop_tokens(engine: Engine, prompt_ids: Ids) -> None:
    """With `ignore_eos`, stop tokens do not end the output."""
    request = request_for(prompt_ids, 12, temperature=0.0)
    first = (await complete(engine, request)).ids[0]
    sampling = request.sampling._replace(ignore_eos=True)
    ignoring = replace(request_for(prompt_ids, 12), sampling=sampling, stop_token_ids=(first,))
    reply = await complete(engine, ignoring)
    assert len(reply.ids) == 12, "with ignore_eos, no stop token may end the output"


async def check_min_tokens_come_before_a_stop_token(engine: Engine, prompt_ids: Ids) -> None:
    """No stop token is among the first `min_tokens` tokens, and their logprobs are finite."""
    if Capability.MIN_TOKENS not in engine.info().capabilities:
        return
    free = await complete(engine, request_for(prompt_ids, 16, temperature=0.0))
    request = request_for(prompt_ids, 16, temperature=0.0)
    sampling = request.sampling._replace(min_tokens=7)
    reply = await complete(engine, replace(request, sampling=sampling, stop_token_ids=(free.ids[0], free.ids[3])))
    ends = [at for at, token in enumerate(reply.ids) if token in (free.ids[0], free.ids[3])]
    assert len(reply.ids) >= 7 and not [at for at in ends if at < 7], "min_tokens must keep stop tokens back"
    assert all(math.isfinite(value) and value <= 0.0 for value in reply.logprobs), "logprobs must be finite"


async def check_temperature_zero_is_deterministic(engine: Engine, prompt_ids: Ids) -> None:
    """At temperature 0, two requests sample the same tokens."""
    first = await complete(engine, request_for(prompt_ids, 12, temperature=0.0))
    second = await complete(engine, request_for(prompt_ids, 12, temperature=0.0))
    assert first.ids == second.ids, "temperature 0 must sample the same tokens twice"


async def check_a_seed_is_deterministic(engine: Engine, prompt_ids: Ids) -> None:
    """Equal seeds sample equal tokens, and different seeds sample different tokens."""
    if not {Capability.SEED, Capability.DETERMINISTIC} <= engine.info().capabilities:
        return
    replies = [await complete(engine, request_for(prompt_ids, 12, seed=seed)) for seed in (7, 7, 8)]
    assert replies[0].ids == replies[1].ids, "one seed must sample the same tokens twice"
    assert replies[0].ids != replies[2].ids, "another seed must sample other tokens"


async def check_logprobs_are_finite_and_not_positive(engine: Engine, prompt_ids: Ids) -> None:
    """Logprobs are finite and at most 0, at any temperature."""
    for temperature in (0.0, 0.7, 1.0):
        reply = await complete(engine, request_for(prompt_ids, 12, temperature=temperature))
        assert not any(map(math.isnan, reply.logprobs)), "a logprob is NaN"
        assert all(math.isfinite(value) and value <= 0.0 for value in reply.logprobs), (
            "logprobs must be finite and at most 0"
        )


async def check_top_logprobs_hold_the_best(engine: Engine, prompt_ids: Ids) -> None:
    """`top_logprobs` are ordered, and include the sampled token at temperature 0."""
    if Capability.TOP_LOGPROBS not in engine.info().capabilities:
        return
    request = replace(request_for(prompt_ids, 6, temperature=0.0), top_logprobs=3)
    reply = await complete(engine, request)
    assert len(reply.top_logprobs) == len(reply.ids), "top_logprobs must have one tuple per token"
    for token, logprob, top in zip(reply.ids, reply.logprobs, reply.top_logprobs, strict=True):
        values = [value for _, value in top]
        assert len(top) == 3 and values == sorted(values, reverse=True), (
            "top_logprobs must have three entries per token, highest first"
        )
        of_token = dict(top).get(token, -math.inf)
        assert math.isclose(of_token, logprob, abs_tol=1e-4), (
            "at temperature 0 the sampled token must be in top_logprobs, with its logprob"
        )


async def check_tokens_stream(engine: Engine, prompt_ids: Ids) -> None:
    """At least one of ten longer outputs comes in several chunks. Tokens that wait for a busy reader may be joined."""
    if Capability.STREAMING not in engine.info().capabilities:
        return
    for _ in range(10):
        if (await complete(engine, request_for(prompt_ids, 32))).chunks > 1:
            return
    raise AssertionError("32 tokens must come in more than one chunk")


async def check_versions_are_present(engine: Engine, prompt_ids: Ids) -> None:
    """Tokens carry the weight version of `info()`."""
    reply = await complete(engine, request_for(prompt_ids, 4))
    assert set(reply.versions) == {engine.info().weight_version}, "tokens must carry the version of info()"


async def check_abort_finishes_and_frees(engine: Engine, prompt_ids: Ids) -> None:
    """`abort` ends a request with `FinishReason.ABORT`, ignores unknown ids, and leaves the engine usable."""
    request = request_for(prompt_ids, _long_budget(engine, prompt_ids))
    reply = CollectedReply()
    async with asyncio.timeout(TIMEOUT_S):
        if Capability.STREAMING in engine.info().capabilities:
            async for chunk in engine.generate(request):
                reply.add(chunk)
                await engine.abort(request.request_id)
        else:
            reading = asyncio.create_task(complete(engine, request))
            await asyncio.sleep(0.02)
            await engine.abort(request.request_id)
            reply = await reading
    assert reply.finish is FinishReason.ABORT, f"an aborted request must finish with abort, not {reply.finish}"
    await engine.abort("contract-nobody")
    await check_max_tokens_is_exact(engine, prompt_ids)


async def check_closing_the_iterator_frees(engine: Engine, prompt_ids: Ids) -> None:
    """Closing the iterator ends the request and leaves the engine usable."""
    for _ in range(4):
        async with asyncio.timeout(TIMEOUT_S), aclosing(_generator(engine, prompt_ids)) as chunks:
            await anext(chunks)  # an engine that does not stream is closed after its only chunk
    await check_max_tokens_is_exact(engine, prompt_ids)


async def check_cancelling_the_reader_frees(engine: Engine, prompt_ids: Ids) -> None:
    """Cancelling the reading task ends the request and leaves the engine usable."""
    request = request_for(prompt_ids, _long_budget(engine, prompt_ids))
    reader = asyncio.create_task(complete(engine, request))
    await asyncio.sleep(0.02)
    reader.cancel()
    results = await asyncio.gather(reader, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError | CollectedReply), (
        f"cancelling the reader raised {results[0]!r}"
    )
    await check_max_tokens_is_exact(engine, prompt_ids)


async def check_concurrent_requests_are_independent(engine: Engine, prompt_ids: Ids) -> None:
    """32 concurrent requests each get their own number of tokens."""
    prompts = [ids_of([*prompt_ids, *prompt_ids[: index % len(prompt_ids)]]) for index in range(32)]
    requests = [request_for(prompt, 1 + index, float(index % 2)) for index, prompt in enumerate(prompts)]
    replies = await asyncio.gather(*(complete(engine, request) for request in requests))
    for index, reply in enumerate(replies):
        assert len(reply.ids) == 1 + index, "each of 32 concurrent requests must get its own number of tokens"
        assert all(math.isfinite(value) and value <= 0.0 for value in reply.logprobs), "logprobs must be finite"


async def check_given_tokens_are_scored_as_when_they_were_sampled(engine: Engine, prompt_ids: Ids) -> None:
    """The logprobs of a prompt that ends in a sampled output are those of the output, within the engine's precision."""
    if Capability.PROMPT_LOGPROBS not in engine.info().capabilities:
        return
    reply = await complete(engine, request_for(prompt_ids, 8))
    given = ids_of([*prompt_ids, *reply.ids])
    for start in (1, len(prompt_ids)):
        request = replace(request_for(given, 1), scored_from=start, top_logprobs=2, whole=True)
        chunks = [chunk async for chunk in engine.generate(request)]
        found = [chunk for chunk in chunks if chunk.prompt_logprobs is not None]
        assert len(found) == 1, "one chunk must have the logprobs of the prompt"
        logprobs, tops = found[0].prompt_logprobs or (), found[0].prompt_top
        assert len(logprobs) == len(tops) == len(given) - start, "each token from `scored_from` on must have a logprob"
        scored = logprobs[len(prompt_ids) - start :]
        assert all(abs(one - other) < _ROUNDED for one, other in zip(scored, reply.logprobs, strict=True)), (
            f"tokens that were sampled with logprobs {reply.logprobs} were scored as {list(scored)}"
        )
        assert all(len(row) == 2 and row[0][1] >= row[1][1] for row in tops), "alternatives must be the likeliest first"


async def check_released_memory_comes_back(engine: Engine, prompt_ids: Ids) -> None:
    """After memory is released and resumed, the engine samples the same tokens as before."""
    if Capability.RELEASE_MEMORY not in engine.info().capabilities:
        return
    before = await complete(engine, request_for(prompt_ids, 16, 0.0))
    await engine.pause(PauseMode.ABORT)
    await engine.release_memory()
    await engine.resume_memory()
    await engine.resume()
    after = await complete(engine, request_for(prompt_ids, 16, 0.0))
    assert before.ids == after.ids, f"memory came back changed: {after.ids} instead of {before.ids}"


async def check_out_of_vocabulary_is_refused(engine: Engine, prompt_ids: Ids) -> None:
    """An input id outside of the vocabulary raises InvalidRequest and leaves the engine usable."""
    for token in (engine.info().vocab_size, -1):
        try:
            await complete(engine, request_for(ids_of([*prompt_ids, token]), 4))
        except InvalidRequest:
            continue
        raise AssertionError(f"input id {token} is outside of the vocabulary: the request must raise InvalidRequest")
    await check_max_tokens_is_exact(engine, prompt_ids)


async def check_an_unknown_adapter_is_refused(engine: Engine, prompt_ids: Ids) -> None:
    """A request that names an adapter that is not loaded is refused, and leaves the engine usable."""
    if not isinstance(engine, AdapterEngine) or Capability.ADAPTERS not in engine.info().capabilities:
        return
    try:
        await complete(engine, replace(request_for(prompt_ids, 4), adapter=_UNKNOWN_VERSION))
    except EngineUnavailable:
        await check_max_tokens_is_exact(engine, prompt_ids)
        return
    raise AssertionError("a request that names an adapter that is not loaded must raise EngineUnavailable")


CHECKS: tuple[ContractCheck, ...] = (
    check_info_is_sane,
    check_chunks_keep_the_invariants,
    check_max_tokens_is_exact,
    check_a_stop_token_ends_and_is_included,
    check_ignore_eos_passes_stop_tokens,
    check_min_tokens_come_before_a_stop_token,
    check_temperature_zero_is_deterministic,
    check_a_seed_is_deterministic,
    check_logprobs_are_finite_and_not_positive,
    check_top_logprobs_hold_the_best,
    check_given_tokens_are_scored_as_when_they_were_sampled,
    check_tokens_stream,
    check_versions_are_present,
    check_abort_finishes_and_frees,
    check_closing_the_iterator_frees,
    check_cancelling_the_reader_frees,
    check_concurrent_requests_are_independent,
    check_released_memory_comes_back,
    check_out_of_vocabulary_is_refused,
    check_an_unknown_adapter_is_refused,
)


async def check_adapters_are_versions(
    engine: Engine, prompt_ids: Ids, first: AdapterSource, second: AdapterSource
) -> None:
    """Check adapters that are loaded, named and unloaded. Not in CHECKS: it needs two different adapters of the model.

    They must have weights that change the logprobs. Their versions are 1 and 2.
    """
    if not isinstance(engine, AdapterEngine) or Capability.ADAPTERS not in engine.info().capabilities:
        return
    base = await complete(engine, request_for(prompt_ids, 8, temperature=0.0))
    replies = []
    for version, source in ((1, first), (2, second)):
        await engine.load_adapter(version, source)
        await engine.load_adapter(version, source)
        request = replace(request_for(prompt_ids, 8, temperature=0.0), adapter=version)
        replies.append(await complete(engine, request))
        assert set(replies[-1].versions) == {version}, "tokens must carry the version of the adapter that sampled them"
    again = await complete(engine, request_for(prompt_ids, 8, temperature=0.0))
    assert set(again.versions) == {engine.info().weight_version}, "tokens of the base model must carry its own version"
    assert again.ids == base.ids and _close(again.logprobs, base.logprobs), "adapters must not change the base model"
    for one, other in itertools.combinations([base, *replies], 2):
        same = one.ids == other.ids and _close(one.logprobs, other.logprobs)
        assert not same, "each adapter must change the logprobs in its own way"
    for version in (1, 2):
        await engine.unload_adapter(version)
        await engine.unload_adapter(version)
    await check_an_unknown_adapter_is_refused(engine, prompt_ids)


async def check_grammars_are_followed(
    engine: Engine, prompt_ids: Ids, decode: Callable[[Sequence[int]], str], end_token_ids: Sequence[int]
) -> None:
    """Check outputs in every form. Not in CHECKS: it needs the tokenizer's `decode` and the model's `end_token_ids`."""
    if Capability.GRAMMAR not in engine.info().capabilities:
        return
    properties = {"count": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["count"], "additionalProperties": False}
    forms: list[tuple[GrammarPart, Callable[[str], bool]]] = [
        (GrammarPart(schema=schema), lambda text: type(json.loads(text)["count"]) is int),
        (GrammarPart(regex=r"[a-c]{2,4}/\d"), lambda text: re.fullmatch(r"[a-c]{2,4}/\d", text) is not None),
        (GrammarPart(ebnf=_SUMS), lambda text: re.fullmatch(r"\(?[1-3]( \+ [1-3])?\)?", text) is not None),
        (GrammarPart(text="yes/no"), lambda text: text == "yes/no"),
    ]
    for part, fits in forms:
        request = replace(request_for(prompt_ids, 100), grammar=Grammar(((part,),)))
        reply = await complete(engine, replace(request, stop_token_ids=tuple(end_token_ids)))
        assert reply.finish is FinishReason.STOP and reply.ids[-1] in end_token_ids, (
            "a complete output must end with an end token"
        )
        text = decode(reply.ids[:-1])
        assert fits(text), f"the output must match {part}, unlike {text!r}"


async def check_images_are_seen(engine: Engine, prompt_ids: Ids, images: PromptImages, others: PromptImages) -> None:
    """Check that an engine sees the images of a prompt. Not in CHECKS: it needs a vision model and its placeholders.

    `images` and `others` are different pictures of the same sizes, at the same places of `prompt_ids`.
    """
    if Capability.IMAGES not in engine.info().capabilities:
        return
    request = request_for(prompt_ids, 8, temperature=0.0)
    first, second, other = [
        await complete(engine, replace(request_for(prompt_ids, 8, temperature=0.0), images=shown))
        for shown in (images, images, others)
    ]
    assert first.ids == second.ids and _close(first.logprobs, second.logprobs), "equal images must give equal logprobs"
    same = first.ids == other.ids and _close(first.logprobs, other.logprobs)
    assert not same, "other images must give other logprobs"
    placeholders = {prompt_ids[placed.start] for placed in images.placed}
    assert not placeholders & {*first.ids, *other.ids}, "the placeholder of an image must never be sampled"
    text = ids_of(token for token in prompt_ids if token not in placeholders)
    assert len((await complete(engine, replace(request, prompt=PromptIds(text)))).ids) == 8, (
        "a prompt without images must be sampled as before"
    )


def _close(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(math.isclose(mine, yours, abs_tol=1e-4) for mine, yours in zip(one, other, strict=True))


def _long_budget(engine: Engine, prompt_ids: Ids) -> int:
    return min(_LONG, engine.info().context_length - len(prompt_ids))


def _generator(engine: Engine, prompt_ids: Ids) -> AsyncGenerator[TokenChunk, None]:
    chunks = engine.generate(request_for(prompt_ids, _long_budget(engine, prompt_ids)))
    assert hasattr(chunks, "aclose"), "the iterator of generate must have aclose()"
    return chunks
