"""Kept sets and experts of the transformers engine, against forward passes: samplers, grammars, caches, weights."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

from proxy.app import build_app
from proxy.engine.chunks import TokenChunk
from proxy.engine.contract import complete, request_for
from proxy.engine.grammar import Grammar, GrammarPart
from proxy.engine.interface import PauseMode
from proxy.engine.requests import GenerateRequest
from proxy.engine.transformers.engine import TransformersEngine
from proxy.settings import Settings
from proxy.side_columns.columns import EXPERTS, KEPT, KEPT_LOGPROBS, ColumnRequest, Columns
from proxy.side_columns.rows import SideColumn, spread
from proxy.types import SamplingParams, ids_of
from tests.engines.gates import AdminGate
from tests.engines.replay_oracle import check_experts, check_kept, forward, masks
from tests.mixtures import build_mixture
from tests.support import default_url, function_tool, tool_result, until, user
from tokengrove.options.start import Replay
from tokengrove.reasons import FinishReason

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("llguidance")

ALL = frozenset({Replay.KEPT, Replay.EXPERTS})
ELSEWHERE = pytest.mark.skipif("SGLANG_USE_CPU_ENGINE" in os.environ, reason="runs where the server is installed")

PROMPT = tuple(range(40, 75))
MIXTURES = ("qwen3_moe", "deepseek_v3")

SAMPLERS = {
    "plain": SamplingParams(temperature=1.0),
    "greedy": SamplingParams(temperature=0.0),
    "top_p": SamplingParams(temperature=1.0, top_p=0.7),
    "top_k": SamplingParams(temperature=0.8, top_k=7),
    "min_p": SamplingParams(temperature=1.2, min_p=0.1),
    "all": SamplingParams(temperature=1.5, top_p=0.9, top_k=40, min_p=0.02),
    "greedy, cut": SamplingParams(temperature=0.0, top_p=0.5, top_k=3),
}


def slow(test: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a test that several updates or long prompts make slow."""
    return pytest.mark.engines(ELSEWHERE(test))


class Reply(NamedTuple):
    """An answer with its columns. `missing`: the number of missing rows of each column."""

    ids: list[int]
    columns: Columns
    missing: dict[str, int]
    cached: int
    versions: list[int]

    @property
    def experts(self) -> np.ndarray[Any, Any]:
        return self.columns[EXPERTS].rows.values


class Reader:
    """Takes the chunks of one request, as a turn does."""

    def __init__(self, request: GenerateRequest) -> None:
        assert request.columns is not None
        self._start, self._prompt = request.columns.start, len(request.prompt)
        self._parts: dict[str, list[SideColumn]] = defaultdict(list)
        self._cached: int | None = None
        self._ids: list[int] = []
        self._versions: list[int] = []

    def __len__(self) -> int:
        return len(self._ids)

    def take(self, chunk: TokenChunk) -> FinishReason | None:
        for name, column in (chunk.columns or {}).items():
            self._parts[name].append(column)
        self._ids += chunk.ids
        self._versions += [chunk.version] * len(chunk.ids)
        self._cached = chunk.cached_tokens if self._cached is None else self._cached
        return chunk.finish

    def reply(self) -> Reply:
        end = self._prompt + len(self._ids)
        columns = {}
        for name, parts in self._parts.items():
            start, stop = (self._start, end - 1) if name == EXPERTS else (self._prompt, end)
            assert min(each.start for each in parts) == start and max(each.end for each in parts) == stop
            assert sum(len(each.rows) for each in parts) == stop - start  # no row comes twice
            columns[name] = SideColumn(start, spread(parts, start, stop))
        missing = {name: int(column.rows.missing.sum()) for name, column in columns.items()}
        return Reply(self._ids, columns, missing, self._cached or 0, self._versions)


def asking(prompt: Sequence[int], tokens: int, start: int = 0, sampling: SamplingParams | None = None) -> Any:
    request = request_for(ids_of(prompt), tokens, seed=1)
    sampling = request.sampling if sampling is None else sampling._replace(max_tokens=tokens, seed=1)
    return replace(request, columns=ColumnRequest(ALL, 2000, start), sampling=sampling)


