"""The `notes` of an interaction: its rare fields as one JSON object, in the database and in answers of the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.errors import short
from proxy.reasons import Echo, Explained
from proxy.types import Interaction


class Note(Explained):
    """The names that notes may have."""

    DROPPED = "dropped", "fields of the request that had no effect"
    BEST_EFFORT = "best_effort", "sampling parameters that the engine took without a promise"
    ECHO = "echo", "how the client changed answers of ours that it sent back in the history"
    PREFILL = "prefill", "how many characters of the answer's text the client wrote itself; their tokens are context"
    IDEMPOTENCY_KEY = "idempotency_key", "the client's header of that name, by which its retries are known"
    REQUEST_ID = "request_id", "the `x-request-id` that the client sent with the request of this turn"
    GRAMMAR = "grammar", "true: sampled under a grammar, as forced calls and JSON answers are"
    SAMPLED = "sampled", "false: the answer came without logprobs, so it is never trained"
    VERSION = "version", "`uncertain`: some tokens have the last weight version that is believed, not one that is known"
    MALFORMED_CALLS = "malformed_calls", "how many tool calls could not be parsed and were left as text"


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
    if node.uncertain:
        notes["version"] = "uncertain"
    if node.malformed_calls:
        notes["malformed_calls"] = node.malformed_calls
    return notes


def note_fields(notes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an interaction that `notes_of` turned into `notes`."""
    return {
        "dropped": tuple(notes.get("dropped", ())),
        "best_effort": tuple(notes.get("best_effort", ())),
        "echo": tuple(Echo(kind) for kind in notes.get("echo", ())),
        "prefill": notes.get("prefill", 0),
        "idempotency_key": notes.get("idempotency_key"),
        "request_id": notes.get("request_id"),
        "grammar": notes.get("grammar", False),
        "has_logprobs": notes.get("sampled", True),
        "uncertain": notes.get("version") == "uncertain",
        "malformed_calls": notes.get("malformed_calls", 0),
    }
