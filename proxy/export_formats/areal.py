"""The format of AReaL's `export_trajectories`, which AReaL's own client reads: tensors are their bytes in base64.

In addition to `interactions`, the answer has the `samples` (labels), `sessions` and `cursor` of other formats. An
interaction has its `parent` and, if messages are included, `messages` and `output_message_list`. AReaL's client ignores
all of these.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxy.export_formats.encoder import Entry, Fields, dumps
from proxy.export_formats.image_table import ImageTable, Pieces
from proxy.export_formats.spool import Scratch
from proxy.export_formats.text import image_object
from proxy.trajectory.sample_row import Labels, SampleRow

_OPTIONAL = ("token_rewards", "unmasked_logprobs", "mrope_position_ids")
_INTEGERS = ("input_ids", "loss_mask", "versions")


class ArealEncoder:
    """`{"interactions": {id: {"tensor_dict", "reward", "interaction_id", "parent"}}, "samples": [labels],
    "images", "sessions", "cursor"}`; `images` as in format json."""

    media_type = "application/json"

    def __init__(self, images: ImageTable, side: Sequence[str] = ()) -> None:
        self._images, self._optional = images, (*_OPTIONAL, *side)
        self._entries: list[Entry] = []
        self._labels = Scratch()
        self._between = b'{"interactions":{'

    def add(self, rows: Iterable[SampleRow], entry: Entry) -> Pieces:
        self._entries.append(entry)
        for row in rows:
            self._images.note(row)
            labels = row.labels()
            name = labels["interaction_id"]
            first = self._between != b","
            self._labels.write(dumps(labels) if first else b"," + dumps(labels))
            yield self._between + dumps(name) + b":" + dumps(_interaction(row, labels, self._optional))
            self._between = b","

    def finish(self, end: Fields) -> Pieces:
        opening = b"" if self._between == b"," else self._between
        yield opening + b'},"samples":['
        yield from self._labels.chunks()
        yield b"]"
        yield from image_object(self._images)
        yield b',"sessions":' + dumps(self._entries) + b"," + dumps(end)[1:]

    def close(self) -> None:
        self._entries.clear()
        self._labels.close()


def _interaction(row: SampleRow, labels: Labels, optional: Sequence[str]) -> dict[str, Any]:
    columns = row.columns()
    tensors: dict[str, NDArray[Any]] = {column: columns[column].astype(np.int64)[None] for column in _INTEGERS}
    tensors |= {column: columns[column][None] for column in ("logprobs", "attention_mask")}
    tensors["rewards"] = columns["rewards"]
    tensors |= {name: columns[name][None] for name in optional if name in columns}
    return {
        "tensor_dict": {column: _tensor(values) for column, values in tensors.items()},
        "reward": float(columns["rewards"][0]),
        "interaction_id": labels["interaction_id"],
        "parent": labels["turns"][-1]["parent_id"],
        **_conversation(labels["turns"]),
    }


def _conversation(turns: Sequence[Labels]) -> dict[str, list[Any]]:
    """The request's messages and the answer under AReaL's names; nothing if messages were not included."""
    told: list[Any] = [message for turn in turns for message in turn.get("messages", ())]
    return {"messages": told[:-1], "output_message_list": told[-1:]} if told else {}


def _tensor(values: NDArray[Any]) -> dict[str, Any]:
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return {
        "type": "tensor",
        "data": b64encode(little.tobytes()).decode("ascii"),
        "shape": list(values.shape),
        "dtype": f"torch.{values.dtype.name}",
    }
