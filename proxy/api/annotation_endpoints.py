"""`POST /trajectories/annotate`: trainers tell what they computed of the tokens that they trained; and who reads it.

A value belongs to a sampled token of a turn, a trainer, a step and a name. It is stored once and never changes, so a
call can be repeated.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from starlette.requests import Request

from proxy.api.annotation_json import read_session, read_stream, sums_json, turns_json
from proxy.api.bodies import Bodies
from proxy.api.headers import headers_of
from proxy.api.http import JsonResponse, key_of
from proxy.api.known_fields import check_given
from proxy.protocols.fields import expect_list, expect_object, expect_text, optional_int, optional_text
from proxy.sessions.access import Access
from proxy.store.annotations import Annotations
from proxy.store.recordings import SessionReads
from proxy.telemetry.groups import ExportMetrics
from proxy.trajectory.mismatch import LOGPROBS, Drawn, Mismatch, ratio_of
from proxy.trajectory.told import Floats, Output, Told
from tokengrove.errors import AnnotatedOtherwise, InvalidRequest, NotFound, brief

logger = logging.getLogger(__name__)

_FIELDS = ("trainer", "step", "samples")
_OF_A_STREAM = ("trainer", "step", "stream")
_OF_A_SAMPLE = ("turns", "loss_mask", "streams", "scalars")
_NAME = re.compile(r"[\w.:@-]{1,64}", re.ASCII)
_MOST_SAMPLES, _MOST_NAMES, _MOST_STEP = 1024, 32, 2**53
_MOST_STEPS, _MOST_TURNS = 1000, 1000
_MOST_HELD = 16 * 2**20
"""The most values of a call: a stream is held for all tokens of an output."""
_LARGEST = float(np.finfo(np.float32).max)
_NUMBERS = frozenset({float, int, bool, type(None)})


class _Span(NamedTuple):
    """The place of a turn's output in a sample, [start, end), and the index of its first token in the output."""

    interaction_id: str
    start: int
    end: int
    first: int


@dataclass(frozen=True, slots=True)
class _Sample:
    """A parsed sample of L tokens: streams float32 [L], NaN where there is no value."""

    spans: Sequence[_Span]
    streams: Mapping[str, Floats]
    scalars: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Asked:
    trainer: str
    step: int
    samples: Sequence[_Sample]

    @property
    def interaction_ids(self) -> set[str]:
        return {span.interaction_id for sample in self.samples for span in sample.spans}


@dataclass(slots=True)
class _Turn:
    """What one call tells of a turn."""

    streams: dict[str, Floats] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)


