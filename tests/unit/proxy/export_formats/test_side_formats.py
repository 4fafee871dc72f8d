"""Side columns in every format and layout: the client's readers give what the encoder was given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from proxy.export_formats.create_encoder import encoder
from proxy.side_columns.columns import Columns
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.layouts import lay_out
from proxy.types import Interaction, SessionRecord
from tests.interactions import interaction
from tests.side_columns import SHAPES, columns_of_all
from tokengrove.client.export import Export
from tokengrove.client.readers.read import read
from tokengrove.options.export import ExportFormat, Layout, Padding

LAYOUTS = {
    "individual": LayoutOptions(layout=Layout.INDIVIDUAL, columns=SHAPES),
    "concat": LayoutOptions(layout=Layout.CONCAT, columns=SHAPES),
    "tree": LayoutOptions(layout=Layout.TREE, columns=SHAPES),
    "padded": LayoutOptions(
        layout=Layout.PADDED, padding=Padding(prompt_length=20, response_length=20), columns=SHAPES
    ),
}
TOGETHER = [
    (name, layout)
    for name in ExportFormat
    for layout in LAYOUTS
    if name is not ExportFormat.AREAL or layout in ("individual", "concat")
]


def session(name: str) -> tuple[SessionRecord, list[Interaction], Mapping[str, Columns]]:
    """A fork of two answers, one of which lacks some rows; the session `bare` has no columns."""
    first = interaction(f"{name}0", suffix=[1, 2, 3], output=[4, 5])
    second = interaction(f"{name}1", parent=first.id, prefix=5, suffix=[6], output=[7, 8, 9], seq=1)
    third = interaction(f"{name}2", parent=first.id, prefix=5, suffix=[10, 11], output=[12], seq=2)
    nodes = [replace(node, session_id=name) for node in (first, second, third)]
    return SessionRecord(name), nodes, {} if name == "bare" else columns_of_all(nodes, {second.id: [5, 7]})


@pytest.mark.parametrize(("name", "layout"), TOGETHER)
def test_readers_give_the_columns_of_each_sample(name: ExportFormat, layout: str) -> None:
    options, wanted = LAYOUTS[layout], []
    encoding, pieces = encoder(name, options), list[bytes]()
    for each in ("s", "bare", "t"):
        record, nodes, columns = session(each)
        laid = lay_out(record, nodes, options, columns=columns)
        wanted += [{**row.labels(), **row.columns()} for row in laid.rows]
        pieces += [piece for piece in encoding.add(laid.rows, {"session_id": each}) if isinstance(piece, bytes)]
    pieces += [piece for piece in encoding.finish({"cursor": None}) if isinstance(piece, bytes)]
    encoding.close()
    found = read(b"".join(pieces), name)
    assert len(found.samples) == len(wanted)
    for sample, row in zip(found.samples, wanted, strict=True):
        assert sample.extra["replay"] == row["replay"]
        for column in NAMES:
            values = sample.extra[column]
            assert (values.dtype == row[column].dtype and values.flags.writeable) or name in TEXTS
            np.testing.assert_array_equal(values, row[column])


NAMES = ("routed_experts", "kept_ids", "kept_counts", "kept_logprobs", "top_token_ids", "top_logprobs")
TEXTS = (ExportFormat.JSON, ExportFormat.JSONL, ExportFormat.AREAL)


def test_an_export_without_columns_is_unchanged() -> None:
    """The bytes of every format are those of a session that has no columns."""
    record, nodes, columns = session("s")
    for name, layout in TOGETHER:
        options = replace(LAYOUTS[layout], columns=())
        bodies = [_encoded(name, options, record, nodes, each) for each in (columns, {})]
        assert bodies[0] == bodies[1]


def _encoded(
    name: ExportFormat,
    options: LayoutOptions,
    record: SessionRecord,
    nodes: list[Interaction],
    columns: Mapping[str, Columns],
) -> Export | bytes:
    encoding = encoder(name, options)
    laid = lay_out(record, nodes, options, columns=columns)
    pieces = [*encoding.add(laid.rows, {"session_id": "s"}), *encoding.finish({"cursor": None})]
    encoding.close()
    return b"".join(piece for piece in pieces if isinstance(piece, bytes))
