"""The `notes` of an interaction: its rare fields as one JSON object, in the database and in API responses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from proxy.types import Interaction, Lineage, Sampler, Thread
from tokengrove.errors import short
from tokengrove.options.model import RouteKind
from tokengrove.reasons import Echo, Evidence, LogprobsOf, Segment


def notes_of(node: Interaction) -> dict[str, Any]:
    """The `notes` of an interaction as JSON, without defaults; the `notes` column stores them."""
    notes: dict[str, Any] = {}
    if node.dropped:
        notes["dropped"] = list(map(short, node.dropped))
    if node.best_effort:
        notes["best_effort"] = list(node.best_effort)
    if node.echo:
        notes["echo"] = [str(kind) for kind in node.echo]
    if node.prefill:
        notes["prefill"] = node.prefill
    if node.idempotency_key is not None:
        notes["idempotency_key"] = node.idempotency_key
    if node.request_id is not None:
        notes["request_id"] = node.request_id
    if node.grammar:
        notes["grammar"] = True
    if not node.has_logprobs:
        notes["sampled"] = False
    if node.logprobs_of is not LogprobsOf.RULE:
        notes["logprobs_of"] = node.logprobs_of.value
    if node.uncertain:
        notes["version"] = "uncertain"
    if node.malformed_calls:
        notes["malformed_calls"] = node.malformed_calls
    if node.replay:
        notes["replay"] = dict(node.replay)
    if node.route:
        notes["route"] = node.route
    if node.route_kind is not RouteKind.POLICY:
        notes["route_kind"] = node.route_kind.value
    if node.adapter is not None:
        notes["adapter"] = node.adapter
    if node.external:
        notes["external"] = dict(node.external)
    if node.samplers:
        sampled_by = notes["sampled_by"] = list[dict[str, Any]]()
        for start, sampler in node.samplers:
            sampled_by.append({"start": start, **_sampler_json(sampler)})
    if node.thread is not None:
        notes["thread"] = {name: value for name, value in node.thread._asdict().items() if value is not None}
    if node.lineage is not None:
        notes["lineage"] = node.lineage.to_json()
    return notes


def note_fields(notes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an interaction, from its `notes`: the inverse of `notes_of`."""
    return {
        "dropped": tuple(notes.get("dropped", ())),
        "best_effort": tuple(notes.get("best_effort", ())),
        "echo": tuple(Echo(kind) for kind in notes.get("echo", ())),
        "prefill": notes.get("prefill", 0),
        "idempotency_key": notes.get("idempotency_key"),
        "request_id": notes.get("request_id"),
        "grammar": notes.get("grammar", False),
        "has_logprobs": notes.get("sampled", True),
        "logprobs_of": LogprobsOf(notes.get("logprobs_of", LogprobsOf.RULE)),
        "uncertain": notes.get("version") == "uncertain",
        "malformed_calls": notes.get("malformed_calls", 0),
        "replay": notes.get("replay", {}),
        "adapter": notes.get("adapter"),
        "external": notes.get("external", {}),
        "samplers": tuple(
            (each["start"], Sampler(**{name: each[name] for name in Sampler._fields if name in each}))
            for each in notes.get("sampled_by", ())
        ),
        "thread": Thread(**notes["thread"]) if "thread" in notes else None,
        **step_fields(notes),
    }


def step_fields(notes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that scores are computed from: those of the route, and the lineage."""
    told = notes.get("lineage")
    if told is None:
        return route_fields(notes)
    lineage = Lineage(tuple(told["from"]), Segment(told["kind"]), Evidence(told["evidence"]))
    return {**route_fields(notes), "lineage": lineage}


@lru_cache(1024)
def _sampler_json(sampler: Sampler) -> Mapping[str, str]:
    return {name: value for name, value in sampler._asdict().items() if value}


def route_fields(notes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of notes that say what answered."""
    return {
        "route": notes.get("route", ""),
        "route_kind": RouteKind(notes.get("route_kind", RouteKind.POLICY)),
    }