class AnnotationEndpoints:
    """The endpoints."""

    def __init__(
        self,
        access: Access,
        annotations: Annotations,
        recordings: SessionReads,
        bodies: Bodies,
        mismatch: Mismatch,
        metrics: ExportMetrics,
    ) -> None:
        self._access, self._annotations, self._recordings, self._bodies = access, annotations, recordings, bodies
        self._mismatch, self._metrics = mismatch, metrics
        self._named: frozenset[Drawn] = frozenset()

    async def annotate(self, request: Request) -> JsonResponse:
        """Store what a trainer tells. The answer has the number of turns of which something is `new`."""
        self._access.check_trainer(key_of(request))
        with self._bodies.upload(request.scope, headers_of(request.scope), request.receive) as upload:
            body, size = await upload.decode_turn_object(await upload.read())
            asked = await upload.do(size, _parse, body)
            outputs = await self._annotations.load_outputs(asked.interaction_ids)
            told = await upload.do(size, _told, asked, outputs)
        new = await self._annotations.add(told)
        for (_, streams, _), parts in zip(told.turns, new, strict=True):
            if parts is not None and LOGPROBS in streams:
                self._mismatch.add(asked.trainer, parts)
        self._report()
        return JsonResponse({"turns": len(new), "new": sum(parts is not None for parts in new)})

    def _report(self) -> None:
        """Show the samplers in the metrics, and log those that are named since the last call or no longer."""
        named = frozenset(self._mismatch.named())
        seen = {
            (key.trainer, *key.sampler, str(each.version)): (each, key in named)
            for key, each in self._mismatch.seen.items()
        }
        self._metrics.mismatch.by = {labels: each.kl for labels, (each, _) in seen.items()}
        self._metrics.mismatch_ratio.by = {labels: ratio_of(each.log_ratio) for labels, (each, _) in seen.items()}
        self._metrics.mismatch_named.by = {labels: float(wrong) for labels, (_, wrong) in seen.items()}
        for key in sorted(named - self._named):
            logger.warning("sampler and trainer disagree", self._fields(key))
        for key in sorted(self._named - named):
            if key in self._mismatch.seen:
                logger.info("sampler and trainer agree again", self._fields(key))
        self._named = named

    def _fields(self, key: Drawn) -> dict[str, Any]:
        seen = self._mismatch.seen[key]
        told = {"trainer": key.trainer, **key.sampler._asdict(), "version": seen.version}
        shown = {name: value for name, value in told.items() if value != ""}
        return {**shown, "kl": seen.kl, "largest_ratio": ratio_of(seen.log_ratio), "turns": len(seen.turns)}

    async def steps(self, request: Request) -> JsonResponse:
        """The newest steps of `trainer`, or of all, with their sums; `before`: only earlier ones."""
        self._access.check_reader(key_of(request))
        query = _query(request, ("trainer", "before", "limit"))
        found = await self._annotations.steps(
            query.get("trainer"), _integer(query, "before"), _integer(query, "limit", 1, _MOST_STEPS) or 100
        )
        return JsonResponse({"steps": [sums_json(row) for row in found]})

    async def step(self, request: Request) -> JsonResponse:
        """The turns of a step, what their trainer told of them in sum, and the session of each."""
        self._access.check_reader(key_of(request))
        query = _query(request, ("cursor", "limit"))
        trainer, step = request.path_params["trainer"], _integer(request.path_params, "step")
        assert step is not None
        most = _integer(query, "limit", 1, _MOST_TURNS) or 100
        found = await self._annotations.of_step(trainer, step, query.get("cursor"), most)
        if not found and "cursor" not in query:
            raise NotFound(f"the trainer {brief(trainer)} told nothing of step {step}", param="step")
        turns = turns_json(found)
        cursor = turns[-1]["interaction_id"] if len(turns) == most else None
        return JsonResponse({"turns": turns, "cursor": cursor})

    async def mismatch(self, request: Request) -> JsonResponse:
        """The mismatch by trainer, server, weight version, dtype and quantisation; and the samplers that are named."""
        self._access.check_reader(key_of(request))
        query = _query(request, ("trainer", "first_step", "last_step"))
        found = await self._annotations.samplers(
            query.get("trainer"), _integer(query, "first_step"), _integer(query, "last_step")
        )
        named = [self._fields(key) for key in sorted(self._mismatch.named())]
        return JsonResponse(
            {"limit": self._mismatch.limit, "named": named, "samplers": [sums_json(row) for row in found]}
        )

    async def of_session(self, request: Request) -> JsonResponse:
        """What trainers told of each turn of a session: streams by name, values of samples, and sums.

        With `trainer`, `step` and `stream`, also the `values` of a stream, by interaction id.
        """
        self._access.check_reader(key_of(request))
        query, session = _query(request, _OF_A_STREAM), request.path_params["session"]
        found: dict[str, Any] = {"turns": await read_session(self._recordings, session)}
        if query:
            if missing := [name for name in _OF_A_STREAM if name not in query]:
                raise InvalidRequest(
                    f"'{missing[0]}' is required: a stream has a trainer, a step and a name", param=missing[0]
                )
            step = _integer(query, "step")
            assert step is not None
            found["values"] = await read_stream(self._recordings, session, query["trainer"], step, query["stream"])
        return JsonResponse(found)


