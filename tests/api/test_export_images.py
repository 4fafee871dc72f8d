"""Exports and claims of sessions with images, on a tiny model that sees and the scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from copy import copy
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxy.engine.scripted.scripts import Reply, play
from proxy.images.decode import decode_image
from proxy.rendering.renderer import Renderer, load_renderer
from proxy.settings import Settings
from proxy.store.stored_images import StoredImages
from proxy.types import ImageFile
from tests.api.test_export import always
from tests.support import Server, assistant, says, serving, tiny_renderer, user
from tests.vision import image_file, image_url, noting_loops, png, text_part
from tokengrove.client.async_client import AsyncClient
from tokengrove.client.export import Export
from tokengrove.client.readers.read import read
from tokengrove.client.values import Sample

RED, WIDE = (100, 80, 1), (700, 280, 2)
FILES = {file.digest: file for file in (image_file(*RED), image_file(*WIDE))}
PADDED = {"layout": "padded", "prompt_length": 256, "response_length": 256}
LAYOUTS: tuple[dict[str, Any], ...] = ({"layout": "individual"}, {"layout": "concat"}, {"layout": "tree"}, PADDED)
FORMATS = ("json", "jsonl", "npz", "safetensors", "arrow", "parquet")


@asynccontextmanager
async def told(folder: Path, renderer: Renderer) -> AsyncIterator[Server]:
    """A server with a session of three turns and a fork: the first prompt shows red, the second wide, in low
    detail, and red again."""
    async with serving(folder, says("One.", "Two.", "Three.", "Other.", "More."), renderer) as server:
        first = [{"role": "user", "content": [text_part("See "), image_url(png(*RED)), text_part(" here")]}]
        said = await server.answer(first)
        both = [*first, said, {"role": "user", "content": [image_url(png(*WIDE), detail="low"), image_url(png(*RED))]}]
        again = await server.answer(both)
        await server.answer([*both, again, user("And now?")])
        await server.answer([*first, assistant("One."), user("Another way")])
        yield server


async def export(server: Server, **options: Any) -> Export:
    name = options.setdefault("format", "npz")
    answer = await server.http.post("/trajectories/export", json={"session_id": "s", **options})
    assert answer.is_success, answer.text
    return read(answer.content, name)


async def refusal(server: Server, path: str = "/trajectories/export", **body: Any) -> str:
    answer = await server.http.post(path, json=body)
    assert answer.status_code == 400
    return str(answer.json()["error"]["message"])


def runs(ids: Sequence[int], token: int) -> list[tuple[int, int]]:
    """Start and length of every run of a token."""
    found, at = [], 0
    for each, group in groupby(ids):
        length = len(list(group))
        if each == token:
            found.append((at, length))
        at += length
    return found


def spans(sample: Sample) -> list[tuple[int, int]]:
    return [(image["start"], image["length"]) for image in sample.images]


@pytest.mark.parametrize("options", LAYOUTS, ids=lambda options: options["layout"])
async def test_spans_are_the_placeholders_of_the_model_and_none_is_trained(
    tmp_path: Path, vision_renderer: Renderer, options: dict[str, Any]
) -> None:
    assert vision_renderer.images is not None
    token = vision_renderer.images.token
    async with told(tmp_path, vision_renderer) as server:
        found = await export(server, **options)
    assert any(len(sample.images) == 3 for sample in found.samples)
    for sample in found.samples:
        assert spans(sample) == runs(sample.input_ids.tolist(), token)
        assert {image["digest"] for image in sample.images} <= set(FILES)
        assert not sample.loss_mask[sample.input_ids == token].any()
        assert all((i["width"], i["height"]) == FILES[i["digest"]][2:4] for i in sample.images)


async def test_no_image_of_a_request_or_an_export_is_decoded_on_the_event_loop(
    tmp_path: Path, vision_renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = noting_loops(monkeypatch)
    async with told(tmp_path, vision_renderer) as server:
        assert held == [False, False]
        await export(server, multi_modal_inputs=True)
    assert held == [False] * 4


@pytest.mark.parametrize("inputs", [False, "auto"])
async def test_a_sampled_placeholder_is_not_trained_and_is_named(
    tmp_path: Path, vision_renderer: Renderer, inputs: bool | str
) -> None:
    assert vision_renderer.images is not None
    token = vision_renderer.images.token
    said = vision_renderer.encode("I <|image_pad|> see.<|im_end|>")
    async with serving(tmp_path, play([Reply(said)]), vision_renderer) as server:
        await server.answer([{"role": "user", "content": [image_url(png(*RED)), text_part("What is it?")]}])
        found = await export(server, multi_modal_inputs=inputs)
    [sample] = found.samples
    assert sample.input_ids[sample.loss_mask == 1].tolist() == [each for each in said if each != token]
    assert found.untrained_tokens == {"placeholder": 1}


@pytest.mark.parametrize("name", FORMATS)
async def test_bytes_are_those_that_were_sent_and_are_read_once_each(
    tmp_path: Path, vision_renderer: Renderer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    plain = StoredImages.read

    async def counted(self: StoredImages, digests: Sequence[str]) -> list[ImageFile]:
        asked.append(list(digests))
        return await plain(self, digests)

    async with told(tmp_path, vision_renderer) as server:
        monkeypatch.setattr(StoredImages, "read", counted)
        found = await export(server, format=name, layout="individual", images="bytes")
    assert sorted(asked) == sorted([digest] for digest in FILES)
    assert {digest: image.data for digest, image in found.images.items()} == {
        digest: file.data for digest, file in FILES.items()
    }
    for digest, image in found.images.items():
        assert (image.media_type, image.width, image.height) == FILES[digest][1:4]
        assert image.pillow().tobytes() == decode_image(FILES[digest].data).tobytes()


async def test_references_are_the_default_and_their_bytes_are_at_the_session(
    tmp_path: Path, vision_renderer: Renderer
) -> None:
    async with told(tmp_path, vision_renderer) as server:
        found = await export(server)
        assert found.images == {}
        digest = found.samples[0].images[0]["digest"]
        answer = await server.http.get(f"/rl/sessions/{found.samples[0].session_id}/images/{digest}")
    assert answer.content == FILES[digest].data


@pytest.mark.parametrize("options", LAYOUTS, ids=lambda options: options["layout"])
async def test_inputs_are_those_of_the_processor_and_positions_those_of_the_model(
    tmp_path: Path, vision_renderer: Renderer, vision_folder: Path, options: dict[str, Any]
) -> None:
    assert vision_renderer.images is not None
    token, vision = vision_renderer.images.token, vision_renderer.images.vision
    async with told(tmp_path, vision_renderer) as server:
        found = await export(server, multi_modal_inputs=True, **options)
    model = model_in(vision_folder)
    for sample in found.samples:
        decoded = [(decode_image(FILES[i["digest"]].data), i.get("detail", "")) for i in sample.images]
        expected = vision.inputs(decoded, tensors="np")
        inputs = sample.multi_modal_inputs
        assert inputs is not None and inputs.keys() == expected.keys()
        assert all(np.array_equal(inputs[name], expected[name]) for name in expected)
        if options["layout"] != "tree":
            assert np.array_equal(told_positions(sample), positions(model, sample, token))


async def test_positions_are_those_of_qwen3_vl_too(tmp_path: Path, vision_folders: dict[str, Path]) -> None:
    renderer = load_renderer(Settings(), vision_folders["qwen3_vl"])
    assert renderer.images is not None
    async with told(tmp_path, renderer) as server:
        found = await export(server, multi_modal_inputs=True)
    model = model_in(vision_folders["qwen3_vl"])
    for sample in found.samples:
        assert spans(sample) == runs(sample.input_ids.tolist(), renderer.images.token)
        assert np.array_equal(told_positions(sample), positions(model, sample, renderer.images.token))


def told_positions(sample: Sample) -> np.ndarray[Any, Any]:
    assert sample.mrope_position_ids is not None
    return sample.mrope_position_ids


def model_in(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, local_files_only=True).model


def positions(model: Any, sample: Sample, token: int) -> np.ndarray[Any, Any]:
    """What the model computes of the kept tokens; 0 elsewhere."""
    import torch

    there = sample.attention_mask.astype(bool)
    ids = torch.tensor(sample.input_ids[there][None], dtype=torch.int64)
    grids = (sample.multi_modal_inputs or {}).get("image_grid_thw")
    kinds = (ids == token).int()
    rows = None if grids is None else torch.tensor(grids)
    found, _ = model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=rows)
    out = np.zeros((3, len(there)), np.int64)
    out[:, there] = found[:, 0].numpy()
    return out


async def test_positions_of_a_tree_are_those_of_its_paths(tmp_path: Path, vision_renderer: Renderer) -> None:
    async with told(tmp_path, vision_renderer) as server:
        [tree] = (await export(server, multi_modal_inputs=True, layout="tree")).samples
        alone = (await export(server, multi_modal_inputs=True, layout="individual")).samples
    offsets, starts = tree.extra["node_offsets"].tolist(), tree.extra["node_positions"].tolist()
    by_id = {sample.interaction_id: sample for sample in alone}
    assert tree.mrope_position_ids is not None
    for node, name in enumerate(tree.interaction_ids):
        part = tree.mrope_position_ids[:, offsets[node] : offsets[node + 1]]
        whole = by_id[name].mrope_position_ids
        assert whole is not None
        assert np.array_equal(part, whole[:, starts[node] :])


async def test_a_model_that_does_not_see_refuses_inputs_by_name_and_takes_auto(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        await server.answer([user("hi")])
        said = await refusal(server, session_id="s", multi_modal_inputs=True)
        assert "'multi_modal_inputs'" in said and "sees no images" in said
        claim = {"export": {"multi_modal_inputs": True}}
        assert "'multi_modal_inputs'" in await refusal(server, "/trajectories/claim", **claim)
        [sample] = (await export(server, multi_modal_inputs="auto")).samples
        assert sample.multi_modal_inputs is None and sample.mrope_position_ids is None
        [plain] = (await export(server)).samples
        assert sample.extra.keys() == plain.extra.keys()


async def test_a_server_that_lacks_the_extra_says_how_to_get_it(tmp_path: Path) -> None:
    blind = copy(tiny_renderer())
    blind.blind = "the package PIL is missing; pip install 'tokengrove[images]'"
    async with serving(tmp_path, always(), blind) as server:
        assert blind.blind in await refusal(server, multi_modal_inputs=True)


async def test_a_sample_without_images_of_a_model_that_sees_has_empty_inputs_and_positions(
    tmp_path: Path, vision_renderer: Renderer
) -> None:
    async with serving(tmp_path, always(), vision_renderer) as server:
        await server.answer([user("hi")])
        [sample] = (await export(server, multi_modal_inputs="auto")).samples
    assert sample.multi_modal_inputs == {}
    assert not sample.has_inputs
    counted = np.arange(len(sample.input_ids))
    assert np.array_equal(told_positions(sample), np.stack([counted] * 3))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"images": "all"}, "'images' must be one of bytes, references, none"),
        ({"multi_modal_inputs": "yes"}, "'multi_modal_inputs' must be true, false or \"auto\""),
        ({"images": "bytes", "outline": True}, "'images': references"),
        ({"multi_modal_inputs": True, "images": "none"}, "leave out 'images'"),
        ({"multi_modal_inputs": True, "outline": True}, "'outline'"),
        ({"multi_modal_inputs": True, "format": "parquet"}, "use npz, safetensors, arrow or json"),
    ],
)
async def test_options_that_do_not_go_together_are_refused(
    tmp_path: Path, vision_renderer: Renderer, body: dict[str, Any], expected: str
) -> None:
    async with serving(tmp_path, always(), vision_renderer) as server:
        assert expected in await refusal(server, **body)


async def test_a_claim_has_the_images_of_its_samples(tmp_path: Path, vision_renderer: Renderer) -> None:
    async with told(tmp_path, vision_renderer) as server:
        await server.ok("/s/rl/end_session", {})
        body = {"export": {"format": "npz", "images": "bytes", "multi_modal_inputs": True}}
        answer = await server.http.post("/trajectories/claim", json=body)
    found = read(answer.content, "npz")
    assert {digest: image.data for digest, image in found.images.items()} == {d: f.data for d, f in FILES.items()}
    assert all(sample.has_inputs for sample in found.samples)


async def test_clients_give_the_images_of_all_pages_and_of_a_claim(tmp_path: Path, vision_renderer: Renderer) -> None:
    blue = image_file(56, 56, 3)
    async with told(tmp_path, vision_renderer) as server, AsyncClient(app=server.app) as client:
        await server.answer([{"role": "user", "content": [image_url(blue.data)]}], session="t")
        pages = await client.export(limit=1, images="bytes", multi_modal_inputs="auto", format="safetensors")
        for name in ("s", "t"):
            await server.ok(f"/{name}/rl/end_session", {})
        claim = await client.claim(limit=2, export={"images": "bytes"})
        digest = pages.samples[0].images[0]["digest"]
        assert await client.image("s", digest) == pages.image(digest).data
    expected = {**{digest: file.data for digest, file in FILES.items()}, blue.digest: blue.data}
    assert claim.export is not None
    assert {digest: image.data for digest, image in pages.images.items()} == expected
    assert {digest: image.data for digest, image in claim.export.images.items()} == expected
    assert all(sample.has_inputs for sample in pages.samples)
    assert not any(sample.has_inputs for sample in claim.export.samples)


async def test_an_image_that_was_deleted_meanwhile_is_an_error_that_says_so(
    tmp_path: Path, vision_renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with told(tmp_path, vision_renderer) as server:
        monkeypatch.setattr(StoredImages, "read", _nothing)
        answer = await server.http.post("/trajectories/export", json={"format": "safetensors", "images": "bytes"})
    assert answer.status_code == 404
    assert "was deleted while this export ran" in answer.json()["error"]["message"]


async def _nothing(self: StoredImages, digests: Sequence[str]) -> list[ImageFile]:
    return []


async def test_messages_of_an_export_say_which_images_they_have(tmp_path: Path, vision_renderer: Renderer) -> None:
    async with told(tmp_path, vision_renderer) as server:
        found = await export(server, include="messages", layout="individual")
    message = found.samples[0].turns[0]["messages"][-2]
    red = image_file(*RED)
    assert message["content"] == "See  here"
    assert message["images"] == [{"digest": red.digest, "at": 4, "width": 100, "height": 80}]
