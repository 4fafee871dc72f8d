"""The side columns of an export: which ones its samples have, and those of a session.

Their dtypes and shapes are known before the first sample, because some formats begin with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from proxy.api.export_request import ParsedExport
from proxy.api.teacher_columns import teacher_shapes
from proxy.side_columns.columns import DECLARED, Columns, SideShape
from proxy.store.recordings import SessionReads
from proxy.trajectory.layout_options import LayoutOptions
from proxy.types import SessionRecord
from tokengrove.errors import InvalidRequest
from tokengrove.options.export import ExportFormat
from tokengrove.options.start import Replay

_BY_REQUEST = (ExportFormat.JSON, ExportFormat.JSONL, ExportFormat.AREAL)
"""Formats that have side columns only if the request names them: they are text, several times as long."""


class ExportColumns:
    """Reads the side columns of the sessions of an export."""

    def __init__(self, recordings: SessionReads) -> None:
        self._recordings = recordings

    async def chosen(self, wanted: ParsedExport, page: Sequence[SessionRecord]) -> LayoutOptions:
        """The options with the columns that the sessions of a page have.

        Raises InvalidRequest if two sessions have a column in different shapes.
        """
        asked = wanted.options.replay
        if asked is None:
            asked = frozenset() if wanted.format in _BY_REQUEST else frozenset(Replay)
        taught = teacher_shapes(wanted.options.teachers)
        if not asked or wanted.options.outline:
            return replace(wanted.options, columns=taught)
        kinds = await self._recordings.column_kinds([record.session_id for record in page])
        columns = _merged(kind for kind in kinds if DECLARED[kind.name].of in asked)
        return replace(wanted.options, columns=columns + taught, shows=asked)

    async def of(self, session_id: str, options: LayoutOptions) -> Mapping[str, Columns]:
        """The recorded columns of a session by interaction id."""
        names = [shape.name for shape in options.columns if shape.name in DECLARED]
        return await self._recordings.load_columns(session_id, names) if names else {}


def _merged(kinds: Iterable[SideShape]) -> tuple[SideShape, ...]:
    """One kind for each name, in the order of their declaration, with the widest dtype and the longest partial rows."""
    found: dict[str, SideShape] = {}
    for kind in kinds:
        known = found.setdefault(kind.name, kind)
        inner = known.inner
        if DECLARED[kind.name].partial:
            inner = (max(*known.inner, *kind.inner),)
        elif inner != kind.inner:
            raise InvalidRequest(
                f"the sessions have {kind.name} of the shapes {known.inner} and {kind.inner}, as of two models: export "
                "them one by one ('session_ids'), or leave the column out ('replay')",
                param="replay",
            )
        found[kind.name] = known._replace(dtype=np.result_type(known.dtype, kind.dtype), inner=inner)
    return tuple(found[name] for name in DECLARED if name in found)