def _query(request: Request, known: Sequence[str]) -> Mapping[str, str]:
    check_given(request.query_params, known)
    return request.query_params


def _integer(query: Mapping[str, str], name: str, least: int = 0, most: int = _MOST_STEP) -> int | None:
    if (text := query.get(name)) is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 17 and least <= int(text) <= most):
        raise InvalidRequest(f"'{name}' must be an integer of {least} to {most}", param=name)
    return int(text)


def _parse(body: Mapping[str, Any]) -> _Asked:
    check_given(body, _FIELDS)
    trainer = optional_text(body, "trainer") or "trainer"
    if not _NAME.fullmatch(trainer):
        raise InvalidRequest("'trainer' must be 1 to 64 characters of A-Z a-z 0-9 _ . : @ -", param="trainer")
    if (step := optional_int(body, "step", least=0, most=_MOST_STEP)) is None:
        raise InvalidRequest("'step' is required: the number of the trainer's step", param="step")
    samples = expect_list(body.get("samples"), "samples")
    if not 1 <= len(samples) <= _MOST_SAMPLES:
        raise InvalidRequest(f"'samples' must have 1 to {_MOST_SAMPLES} samples, not {len(samples)}", param="samples")
    return _Asked(trainer, step, [_sample(each, f"samples[{at}]") for at, each in enumerate(samples)])


def _sample(value: Any, at: str) -> _Sample:
    given = expect_object(value, at)
    check_given(given, _OF_A_SAMPLE, f"{at}.")
    spans = [
        span
        for index, turn in enumerate(expect_list(given.get("turns"), f"{at}.turns"))
        if (span := _span(turn, f"{at}.turns[{index}]")) is not None
    ]
    if not spans:
        raise InvalidRequest(f"'{at}.turns' has no turn with a span: send the sample's `turns` as exported", param=at)
    streams = {name: _stream(values, name, at) for name, values in _named(given, "streams", at)}
    scalars = {name: _scalar(number, f"{at}.scalars.{name}") for name, number in _named(given, "scalars", at)}
    if not streams and not scalars:
        raise InvalidRequest(f"'{at}' has neither streams nor scalars", param=at)
    mask = None if given.get("loss_mask") is None else _numbers(given["loss_mask"], f"{at}.loss_mask")
    lengths = {len(each) for each in (*streams.values(), *(() if mask is None else (mask,)))}
    if len(lengths) > 1:
        raise InvalidRequest(f"the streams and the loss_mask of '{at}' must have one length, not {lengths}", param=at)
    if lengths and max(span.end for span in spans) > (length := lengths.pop()):
        raise InvalidRequest(f"'{at}' has streams of {length} tokens, but a span of its turns ends later", param=at)
    if mask is not None:
        streams = {name: np.where(mask != 0, stream, np.float32("nan")) for name, stream in streams.items()}
    return _Sample(spans, streams, scalars)


def _span(value: Any, at: str) -> _Span | None:
    """The span of an entry of a sample's `turns`; None if its output is not in it. Other fields are not read."""
    turn = expect_object(value, at)
    name = expect_text(turn.get("interaction_id"), f"{at}.interaction_id")
    if (span := turn.get("span")) is None:
        return None
    ends = expect_list(span, f"{at}.span")
    if len(ends) != 2 or not all(type(each) is int for each in ends) or not 0 <= ends[0] <= ends[1] <= 2**31:
        raise InvalidRequest(
            f"'{at}.span' must be two integers, the first and the one after the last", param=f"{at}.span"
        )
    return _Span(name, ends[0], ends[1], optional_int(turn, "output_start", least=0, at=f"{at}.") or 0)