async def read(engine: TransformersEngine, request: GenerateRequest) -> Reply:
    reader = Reader(request)
    async for chunk in engine.generate(request):
        reader.take(chunk)
    return reader.reply()


async def turn(engine: TransformersEngine, prompt: Sequence[int], tokens: int, start: int = 0) -> Reply:
    return await read(engine, asking(prompt, tokens, start))


@pytest.fixture(scope="session")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind of model; `*_new`: other weights of it."""
    kinds = (*MIXTURES, "qwen3", "mixtral")
    folders = {kind: build_mixture(tmp_path_factory.mktemp(kind), kind) for kind in kinds}
    return folders | {f"{kind}_new": build_mixture(tmp_path_factory.mktemp(kind), kind, seed=1) for kind in MIXTURES}


def started(folder: Path, *engine_arg: str) -> TransformersEngine:
    engine = TransformersEngine(Settings(engine_arg=engine_arg), folder)
    asyncio.run(engine.start())
    return engine


@pytest.fixture(scope="module", params=MIXTURES)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def engine(kind: str, mixtures: dict[str, Path]) -> Iterator[TransformersEngine]:
    engine = started(mixtures[kind])
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def own_engine(kind: str, mixtures: dict[str, Path]) -> Iterator[TransformersEngine]:
    """An engine for one test to pause or fill, with a small cache."""
    engine = started(mixtures[kind], "cache_mb=2")
    yield engine
    asyncio.run(engine.close())


def check_whole(folder: Path, prompt: Sequence[int], reply: Reply) -> None:
    """Assert that there are N - 1 rows, of one pass over the whole sequence."""
    ids = (*prompt, *reply.ids)
    assert reply.columns[EXPERTS].start == 0 and len(reply.experts) == len(ids) - 1 and reply.missing[EXPERTS] == 0
    check_experts([forward(folder, ids)], [0] * (len(ids) - 1), reply.experts)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_kept_sets_and_their_logprobs_equal_those_of_a_forward_pass(mixtures, shared, model: str, sampler: str) -> None:
    engine = shared(model)
    reply = asyncio.run(read(engine, asking(PROMPT, 24, sampling=SAMPLERS[sampler])))
    logprobs = reply.columns[KEPT_LOGPROBS].rows.values.tolist()
    assert reply.columns[KEPT].start == reply.columns[KEPT_LOGPROBS].start == len(PROMPT)
    check_kept(mixtures[model], PROMPT, reply.ids, reply.columns[KEPT].rows, logprobs, SAMPLERS[sampler])


@pytest.fixture(scope="module")
def shared(mixtures: dict[str, Path]) -> Iterator[Any]:
    """Returns the engine of a kind of model, started once."""
    engines: dict[str, TransformersEngine] = {}

    def of(kind: str) -> TransformersEngine:
        if kind not in engines:
            engines[kind] = started(mixtures[kind])
        return engines[kind]

    yield of
    for engine in engines.values():
        asyncio.run(engine.close())


@pytest.mark.parametrize("form", ["number", "call"])
@pytest.mark.parametrize("sampler", ["plain", "greedy", "all"])
@pytest.mark.parametrize("model", ["qwen3", "deepseek_v3"])
def test_kept_sets_under_a_grammar_are_within_what_it_allows(
    mixtures, shared, tokenizer, model: str, sampler: str, form: str
) -> None:
    engine = shared(model)
    grammar = _grammar(tokenizer, form)
    request = asking(PROMPT, 60, sampling=SAMPLERS[sampler])
    request = replace(request, grammar=grammar, stop_token_ids=(tokenizer.eos_token_id,))
    reply = asyncio.run(read(engine, request))
    assert reply.ids[-1] == tokenizer.eos_token_id
    state = engine._grammars.compile(grammar, request.stop_token_ids)
    allowed = []
    for place, token in enumerate(reply.ids):
        allowed.append(state.allowed(60 - place).copy())
        state.accept(token)
    logprobs = reply.columns[KEPT_LOGPROBS].rows.values.tolist()
    check_kept(mixtures[model], PROMPT, reply.ids, reply.columns[KEPT].rows, logprobs, SAMPLERS[sampler], allowed)


def _grammar(tokenizer: Any, form: str) -> Grammar:
    if form == "number":
        return Grammar(((GrammarPart(regex="[1-9][0-9]{0,20}"),),))
    begin, end = (tokenizer.convert_tokens_to_ids(f"<{name}tool_call>") for name in ("", "/"))
    schema: Any = {"type": "object", "properties": {"n": {"enum": [1, 23]}}, "required": ["n"]}
    parts = (GrammarPart(text='{"name": "f", "arguments": '), GrammarPart(schema=schema), GrammarPart(text="}"))
    return Grammar(((GrammarPart(token_id=begin), *parts, GrammarPart(token_id=end)),))


@pytest.fixture(scope="module")
def tokenizer(mixtures: dict[str, Path]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(mixtures["qwen3"])


def test_a_set_beyond_the_limit_is_missing_and_its_logprob_is_kept(shared) -> None:
    request = asking(PROMPT, 5, sampling=SamplingParams(temperature=3.0, top_p=0.6))
    reply = asyncio.run(read(shared("qwen3"), replace(request, columns=ColumnRequest(ALL, 3))))
    assert reply.missing == {KEPT: 5, KEPT_LOGPROBS: 0}


@slow
async def test_each_turn_of_a_session_brings_the_rows_of_its_new_tokens(engine, kind: str, mixtures) -> None:
    prompt: tuple[int, ...] = tuple(range(100, 170))
    known = 0
    for number in range(3):
        reply = await turn(engine, prompt, 40, start=known)
        ids = (*prompt, *reply.ids)
        assert reply.cached >= known // 32 * 32 and (number == 0 or known > 64)
        assert reply.columns[EXPERTS].start == known and len(reply.experts) == len(ids) - 1 - known
        tail = forward(mixtures[kind], ids)
        tail = tail._replace(experts=tail.experts[known:], sure=tail.sure[known:])
        check_experts([tail], [0] * len(reply.experts), reply.experts)
        known = len(ids) - 1  # the last token has no row yet
        prompt = (*ids, 7, 8, 9)


@slow
async def test_two_children_of_a_parent_have_their_own_rows_after_it(engine, kind: str, mixtures) -> None:
    parent = await turn(engine, range(200, 290), 20)
    check_whole(mixtures[kind], range(200, 290), parent)
    whole = (*range(200, 290), *parent.ids)
    start = len(whole) - 1
    children = [(*whole, *further) for further in ((1, 2, 3), (4, 5))]
    for prompt, reply in zip(
        children, await asyncio.gather(*(turn(engine, each, 8, start) for each in children)), strict=True
    ):
        ids = (*prompt, *reply.ids)
        joined = np.concatenate([parent.experts, reply.experts])
        check_experts([forward(mixtures[kind], ids)], [0] * (len(ids) - 1), joined)


@slow
async def test_a_group_has_the_rows_of_its_cached_prompt(engine, kind: str, mixtures) -> None:
    prompt = tuple(range(300, 380))
    first = await turn(engine, prompt, 4)
    others = await asyncio.gather(*(turn(engine, prompt, 6) for _ in range(3)))
    assert first.cached == 0 and all(reply.cached == 64 for reply in others)
    for reply in (first, *others):
        check_whole(mixtures[kind], prompt, reply)
    assert all(np.array_equal(reply.experts[:64], first.experts[:64]) for reply in others)


@slow
async def test_a_prompt_of_several_passes_has_all_rows(engine, kind: str, mixtures) -> None:
    prompt = (*range(400, 640), *range(300, 600))  # a pass has 256 tokens
    replies = await asyncio.gather(turn(engine, prompt, 3), turn(engine, prompt[:300], 3))
    for given, reply in zip((prompt, prompt[:300]), replies, strict=True):
        check_whole(mixtures[kind], given, reply)


async def test_a_request_that_wants_no_early_rows_gets_none(engine) -> None:
    reply = await turn(engine, PROMPT, 3, start=30)
    assert reply.columns[EXPERTS].start == 30 and len(reply.experts) == len(PROMPT) + 2 - 30


async def test_rows_that_nobody_asked_for_are_not_sent(engine) -> None:
    plain = request_for(ids_of(PROMPT), 3)
    only_kept = replace(plain, columns=ColumnRequest(frozenset({Replay.KEPT})))
    assert all([chunk.columns is None async for chunk in engine.generate(plain)])
    assert all([{KEPT, KEPT_LOGPROBS} == {*chunk.columns} async for chunk in engine.generate(only_kept)])


async def test_rows_of_a_prefix_that_nobody_asked_for_can_be_read_later(own_engine, kind: str, mixtures) -> None:
    prompt = tuple(range(500, 600))
    await complete(own_engine, request_for(ids_of(prompt), 2))
    reply = await turn(own_engine, prompt, 2)
    assert reply.cached == 96
    check_whole(mixtures[kind], prompt, reply)


@slow
@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT, PauseMode.ABORT])
async def test_a_pause_neither_loses_nor_repeats_rows(own_engine, kind: str, mixtures, mode: PauseMode) -> None:
    gate, request = AdminGate(own_engine), asking(PROMPT, 60)
    reader = Reader(request)
    running = asyncio.ensure_future(gate.sample(request, reader.take))
    await until(lambda: len(reader) >= 10)
    await gate.admin.pause(mode)
    assert len(reader) < 60
    await gate.admin.resume()
    await running
    check_whole(mixtures[kind], PROMPT, reader.reply())


@slow
@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.ABORT])
async def test_after_an_update_each_row_is_of_the_pass_that_took_in_its_token(
    own_engine, kind: str, mixtures, mode: PauseMode
) -> None:
    gate, request = AdminGate(own_engine), asking(PROMPT, 60)
    reader = Reader(request)
    running = asyncio.ensure_future(gate.sample(request, reader.take))
    await until(lambda: len(reader) >= 10)
    await gate.admin.update_weights(str(mixtures[f"{kind}_new"]), 1, mode)
    await running
    reply = reader.reply()
    ids, before = (*PROMPT, *reply.ids), reply.versions.count(0)
    assert 10 <= before < 60 and reply.versions == [0] * before + [1] * (60 - before)
    assert len(reply.experts) == len(ids) - 1 and reply.missing[EXPERTS] == 0
    # The last token before the update was taken in by the first pass after it.
    old = len(PROMPT) + before - 1
    passes = [forward(mixtures[kind], ids), forward(mixtures[f"{kind}_new"], ids)]
    assert not np.array_equal(passes[0].experts, passes[1].experts)
    check_experts(passes, [int(place >= old) for place in range(len(ids) - 1)], reply.experts)


@slow
async def test_after_an_update_a_cached_prompt_has_no_rows_of_old_weights(own_engine, kind: str, mixtures) -> None:
    prompt = tuple(range(530, 630))
    check_whole(mixtures[kind], prompt, await turn(own_engine, prompt, 2))
    await own_engine.update_weights(str(mixtures[f"{kind}_new"]))
    for cached in (0, 96):
        reply = await turn(own_engine, prompt, 2)
        assert reply.cached == cached
        check_whole(mixtures[f"{kind}_new"], prompt, reply)


@slow
async def test_more_requests_than_the_cache_holds_have_all_rows(mixtures) -> None:
    engine = TransformersEngine(Settings(engine_arg=("cache_mb=1",)), mixtures["qwen3_moe"])
    await engine.start()
    prompts = [tuple(range(number, number + 100)) for number in range(8)]
    replies = await asyncio.gather(*(turn(engine, prompt, 40) for prompt in prompts))
    room = engine._experts._batch.slot_count
    assert room < 8 * 140
    for prompt, reply in zip(prompts, replies, strict=True):
        check_whole(mixtures["qwen3_moe"], prompt, reply)
    await engine.close()


@pytest.mark.parametrize("model", ["mixtral"])
def test_a_model_with_a_sliding_window_shares_no_prefix_and_has_all_rows(mixtures, shared, model: str) -> None:
    engine = shared(model)
    for _ in range(2):
        reply = asyncio.run(turn(engine, PROMPT, 20))
        assert reply.cached == 0
        check_whole(mixtures[model], PROMPT, reply)
    assert engine._experts._rows is None


def test_an_engine_says_whether_it_records_experts(shared) -> None:
    dense, mixed = shared("qwen3").info(), shared("qwen3_moe").info()
    assert dense.dense and Replay.EXPERTS not in dense.records and dense.why_unrecorded([Replay.EXPERTS]) is None
    assert not mixed.dense and Replay.EXPERTS in mixed.records
    assert shared("qwen3")._experts is None


CALLING = {"tools": [function_tool("look", {"n": {"enum": [1, 23]}})], "tool_choice": "none"}


@slow
async def test_columns_of_a_tree_are_stored_as_the_engine_computed_them(tmp_path: Path, mixtures) -> None:
    old, new = mixtures["deepseek_v3"], mixtures["deepseek_v3_new"]
    settings = Settings(
        model=str(old),
        engine="transformers",
        engine_arg=("cache_mb=4",),
        replay=(Replay.KEPT, Replay.EXPERTS),
        database_url=default_url(tmp_path),
    )
    app = build_app(settings)
    transport = httpx.ASGITransport(app=app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://t") as http:
        root = [user("begin with something that fills more than one page of the cache, " * 3)]
        first = await _chat(http, root)
        called = await _chat(http, [*root, first, user("call")], tool_choice="required")
        await _chat(http, [*root, first, user("another way")], min_p=0.05)
        answer = await http.post("/engine/update_weights", json={"path": str(new)})
        assert answer.status_code == 200, answer.text
        result = tool_result(called["tool_calls"][0]["id"], "17")
        await _chat(http, [*root, first, user("call"), called, result])
        turns = await app.state.store.recordings.load_interactions("s")
        columns = await app.state.store.recordings.load_columns("s", [KEPT, KEPT_LOGPROBS, EXPERTS])
    assert [turn.parent_id and [each.id for each in turns].index(turn.parent_id) for turn in turns] == [None, 0, 0, 1]
    assert [bool(turn.grammar) for turn in turns] == [False, True, False, False]
    by_id = {turn.id: turn for turn in turns}
    for turn in turns:
        assert turn.replay == {KEPT: 0, KEPT_LOGPROBS: 0, EXPERTS: 0}
        branch = [turn]
        while branch[0].parent_id is not None:
            branch.insert(0, by_id[branch[0].parent_id])
        ids = [token for each in branch for token in (*each.prompt_suffix, *each.output_ids)]
        _check_turn(branch, ids, columns, [old, new])


def _check_turn(branch: Sequence[Any], ids: Sequence[int], columns: Any, folders: Sequence[Path]) -> None:
    """Assert that the last turn of a branch has the kept sets, and the branch the experts, of forward passes."""
    own, last = columns[branch[-1].id], branch[-1]
    prompt = ids[: len(ids) - len(last.output_ids)]
    ((_, version),) = last.versions
    logprobs = own[KEPT_LOGPROBS].rows.values.tolist()
    found = masks(own[KEPT].rows, 640) if last.grammar else ()
    check_kept(folders[version], prompt, last.output_ids, own[KEPT].rows, logprobs, last.sampling, found)
    rows = np.zeros((len(ids) - 1, *own[EXPERTS].rows.inner), np.int64)
    owner = np.full(len(ids) - 1, -1)
    for turn in branch:
        column = columns[turn.id][EXPERTS]
        assert column.start == max(turn.prefix_length - 1, 0)
        rows[column.start : column.end] = column.rows.values
        owner[column.start : column.end] = turn.versions[0][1]
    check_experts([forward(folder, tuple(ids)) for folder in folders], owner.tolist(), rows)


async def _chat(http: httpx.AsyncClient, messages: Sequence[Any], **more: Any) -> Any:
    body = {"model": "m", "messages": messages, "max_tokens": 60, "top_p": 0.9, "seed": 1, **CALLING, **more}
    answer = await http.post("/s/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]
