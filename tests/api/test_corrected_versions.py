"""An engine may report the weight version of a token late: the last version that it reports is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from proxy.engine.chunks import TokenChunk
from proxy.engine.requests import GenerateRequest
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.versions import LARGEST_VERSION, with_run
from proxy.types import VersionRuns
from tests.api.test_engine_control import MODES, TEXT, WORDS, begun, goes_on, sampled_by, serving_on, streamed
from tests.support import tiny_renderer, until
from tests.wide import CROSSED


class HastyEngine(ScriptedEngine):
    """An engine that first reports weight versions that are too new, as SGLang may, and corrects them at the end."""

    def __init__(self, wrong: VersionRuns = ()) -> None:
        super().__init__(goes_on(), vocab_size=tiny_renderer().vocab_size)
        self.truth: dict[str, VersionRuns] = {}
        self.wrong = wrong

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        before: VersionRuns = ()
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                told = self.truth.get(request.request_id, ())
                self.truth[request.request_id] = with_run(told, len(chunk.ids), chunk.version)
                if chunk.finish is None:
                    before = with_run(before, len(chunk.ids), chunk.version)
                    yield replace(chunk, version=chunk.version + 1)
                else:
                    yield replace(chunk, corrected=self.wrong or before)

    def sampled_by(self, session: str) -> list[int]:
        """The weight version of each token of a session's only turn."""
        (name,) = {request.request_id for request in self.requests if request.session_id == session}
        return [version for count, version in self.truth[name] for _ in range(count)]


@pytest.mark.parametrize("mode", MODES)
async def test_recorded_versions_are_the_corrected_ones(tmp_path: Path, mode: str) -> None:
    engine = HastyEngine()
    async with serving_on(tmp_path, engine) as server:
        (task,) = await begun(server, "a")
        stream = asyncio.create_task(streamed(server, "b"))
        await until(lambda: sum(count >= 2 for count in sampled_by(server)) == 2)
        await server.ok("/engine/update_weights", {"path": "w", "version": 3, "mode": mode})
        assert (await task)["choices"][0]["message"]["content"] == TEXT
        assert await stream == (TEXT, "stop")
        for session in "ab":
            (sample,) = await server.export(session)
            trained = [at for at, mask in enumerate(sample["loss_mask"]) if mask]
            assert [sample["input_ids"][at] for at in trained] == WORDS
            truth = engine.sampled_by(session)
            assert [sample["versions"][at] for at in trained] == truth
            assert set(truth) == ({0} if mode == "drain" else {0, 3})


@pytest.mark.parametrize("path", ["/s/v1/generate", "/v1/generate"])
async def test_generate_replies_with_the_corrected_versions(tmp_path: Path, path: str) -> None:
    async with serving_on(tmp_path, HastyEngine()) as server:
        reply = await server.ok(path, {"input_ids": [5, 6, 7]})
        assert reply["output_ids"] == WORDS and reply["versions"] == [0] * len(WORDS)


@CROSSED
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (((50, 0),), "corrected the versions of 50 tokens"),
        (((1, LARGEST_VERSION + 1),), "weight version 2147483648"),
        (((2, 0), (-1, 1)), "with fewer than one token"),
        (((2, 0), (0, 1)), "with fewer than one token"),
    ],
)
@pytest.mark.parametrize("path", ["/s/v1/generate", "/v1/generate"])
async def test_an_impossible_correction_is_an_engine_failure(
    tmp_path: Path, path: str, wrong: VersionRuns, says: str
) -> None:
    async with serving_on(tmp_path, HastyEngine(wrong)) as server:
        response = await server.post(path, {"input_ids": [5, 6, 7]})
        assert response.status_code == 502 and says in response.text
