"""Images in every format: each is in an answer once, and the client's readers give what the encoder was given."""

from __future__ import annotations

import io
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from proxy.export_formats.create_encoder import encoder
from proxy.export_formats.image_table import ImageEntry, Pieces, WantedImage
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.layouts import lay_out
from proxy.types import ImageFile, Interaction, PlacedImage, SessionRecord
from tests.interactions import interaction
from tokengrove.client.export import Export
from tokengrove.client.images import ImageBytes, concatenated
from tokengrove.client.readers.read import read, read_page
from tokengrove.errors import InvalidRequest
from tokengrove.options.export import ExportFormat, Images, Layout, Padding

RED, BLUE = "a" * 64, "b" * 64
FILES = {
    RED: ImageFile(RED, "image/png", 56, 28, b"\x89PNG red \x00\xff"),
    BLUE: ImageFile(BLUE, "image/jpeg", 28, 28, b"\xff\xd8 blue"),
}
FORMATS = tuple(ExportFormat)
PADDING = Padding(prompt_length=20, response_length=20)
LAYOUTS = {
    "individual": LayoutOptions(layout=Layout.INDIVIDUAL),
    "concat": LayoutOptions(layout=Layout.CONCAT),
    "tree": LayoutOptions(layout=Layout.TREE),
    "padded": LayoutOptions(layout=Layout.PADDED, padding=PADDING),
}
TOGETHER = [
    (name, layout)
    for name in FORMATS
    for layout in LAYOUTS
    if name is not ExportFormat.AREAL or layout in ("individual", "concat")
]


def nodes(session: str) -> list[Interaction]:
    """Three turns. Red is shown in the first, red and blue in the second, in low detail; the third shows none."""
    first = interaction("0", suffix=[1, 90, 90, 2], output=[3])
    first.images = (PlacedImage(RED, 1, 2, 56, 28),)
    second = interaction("1", parent="0", prefix=5, suffix=[90, 4, 91, 91, 91, 5], output=[6, 7], seq=1)
    second.images = (PlacedImage(RED, 5, 1, 56, 28, "low"), PlacedImage(BLUE, 7, 3, 28, 28))
    third = interaction("2", suffix=[8, 9], output=[10], seq=2)
    return [
        replace(node, session_id=session, id=f"{session}{node.id}") for node in _renamed(session, first, second, third)
    ]


def _renamed(session: str, *found: Interaction) -> Iterator[Interaction]:
    for node in found:
        yield replace(node, parent_id=None if node.parent_id is None else session + node.parent_id)


