"""A real `sglang.launch_server` with tiny models that see: the ids it runs on, updates, and what others send it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from proxy.engine.contract import complete, request_for
from proxy.engine.interface import Capability, PauseMode
from proxy.engine.servers.kinds import connect
from proxy.engine.servers.pool import Pool
from proxy.engine.servers.sent_images import Eyes, SentImages
from proxy.engine.tiny.vision import VisionKind, build_tiny_vision_model
from proxy.types import Ids, ImageFile, ids_of
from proxy.vision.model_config import placeholder_ids
from tests.engines.gates import AdminGate
from tests.engines.pictures import Prompts, asks, drawn, seen_logprobs
from tests.engines.test_sglang_server import Server

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

RED, BLUE, PHOTO = drawn(1), drawn(2), drawn(4, 300, 80, "JPEG")


@pytest.fixture(scope="module", params=list(VisionKind))
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one kind with other weights."""
    made = [tmp_path_factory.mktemp(f"{request.param}-{seed}") for seed in range(2)]
    for seed, folder in enumerate(made):
        build_tiny_vision_model(folder, request.param, seed=seed)
    return made


@pytest.fixture(scope="module")
def server(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("sglang", reason="sglang is not installed (tests/engines/requirements-sglang.txt)")
    started = Server(folders[0], tmp_path_factory.mktemp("server") / "log")
    started.wait_ready()
    yield started
    started.kill()


@pytest.fixture(scope="module")
def prompts(folders: list[Path]) -> Prompts:
    return Prompts(folders[0])


@pytest.fixture(scope="module")
def tolerance() -> float:
    """The largest difference of a logprob from that of a forward pass."""
    return 1e-3


def plain(folder: Path, prompt: Ids, images: Sequence[ImageFile], output: Sequence[int]) -> list[float]:
    """The logprobs that a server gives: placeholders, of which it samples none, have no part in them."""
    return seen_logprobs(folder, prompt, images, output, without=placeholder_ids(folder))


@contextlib.asynccontextmanager
async def seeing(server: Server, folder: Path, vocabulary: int = 700) -> AsyncIterator[Pool]:
    eyes = Eyes(SentImages(), placeholder_ids(folder))
    opener = connect(vocabulary, None, eyes=eyes)
    pool = Pool([server.url], opener, start_timeout_s=60.0, check_s=0.2)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


@pytest.mark.parametrize("streamed", [True, False])
async def test_it_runs_on_our_ids_and_sees_our_pixels(server, prompts, folders, tolerance, streamed: bool) -> None:
    async with seeing(server, folders[0]) as pool:
        assert Capability.IMAGES in pool.info().capabilities
        ids, placed = prompts.of("Look: ", RED, " and then ", PHOTO)
        for letter in " what do you see in it?":  # ids that no tokenizer would write for this text
            ids += prompts.of(letter)[0]
        request = asks(ids, placed, (RED, PHOTO), 24)
        request.whole = not streamed
        reply = await complete(pool, request)
        assert len(reply.ids) == 24
        assert reply.logprobs == pytest.approx(plain(folders[0], ids, (RED, PHOTO), reply.ids), abs=tolerance)
        others = plain(folders[0], ids, (BLUE, PHOTO), reply.ids)
        assert max(abs(one - other) for one, other in zip(reply.logprobs, others, strict=True)) > 5 * tolerance


async def test_equal_texts_with_other_images_do_not_share_the_cache(server, prompts, folders, tolerance) -> None:
    async with seeing(server, folders[0]) as pool:
        await pool.flush_cache()
        ids, placed = prompts.of("Look: ", RED, " What is it?")
        swapped = tuple(image._replace(digest=BLUE.digest) for image in placed)
        both = await asyncio.gather(
            complete(pool, asks(ids, placed, (RED,), 16)), complete(pool, asks(ids, swapped, (BLUE,), 16))
        )
        for reply, image in zip(both, (RED, BLUE), strict=True):
            assert reply.logprobs == pytest.approx(plain(folders[0], ids, (image,), reply.ids), abs=tolerance)


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.RETRACT])
async def test_images_stay_through_a_weight_update_and_are_seen_by_the_new_weights(
    server, prompts, folders, tolerance, mode: PauseMode
) -> None:
    async with seeing(server, folders[0]) as pool:
        gate = AdminGate(pool)
        ids, placed = prompts.of("Look: ", RED, " and ", PHOTO, " What?")
        begun = [asyncio.Event() for _ in range(4)]
        running = [asyncio.create_task(gate.read(asks(ids, placed, (RED, PHOTO), 200), event)) for event in begun]
        await asyncio.gather(*(event.wait() for event in begun))
        await gate.admin.update_weights(str(folders[1]), 1, mode)
        for reply in await asyncio.gather(*running):
            assert len(reply.ids) == 200 and set(reply.versions) == {0, 1}
            by_version = [plain(folder, ids, (RED, PHOTO), reply.ids) for folder in folders]
            expected = [by_version[version][at] for at, version in enumerate(reply.versions)]
            assert reply.logprobs == pytest.approx(expected, abs=tolerance)
        await gate.admin.update_weights(str(folders[0]), 0, PauseMode.DRAIN)
        reply = await gate.read(asks(ids, placed, (RED, PHOTO), 8))
        assert reply.logprobs == pytest.approx(plain(folders[0], ids, (RED, PHOTO), reply.ids), abs=tolerance)


async def test_a_placeholder_is_never_sampled(server, prompts, folders) -> None:
    async with seeing(server, folders[0]) as pool:
        ids, placed = prompts.of("Look: ", RED)
        hot = asks(ids, placed, (RED,), 300, temperature=2.0)  # vLLM's highest
        text = request_for(ids_of(range(40, 60)), 300, temperature=2.0)
        for reply in await asyncio.gather(complete(pool, hot), complete(pool, text)):
            assert not set(placeholder_ids(folders[0])) & set(reply.ids)
