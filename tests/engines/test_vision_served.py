"""A server on the transformers engine with a vision model: what agents get and what trainers read is exact."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from proxy.app import build_app
from proxy.settings import Settings
from tests.engines.forward import TOLERANCE
from tests.engines.seeing import Seen, plain_logprobs
from tests.support import Server, default_url
from tests.vision import KINDS, image_file, image_url, png, text_part

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("llguidance")

pytestmark = pytest.mark.engines


@pytest_asyncio.fixture(params=KINDS)
async def served(
    request: pytest.FixtureRequest, vision_folders: dict[str, Path], tmp_path: Path
) -> AsyncIterator[tuple[Server, Path]]:
    folder = vision_folders[request.param]
    settings = Settings(model=str(folder), engine="transformers", database_url=default_url(tmp_path), migrate=True)
    app = build_app(settings)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://t") as http:
        http.timeout = httpx.Timeout(120)
        yield Server(app, http, app.state.engine), folder


def asking(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


async def test_exported_logprobs_are_those_of_a_forward_pass_with_the_images(served: tuple[Server, Path]) -> None:
    server, folder = served
    files = [image_file(120, 80, 1), image_file(50, 200, 2), image_file(64, 64, 3)]
    messages = [asking(text_part("Look: "), image_url(png(120, 80, 1)), text_part(" and "), image_url(png(50, 200, 2)))]
    sampling = {"max_tokens": 12, "temperature": 0.8, "seed": 1}
    first = await server.chat(messages, **sampling)
    said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    messages += [said, asking(image_url(png(64, 64, 3)), text_part("And this?"))]
    second = await server.chat(messages, **sampling)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    (sample,) = await server.export()
    assert [image["digest"] for image in sample["images"]] == [file.digest for file in files]
    ids, mask, logprobs = sample["input_ids"], sample["loss_mask"], sample["logprobs"]
    # An end token may be among the samples of a random model, so how many there are is not known before.
    assert sum(mask) == first["usage"]["completion_tokens"] + second["usage"]["completion_tokens"]
    prompt = Seen(ids[:1], (), tuple(files))
    expected = plain_logprobs(folder, prompt, ids[1:], 0.8)
    blind = plain_logprobs(folder, prompt._replace(files=()), ids[1:], 0.8)
    trained = [place for place, counts in enumerate(mask) if counts]
    assert [logprobs[place] for place in trained] == pytest.approx([expected[p - 1] for p in trained], abs=TOLERANCE)
    assert max(abs(logprobs[place] - blind[place - 1]) for place in trained) > 0.05
    for image in sample["images"]:
        assert not any(mask[image["start"] : image["start"] + image["length"]])


async def test_turns_with_images_are_scored_with_them(served: tuple[Server, Path]) -> None:
    server, _ = served
    messages = [asking(text_part("Look: "), image_url(png(120, 80, 1)))]
    first = await server.chat(messages, max_tokens=12, temperature=0.8)
    said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    await server.chat([*messages, said, asking(image_url(png(50, 200, 2)))], max_tokens=12, temperature=0.8)
    (session,) = (await server.http.get("/rl/sessions")).json()["sessions"]
    path = f"/rl/sessions/{session['session_id']}"
    scored = await server.ok("/v1/logprobs", {"session_id": session["session_id"], "temperature": 0.8})
    for number, row in enumerate(scored["data"]):
        turn = (await server.http.get(f"{path}/interactions/{number}?include=logprobs")).json()
        assert row["logprobs"] == pytest.approx(turn["logprobs"], abs=TOLERANCE)
