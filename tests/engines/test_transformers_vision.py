"""The transformers engine with models that see: logprobs equal a plain forward pass of the model with all pixels."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from proxy.engine.contract import CHECKS, CollectedReply, ContractCheck, complete
from proxy.engine.interface import Capability, PauseMode
from proxy.engine.tiny.vision import VisionKind, build_tiny_vision_model
from proxy.engine.transformers.engine import TransformersEngine
from proxy.settings import Settings
from proxy.types import ids_of
from tests.engines.gates import AdminGate
from tests.engines.seeing import Seen, check_blind_differs, check_exact, seen
from tests.vision import KINDS, image_file

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("PIL")

TEXT, MORE, LAST = range(40, 60), range(60, 90), range(90, 99)


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, vision_folders: dict[str, Path]) -> Path:
    return vision_folders[request.param]


@pytest.fixture(scope="module")
def other_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights of the same model; its vision part is another too."""
    path = tmp_path_factory.mktemp("other")
    build_tiny_vision_model(path, VisionKind(KINDS[0] if "2_5" in str(folder) else KINDS[1]), seed=1)
    return path


def started(folder: Path, *engine_arg: str) -> TransformersEngine:
    engine = TransformersEngine(Settings(model=str(folder), engine_arg=engine_arg), folder)
    asyncio.run(engine.start())
    return engine


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[TransformersEngine]:
    engine = started(folder)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def own_engine(folder: Path) -> Iterator[TransformersEngine]:
    """An engine for one test to change. A step has 8 tokens, fewer than an image."""
    engine = started(folder, "batch_tokens=8", "cache_mb=4")
    yield engine
    asyncio.run(engine.close())


def of(folder: Path, *parts: object) -> Seen:
    return seen(folder, *parts)  # type: ignore[arg-type]


def test_it_says_that_the_model_sees(engine: TransformersEngine) -> None:
    info = engine.info()
    assert info.capabilities == frozenset(Capability) and info.detail.endswith("sees images")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.engines
async def test_contract_of_texts(engine: TransformersEngine, check: ContractCheck) -> None:
    await check(engine, ids_of(TEXT))


@pytest.mark.parametrize(
    ("temperature", "parts"),
    [
        pytest.param(0.0, (TEXT, image_file(100, 60), MORE), id="one, greedy"),
        pytest.param(0.7, (image_file(), TEXT), id="first, cold", marks=pytest.mark.engines),
        pytest.param(1.5, (TEXT, image_file(64, 64, 1)), id="last, hot", marks=pytest.mark.engines),
        pytest.param(
            *(1.0, (TEXT, image_file(200, 200, 1), MORE, image_file(60, 300, 2), image_file(40, 40, 3), LAST)),
            id="several sizes",
        ),
        pytest.param(
            *(1.0, (image_file(60, 60, 1), image_file(60, 60, 1), TEXT, image_file(60, 60, 1), LAST)),
            id="one thrice",
            marks=pytest.mark.engines,
        ),
        pytest.param(1.0, (TEXT,), id="none"),
    ],
)
async def test_logprobs_are_those_of_a_plain_forward_pass(
    engine: TransformersEngine, folder: Path, parts: Sequence[object], temperature: float
) -> None:
    prompt = of(folder, *parts)
    reply = await complete(engine, prompt.request(12, temperature))
    check_exact(folder, prompt, reply, temperature)
    if prompt.files:
        check_blind_differs(folder, prompt, reply)


async def test_later_turns_take_earlier_images_from_the_prefix_cache(engine: TransformersEngine, folder: Path) -> None:
    prompt, known = of(folder, range(100, 140), image_file(150, 90, 7), MORE), 0
    for turn in range(4):
        chunks = [chunk async for chunk in engine.generate(prompt.request(9))]
        reply = CollectedReply()
        for chunk in chunks:
            reply.add(chunk)
        check_exact(folder, prompt, reply)
        assert chunks[0].cached_tokens is not None and chunks[0].cached_tokens >= known
        known = (len(prompt.ids) + len(reply.ids) - 1) // 32 * 32
        prompt = prompt.then(folder, reply.ids, LAST, image_file(90 + turn, 90, turn), MORE)


@pytest.mark.engines
async def test_equal_texts_with_other_images_share_no_key(engine: TransformersEngine, folder: Path) -> None:
    prompts = [of(folder, range(200, 240), image_file(120, 120, seed), MORE) for seed in (1, 2, 3, 1)]
    assert len({bytes(prompt.ids) for prompt in prompts}) == 1
    for _ in range(2):  # the second time all of them are in the cache
        replies = await asyncio.gather(*(complete(engine, prompt.request(10)) for prompt in prompts))
        for prompt, reply in zip(prompts, replies, strict=True):
            check_exact(folder, prompt, reply)


@pytest.mark.engines
async def test_images_longer_than_a_step_are_seen_as_a_whole(own_engine: TransformersEngine, folder: Path) -> None:
    prompts = [
        of(folder, TEXT, image_file(200, 150, 1), MORE, image_file(90, 200, 2)),
        of(folder, image_file(220, 220, 3), LAST),
        of(folder, MORE),
    ]
    replies = await asyncio.gather(*(complete(own_engine, prompt.request(6)) for prompt in prompts))
    for prompt, reply in zip(prompts, replies, strict=True):
        check_exact(folder, prompt, reply)


@pytest.mark.engines
@pytest.mark.parametrize("mode", PauseMode)
async def test_an_update_mid_reply_shows_images_to_the_new_weights(
    own_engine: TransformersEngine, folder: Path, other_folder: Path, mode: PauseMode
) -> None:
    gate, begun = AdminGate(own_engine), asyncio.Event()
    prompt = of(folder, TEXT, image_file(100, 100, 4), MORE)
    reading = asyncio.create_task(gate.read(prompt.request(40), begun))
    await begun.wait()
    await gate.admin.update_weights(str(other_folder), 1, mode)
    reply = await reading
    check_exact({0: folder, 1: other_folder}, prompt, reply)
    assert set(reply.versions) == ({0} if mode is PauseMode.DRAIN else {0, 1})
    again = await gate.read(prompt.request(6))
    check_exact({1: other_folder}, prompt, again)
