"""Teacher columns of an export: models that did not sample the tokens score them, once, when an export first asks.

All scores of an export by one teacher are of one version, which is resolved at the export's start: a trained model that
gets new weights meanwhile is an error. Scores are stored as side columns of the turns. They are found again by route,
model, version, temperature and `top_k`; those of a trained model only by the process that made them, because versions
may begin again after a restart.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np

from proxy.api.prompt_scores import begin_scores, scored_output, scores_of
from proxy.images.image_pool import ImagePool
from proxy.resources.senders import Sender
from proxy.side_columns.columns import DECLARED, SCORES, Columns, SideShape
from proxy.side_columns.rows import SideColumn, SideRows
from proxy.store.recordings import Recordings, SessionReads
from proxy.store.session_query import Wanted
from proxy.store.stored_images import StoredImages
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.tree import Branch, build_tree
from proxy.turns.route import EngineRoute
from proxy.turns.scores import Scores, check_scores, check_tokens
from proxy.turns.turns import Turns
from proxy.types import SessionRecord
from tokengrove.errors import EngineUnavailable, InvalidRequest, ModelNotFound, brief
from tokengrove.options.export import Teacher
from tokengrove.options.model import RouteKind

_LOGPROBS, _TOP_IDS, _TOP_LOGPROBS = "logprobs", "top_token_ids", "top_logprobs"
_F32, _U32 = np.dtype(np.float32), np.dtype(np.uint32)
_AT_ONCE = 64
"""The turns that are scored before their columns are stored."""


class Served(NamedTuple):
    """A teacher at an export's start: its route, and the version that scores. `adapter`: None for the base model.
    `process`: identifies this process.
    """

    teacher: Teacher
    route: EngineRoute
    adapter: int | None
    version: int
    process: str

    def stored(self, what: str) -> str:
        """The name of a stored column."""
        trained = self.route.declared is None or self.route.declared.kind is RouteKind.POLICY
        of = f"{self.route.name}@{self.version}" if self.adapter is not None else f"{self.route.name}#{self.version}"
        made = f"{self.route.model} {of} t{self.teacher.temperature:g} k{self.teacher.top_k}"
        return f"{SCORES}{made}{f' {self.process}' if trained else ''} {what}"

    @property
    def columns(self) -> Mapping[str, str]:
        """Names of columns in samples by their stored names."""
        return {self.stored(what): f"{self.teacher.name}_{what}" for what in _columns(self.teacher)}


class Teachers:
    """Resolves the teachers of exports."""

    def __init__(self, turns: Turns, recordings: Recordings, images: ImagePool) -> None:
        self._turns, self._recordings, self._images = turns, recordings, images
        self._reads: SessionReads = recordings
        self._process = uuid.uuid4().hex

    def over(self, reads: SessionReads, images: StoredImages) -> Teachers:
        """These, for sessions that are read elsewhere. Scores are stored only of turns that the database has."""
        other = copy(self)
        other._reads, other._images = reads, ImagePool(images.read, 0)
        return other

    def begin(self, teachers: Sequence[Teacher], sender: Sender) -> Scoring:
        """Resolve the teachers of an export of a sender, which must call `Scoring.end`.

        Raises ModelNotFound, EngineIncapable, UnsupportedParameter and EngineUnavailable.
        """
        scoring = Scoring(self._turns, self._reads, self._recordings, self._images, sender)
        try:
            for index, teacher in enumerate(teachers):
                scoring.served.append(self._served(teacher, f"teachers[{index}].model"))
        except BaseException:
            scoring.end()
            raise
        return scoring

    def _served(self, teacher: Teacher, param: str) -> Served:
        routes = self._turns.routes
        if not routes.names.declared and teacher.model not in (None, routes.main.model):
            message = f"the model {brief(teacher.model or '')} is not served; this server has no table of models"
            raise ModelNotFound(message, param=param)
        named = routes.names.find(teacher.model or "")
        route = routes.engine(named.route)
        check_scores(route.gate.info(), teacher.temperature)
        adapter = route.begin(None, named.version)
        version = route.gate.info().weight_version if adapter is None else adapter
        return Served(teacher, route, adapter, version, self._process)


class Scoring:
    """The scores of one export. `reads` has its sessions."""

    def __init__(
        self, turns: Turns, reads: SessionReads, recordings: Recordings, images: ImagePool, sender: Sender
    ) -> None:
        self._turns, self._reads, self._recordings = turns, reads, recordings
        self._images, self._sender = images, sender
        self.served: list[Served] = []

    def end(self) -> None:
        """Give the versions back."""
        for served in self.served:
            served.route.adapters.end(served.adapter)

    def of(self, record: SessionRecord) -> list[Served]:
        """The teachers of a session: of those with one name, the first whose metadata fits."""
        fitting = [served for served in self.served if _fits(served.teacher, record)]
        return list({served.teacher.name: served for served in reversed(fitting)}.values())

    async def columns(self, record: SessionRecord, options: LayoutOptions) -> Mapping[str, Columns]:
        """The teacher columns of a session by interaction id, by their names in samples; missing ones are computed.

        Raises the errors of `turns.scores.score`, InvalidRequest for a turn with tokens of another tokenizer, and
        EngineUnavailable if the weights of a teacher changed since the export began.
        """
        found: dict[str, dict[str, SideColumn]] = defaultdict(dict)
        if not (teachers := self.of(record)):
            return found
        nodes = build_tree(await self._reads.load_tokens(record.session_id))
        sampled = [node for node in nodes.values() if node.interaction.output_ids and options.takes(node.interaction)]
        for served in teachers:
            stored = await self._reads.load_columns(record.session_id, list(served.columns))
            missing = [node for node in sampled if stored.get(node.interaction.id, {}).keys() != served.columns.keys()]
            for first in range(0, len(missing), _AT_ONCE):
                made = await self._scored(served, missing[first : first + _AT_ONCE])
                await self._recordings.add_scores(record.session_id, made)
                stored |= made
            for interaction_id, columns in stored.items():
                found[interaction_id] |= {served.columns[name]: column for name, column in columns.items()}
        return found

    async def _scored(self, served: Served, nodes: Sequence[Branch]) -> dict[str, dict[str, SideColumn]]:
        """Score the outputs of turns; return their columns by stored names."""
        teacher, routes = served.teacher, self._turns.routes
        for turn in {node.interaction.route: node.interaction for node in nodes}.values():
            await asyncio.to_thread(check_tokens, routes, turn, served.route)
        wanted = [scored_output(node, self._images) for node in nodes]
        context = served.route.gate.info().context_length
        for node, each in zip(nodes, wanted, strict=True):
            if len(each.ids) >= context:  # the engine samples one token more
                turn = node.interaction
                raise InvalidRequest(
                    f"the turn {turn.id} of the session {brief(turn.session_id)} has {len(each.ids)} tokens with its "
                    f"prompt, and the teacher {brief(teacher.name)} takes {context - 1}: leave the turn out, or name a "
                    "teacher with a longer context",
                    param="teachers",
                )
        task = begin_scores(
            self._turns, served.route, served.adapter, wanted, teacher.temperature, teacher.top_k, self._sender
        )
        found = await scores_of(task, task)
        for scores in found:
            if scores.version != served.version:
                raise EngineUnavailable(
                    f"the weights of the teacher {brief(teacher.name)} changed from version {served.version} to "
                    f"{scores.version} since the export began: export again"
                )
        return {
            node.interaction.id: _stored(served, node.interaction.prompt_tokens, scores)
            for node, scores in zip(nodes, found, strict=True)
        }

    def told(self, record: SessionRecord) -> dict[str, Any]:
        """What the entry of a session says of its teachers; nothing without any."""
        told = {
            served.teacher.name: {
                "model": served.route.name or served.route.model,
                "version": served.version,
                "temperature": served.teacher.temperature,
            }
            for served in self.of(record)
        }
        return {"teachers": told} if told else {}


def teacher_shapes(teachers: Sequence[Teacher]) -> tuple[SideShape, ...]:
    """The columns of samples."""
    found = {}
    for teacher in teachers:
        for what, (dtype, inner) in _columns(teacher).items():
            name = f"{teacher.name}_{what}"
            found[name] = SideShape(name, dtype, inner)
    return tuple(found.values())


def check_teachers(teachers: Sequence[Teacher], taken: Collection[str]) -> None:
    """Raise InvalidRequest for a name that cannot begin the name of a column, or teachers of one name that differ in
    their columns. `taken`: the names of the other columns.
    """
    first: dict[str, Teacher] = {}
    for index, teacher in enumerate(teachers):
        name, param = teacher.name, f"teachers[{index}].name"
        if not (name.isascii() and name.isidentifier() and len(name) <= 64):
            message = f"'{param}' must be 1 to 64 letters, digits and underscores, not {brief(name)}"
            raise InvalidRequest(message, param=param)
        for what in _columns(teacher):
            if f"{name}_{what}" in taken or f"{name}_{what}" in DECLARED:
                raise InvalidRequest(f"'{param}': samples have another column {name}_{what}", param=param)
        if first.setdefault(name, teacher).top_k != teacher.top_k:
            raise InvalidRequest(
                f"'teachers[{index}].top_k' is {teacher.top_k}, but another teacher {brief(name)} has "
                f"{first[name].top_k}: teachers of one name have the same columns",
                param=f"teachers[{index}].top_k",
            )


def _columns(teacher: Teacher) -> Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """The dtype and the shape of a row of each column."""
    columns: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {_LOGPROBS: (_F32, ())}
    if teacher.top_k:
        columns |= {_TOP_IDS: (_U32, (teacher.top_k,)), _TOP_LOGPROBS: (_F32, (teacher.top_k,))}
    return columns


def _stored(served: Served, start: int, scores: Scores) -> dict[str, SideColumn]:
    """The columns of an output by their stored names. `start`: the position of its first token."""
    values: dict[str, Any] = {_LOGPROBS: np.asarray(scores.logprobs, _F32)}
    if k := served.teacher.top_k:
        pairs = np.asarray(scores.tops, np.float64).reshape(len(scores.logprobs), k, 2)
        values |= {_TOP_IDS: pairs[..., 0].astype(_U32), _TOP_LOGPROBS: pairs[..., 1].astype(_F32)}
    return {served.stored(what): SideColumn(start, SideRows(rows)) for what, rows in values.items()}


def _fits(teacher: Teacher, record: SessionRecord) -> bool:
    """Whether the metadata of a session meets the conditions of a teacher."""
    conditions: Mapping[str, Wanted] = teacher.metadata or {}
    return all(name in record.metadata and wanted.fits(record.metadata[name]) for name, wanted in conditions.items())