def _named(given: Mapping[str, Any], what: str, at: str) -> list[tuple[str, Any]]:
    found = given.get(what)
    if found is None:
        return []
    named = list(expect_object(found, f"{at}.{what}").items())
    if len(named) > _MOST_NAMES:
        raise InvalidRequest(f"'{at}.{what}' has more than {_MOST_NAMES} names", param=f"{at}.{what}")
    for name, _ in named:
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"'{at}.{what}' has the name {brief(name)}, which is not 1 to 64 characters of A-Z a-z 0-9 _ . : @ -",
                param=f"{at}.{what}",
            )
    return named


def _stream(value: Any, name: str, at: str) -> Floats:
    return _numbers(value, f"{at}.streams.{name}")


def _numbers(value: Any, name: str) -> Floats:
    """A list of numbers, booleans and nulls as float32; null is NaN."""
    values = expect_list(value, name)
    if not set(map(type, values)) <= _NUMBERS:
        raise InvalidRequest(f"'{name}' must have numbers, booleans and nulls only", param=name)
    with np.errstate(over="ignore"):
        found = np.array(values, np.float64) if values else np.zeros(0)
        if np.any(np.abs(found) > _LARGEST):
            raise InvalidRequest(f"'{name}' has a number that float32 cannot hold", param=name)
        return found.astype(np.float32)


def _scalar(value: Any, name: str) -> float:
    if type(value) not in (float, int, bool) or abs(value) > _LARGEST:
        raise InvalidRequest(f"'{name}' must be a number", param=name)
    return float(value)


def _told(asked: _Asked, outputs: Mapping[str, Output]) -> Told:
    """What a call tells of each turn. Raises NotFound, InvalidRequest and AnnotatedOtherwise."""
    turns: dict[str, _Turn] = {}
    held = 0
    for at, sample in enumerate(asked.samples):
        for span in sample.spans:
            output = _output_of(span, outputs, at)
            told = turns.setdefault(span.interaction_id, _Turn())
            for name, stream in sample.streams.items():
                values = stream[span.start : span.end]
                if np.isnan(values).all():
                    continue
                if name not in told.streams:
                    held += output.tokens
                    if held > _MOST_HELD:
                        raise InvalidRequest(
                            f"the streams are of outputs with over {_MOST_HELD} values in all: tell of fewer samples "
                            "in one call",
                            param="samples",
                        )
                    told.streams[name] = np.full(output.tokens, np.nan, np.float32)
                whole = told.streams[name]
                place = whole[span.first : span.first + len(values)]
                both = ~np.isnan(place) & ~np.isnan(values)
                if np.any(place[both] != values[both]):
                    raise _twice(name, span.interaction_id, f"samples[{at}]")
                place[~np.isnan(values)] = values[~np.isnan(values)]
        last = turns[sample.spans[-1].interaction_id]
        for name, value in sample.scalars.items():
            if last.scalars.setdefault(name, value) != value:
                raise _twice(name, sample.spans[-1].interaction_id, f"samples[{at}]")
    found = [(outputs[name], turn.streams, turn.scalars) for name, turn in turns.items()]
    return Told(asked.trainer, asked.step, [each for each in found if each[1] or each[2]])


def _output_of(span: _Span, outputs: Mapping[str, Output], at: int) -> Output:
    param = f"samples[{at}].turns"
    if (output := outputs.get(span.interaction_id)) is None:
        raise NotFound(f"no complete turn has the id {brief(span.interaction_id)}", param=param)
    if span.first + span.end - span.start > output.tokens:
        raise InvalidRequest(
            f"'{param}' gives the turn {brief(span.interaction_id)} {span.end - span.start} tokens from {span.first} "
            f"on, but it sampled {output.tokens}",
            param=param,
        )
    return output


def _twice(name: str, interaction_id: str, param: str) -> AnnotatedOtherwise:
    return AnnotatedOtherwise(
        f"the samples tell two values of {brief(name)} of one token of the turn {brief(interaction_id)}: give "
        "`loss_mask`, so that each token belongs to one sample",
        param=param,
    )