def made_of(digest: str, detail: str) -> dict[str, NDArray[Any]]:
    """What a processor might make of an image: other patches for each detail."""
    patches = {RED: 4, BLUE: 6}[digest] - 2 * (detail == "low")
    values = np.arange(patches * 3, dtype=np.float32).reshape(patches, 3) + len(detail) + (digest == BLUE) * 100
    return {"pixel_values": values, "image_grid_thw": np.array([[1, 2, patches // 2]], np.int64)}


def positions(images: Sequence[PlacedImage], tokens: int) -> NDArray[np.int64]:
    """Three lines that differ, and depend on the images."""
    counted = np.arange(tokens, dtype=np.int64)
    return np.stack([counted, counted + len(images), counted + 2 * sum(image.start for image in images)])


class Answer:
    """An answer of two sessions, and the images that its encoder wanted."""

    def __init__(self, name: ExportFormat, options: LayoutOptions) -> None:
        self.wanted: list[WantedImage] = []
        self.most_alive = 0
        self._alive: list[weakref.ref[Any]] = []
        self._inputs = options.multi_modal_inputs is True
        rule = positions if options.mrope else None
        encoding = encoder(name, options)
        pieces: list[bytes] = []
        for session in ("s", "t"):
            laid = lay_out(SessionRecord(session), nodes(session), options, positions=rule)
            pieces += self._sent(encoding.add(laid.rows, {"session_id": session, **laid.entry}))
        pieces += self._sent(encoding.finish({"cursor": None}))
        encoding.close()
        self.body = b"".join(pieces)

    def _sent(self, pieces: Pieces) -> Iterator[bytes]:
        entry: ImageEntry | None = None
        while True:
            try:
                piece = pieces.send(entry)
            except StopIteration:
                return
            entry = None
            if isinstance(piece, WantedImage):
                entry = self._entry(piece)
            else:
                yield piece

    def _entry(self, wanted: WantedImage) -> ImageEntry:
        self.wanted.append(wanted)
        self.most_alive = max(self.most_alive, sum(each() is not None for each in self._alive))
        details = wanted.details if self._inputs else ()
        made = {detail: made_of(wanted.digest, detail) for detail in details}
        self._alive += [weakref.ref(values["pixel_values"]) for values in made.values()]
        return ImageEntry(FILES[wanted.digest], made)


def spans(export: Export) -> list[list[Mapping[str, Any]]]:
    return [[dict(image) for image in sample.images] for sample in export.samples]


@pytest.mark.parametrize(("name", "layout"), TOGETHER)
def test_every_format_has_the_same_spans_and_each_image_once(name: ExportFormat, layout: str) -> None:
    options = replace(LAYOUTS[layout], images=Images.BYTES)
    answer = Answer(name, options)
    export = read(answer.body, name)
    assert spans(export) == spans(read(Answer(ExportFormat.JSON, options).body, "json"))
    assert [each.digest for each in answer.wanted] == [RED, BLUE]
    assert {
        digest: (found.media_type, found.width, found.height, found.data) for digest, found in export.images.items()
    } == {digest: file[1:5] for digest, file in FILES.items()}
    assert export.image(BLUE).data == FILES[BLUE].data
    assert answer.body.count(FILES[BLUE].data) == (0 if name in ("json", "jsonl", "areal") else 1)
    placeholders = {(RED, ""): 90, (RED, "low"): 90, (BLUE, ""): 91}
    for sample in export.samples:
        for image in sample.images:
            ids = sample.input_ids[image["start"] : image["start"] + image["length"]]
            assert set(ids.tolist()) == {placeholders[image["digest"], image.get("detail", "")]}


@pytest.mark.parametrize("name", FORMATS)
def test_references_have_spans_and_no_image(name: ExportFormat) -> None:
    answer = Answer(name, LayoutOptions())
    export = read(answer.body, name)
    assert answer.wanted == []
    assert [len(each) for each in spans(export)] == [3, 0, 3, 0]
    assert export.images == {}
    with pytest.raises(InvalidRequest, match='images="bytes"'):
        export.image(RED)


@pytest.mark.parametrize("name", FORMATS)
def test_none_leaves_the_spans_out(name: ExportFormat) -> None:
    answer = Answer(name, LayoutOptions(images=Images.NONE))
    assert spans(read(answer.body, name)) == [[], [], [], []]
    assert answer.wanted == []


@pytest.mark.parametrize(("name", "layout"), [each for each in TOGETHER if each[0] is not ExportFormat.PARQUET])
def test_inputs_of_the_processor_are_concatenated_in_the_order_of_a_sample(name: ExportFormat, layout: str) -> None:
    answer = Answer(name, replace(LAYOUTS[layout], multi_modal_inputs=True, mrope=True))
    export = read(answer.body, name)
    assert answer.wanted == [WantedImage(RED, ("", "low")), WantedImage(BLUE, ("",))]
    for sample in export.samples:
        assert set(sample.image_table) == {image["digest"] for image in sample.images}
        made = [made_of(image["digest"], image.get("detail", "")) for image in sample.images]
        assert sample.multi_modal_inputs is not None
        assert sample.has_inputs == bool(made)
        assert set(sample.multi_modal_inputs) == ({"pixel_values", "image_grid_thw"} if made else set())
        for key, values in sample.multi_modal_inputs.items():
            expected = np.concatenate([each[key] for each in made])
            assert values.dtype == expected.dtype
            assert np.array_equal(values, expected)
        assert sample.mrope_position_ids is not None
        assert sample.mrope_position_ids.dtype == np.int64
        assert sample.mrope_position_ids.shape == (3, len(sample.input_ids))


@pytest.mark.parametrize("name", [name for name in FORMATS if name is not ExportFormat.PARQUET])
def test_positions_are_the_same_in_every_format(name: ExportFormat) -> None:
    export = read(Answer(name, LayoutOptions(multi_modal_inputs=True, mrope=True)).body, name)
    for sample in export.samples:
        placed = [PlacedImage(**image) for image in sample.images]
        assert sample.mrope_position_ids is not None
        assert np.array_equal(sample.mrope_position_ids, positions(placed, len(sample.input_ids)))


def test_an_npz_that_was_packed_is_not_unpacked() -> None:
    packed = io.BytesIO()
    np.savez_compressed(packed, metadata=np.zeros(2**20, np.uint8))
    with pytest.raises(InvalidRequest, match=r"metadata\.npy is compressed"):
        read(packed.getvalue(), "npz")


def test_positions_of_a_padded_sample_count_its_kept_tokens_only() -> None:
    options = replace(LAYOUTS["padded"], multi_modal_inputs=True, mrope=True)
    sample = read(Answer(ExportFormat.NPZ, options).body, "npz").samples[0]
    start, end = np.flatnonzero(sample.attention_mask)[[0, -1]]
    kept = [PlacedImage(**{**image, "start": image["start"] - int(start)}) for image in sample.images]
    assert sample.mrope_position_ids is not None
    assert np.array_equal(sample.mrope_position_ids[:, start : end + 1], positions(kept, int(end + 1 - start)))
    assert not sample.mrope_position_ids[:, :start].any()
    assert not sample.mrope_position_ids[:, end + 1 :].any()


def test_positions_of_a_tree_are_those_of_each_path() -> None:
    options = replace(LAYOUTS["tree"], multi_modal_inputs=True, mrope=True)
    sample = read(Answer(ExportFormat.NPZ, options).body, "npz").samples[0]
    whole, lone = nodes("s")[1], nodes("s")[2]
    path = (*nodes("s")[0].images, *whole.images)
    first = positions(path[:1], 5)
    second = positions(path, whole.prompt_tokens + 2)[:, 5:]
    third = positions((), lone.prompt_tokens + 1)
    assert sample.mrope_position_ids is not None
    assert np.array_equal(sample.mrope_position_ids, np.concatenate([first, second, third], axis=1))


@pytest.mark.parametrize("name", [name for name in FORMATS if name is not ExportFormat.PARQUET])
def test_one_image_is_in_memory_at_a_time(name: ExportFormat) -> None:
    options = LayoutOptions(multi_modal_inputs=True, mrope=True)
    assert Answer(name, options).most_alive == 0, "arrays of an image outlive its turn"


def test_numpy_and_the_library_of_safetensors_read_the_arrays_of_images() -> None:
    options = LayoutOptions(images=Images.BYTES, multi_modal_inputs=True, mrope=True)
    with np.load(io.BytesIO(Answer(ExportFormat.NPZ, options).body), allow_pickle=False) as archive:
        zipped = {name: archive[name] for name in archive.files if "/" in name}
        told = json.loads(archive["metadata"].tobytes())["images"]
    loaded = pytest.importorskip("safetensors.numpy").load(Answer(ExportFormat.SAFETENSORS, options).body)
    for arrays in (zipped, loaded):
        assert arrays[f"images/{RED}"].dtype == np.uint8
        assert arrays[f"images/{RED}"].tobytes() == FILES[RED].data
        assert np.array_equal(arrays[f"pixel_values/{RED}.low"], made_of(RED, "low")["pixel_values"])
        assert np.array_equal(arrays[f"image_grid_thw/{BLUE}"], made_of(BLUE, "")["image_grid_thw"])
    assert told[RED] == {"media_type": "image/png", "width": 56, "height": 28}


def test_arrow_readers_see_samples_only_and_the_images_in_the_stream_behind_them() -> None:
    pa = pytest.importorskip("pyarrow")
    file = pa.BufferReader(Answer(ExportFormat.ARROW, LayoutOptions(images=Images.BYTES)).body)
    samples = pa.ipc.open_stream(file).read_all()
    assert samples.num_rows == 4
    assert [image["digest"] for image in samples["images"][0].as_py()] == [RED, RED, BLUE]
    files = pa.ipc.open_stream(file).read_all().to_pylist()
    assert [(each["digest"], each["data"]) for each in files] == [(RED, FILES[RED].data), (BLUE, FILES[BLUE].data)]


def test_a_parquet_row_has_the_images_that_no_row_before_it_shows() -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    options = replace(LAYOUTS["individual"], images=Images.BYTES)
    table = parquet.read_table(io.BytesIO(Answer(ExportFormat.PARQUET, options).body))
    rows = [[each["digest"] for each in row or ()] for row in table["image_files"].to_pylist()]
    assert rows == [[RED], [BLUE], [], [], [], []]


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_without_images_is_the_same_under_every_option(name: ExportFormat) -> None:
    def body(images: Images) -> Any:
        encoding = encoder(name, LayoutOptions(images=images))
        laid = lay_out(SessionRecord("s"), nodes("s")[2:], LayoutOptions(images=images))
        pieces = [*encoding.add(laid.rows, {"session_id": "s"}), *encoding.finish({"cursor": None})]
        encoding.close()
        return b"".join(piece for piece in pieces if isinstance(piece, bytes))

    bodies = {images: body(images) for images in Images}
    if name in (ExportFormat.ARROW, ExportFormat.PARQUET):  # their schema is written before the first row
        found = [read_page(each, name) for each in bodies.values()]
        assert all(page.samples[0].images == () and page.images == {} for page in found)
    elif name is not ExportFormat.NPZ:  # a zip has the time of day
        assert len(set(bodies.values())) == 1


def test_arrays_that_do_not_fit_together_are_refused_with_the_way_out() -> None:
    sizes = {digest: np.zeros((1, 3, side, side), np.float32) for digest, side in ((RED, 4), (BLUE, 6))}
    table = {d: ImageBytes(d, "image/png", 1, 1, b"", {"auto": {"pixel_values": a}}) for d, a in sizes.items()}
    with pytest.raises(InvalidRequest, match=r"'pixel_values'.*Export.images\[digest\].inputs"):
        concatenated([{"digest": RED}, {"digest": BLUE}], table)
