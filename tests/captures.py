"""Captured conversations of real clients, as files in `tests/golden/clients`: what a client sent, what we replied, what
the session exports.

`conversation` makes the content of a file from recorded exchanges, `write` and `read` keep it small: a turn has only
the fields and messages that differ from the turn before it. `ids` lists what a reply has that the next one of the same
answer has otherwise. Clients' environments have no packages of the server, so this module uses only the standard
library.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

FOLDER = Path(__file__).parent / "golden" / "clients"
LARGEST = 30_000
"""Bytes of a file that is not compressed."""
HEADERS = (
    "user-agent",
    "anthropic-version",
    "anthropic-beta",
    "idempotency-key",
    "session-id",
    "x-claude-code-session-id",
    "x-codex-turn-metadata",
    "x-session-id",
    "x-stainless-retry-count",
)
"""The headers that the server reads, and the client's name. Keys are left out."""
_IDS = frozenset(
    {
        *("id", "call_id", "item_id", "response_id", "tool_use_id", "signature", "encrypted_content"),
        "thoughtSignature",
    }
)
_LISTS = ("messages", "input")
_ENDS = ("/chat/completions", "/responses", "/messages", ":generateContent", ":streamGenerateContent")
_SYSTEM_CHARACTERS = 400


@dataclass
class Exchange:
    """One request, in order of arrival. `path` has no session; `reply` is empty until all of it was sent."""

    session: str
    path: str
    headers: Mapping[str, str]
    request: bytes
    status: int = 0
    reply: bytes = b""


@dataclass
class Turn:
    """`reply`: the body, or the events of a stream."""

    path: str
    request: dict[str, Any]
    reply: Any
    headers: Mapping[str, str] = field(default_factory=dict)


def turns(exchanges: Iterable[Exchange]) -> list[Turn]:
    """Return the answered turns; other requests, such as for the models, are no part of a conversation."""
    found = []
    for exchange in exchanges:
        if urlsplit(exchange.path).path.endswith(_ENDS) and exchange.status == 200:
            headers = {name: value for name, value in exchange.headers.items() if name in HEADERS}
            found.append(Turn(exchange.path, json.loads(exchange.request), parse_reply(exchange.reply), headers))
    return found


def without(turn: Turn, places: Mapping[str, str]) -> Turn:
    """Return the turn with each text of `places` replaced, such as the folders of a machine; the longest first."""
    sent = json.dumps([turn.request, turn.headers], ensure_ascii=False)
    for place in sorted(places, key=len, reverse=True):
        sent = sent.replace(json.dumps(place, ensure_ascii=False)[1:-1], json.dumps(places[place])[1:-1])
    request, headers = json.loads(sent)
    return replace(turn, request=request, headers=headers)


def brief(turn: Turn) -> Turn:
    """Return the turn with the beginnings of its system prompts and descriptions of tools: all of them are long.

    A reply that repeats them, as those of responses do, loses them.
    """
    request = dict(turn.request)
    for name in ("system", "instructions", "systemInstruction"):
        if name in request:
            request[name] = _cut(request[name], ("text",))
    for name in _LISTS:
        if isinstance(request.get(name), list):
            request[name] = [_cut_system(message) for message in request[name]]
    if "tools" in request:
        request["tools"] = _cut(request["tools"], ("description",))
    events = [_unrepeated(event) for event in turn.reply] if isinstance(turn.reply, list) else _unrepeated(turn.reply)
    return replace(turn, request=request, reply=events)


def _unrepeated(reply: dict[str, Any]) -> dict[str, Any]:
    if isinstance(reply.get("response"), dict):
        return {**reply, "response": _unrepeated(reply["response"])}
    return {name: value for name, value in reply.items() if name not in ("instructions", "tools")}


def _cut_system(message: dict[str, Any]) -> dict[str, Any]:
    return _cut(message, ("content", "text")) if message.get("role") in ("system", "developer") else message


def _cut(value: Any, fields: Sequence[str]) -> Any:
    """Cut a text, or the texts in these fields at any depth."""
    match value:
        case str():
            return value[:_SYSTEM_CHARACTERS]
        case list():
            return [item if isinstance(item, str) else _cut(item, fields) for item in value]
        case dict():
            return {name: _cut_entry(name, item, fields) for name, item in value.items()}
        case _:
            return value


def _cut_entry(name: str, value: Any, fields: Sequence[str]) -> Any:
    return value if isinstance(value, str) and name not in fields else _cut(value, fields)


def parse_reply(body: bytes) -> Any:
    """Return the JSON body, or the list of the events of a stream without their names and `[DONE]`."""
    if body.startswith(b"{"):
        return json.loads(body)
    return [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]


def ids(reply: Any) -> dict[tuple[str, str], list[str]]:
    """Return the ids, signatures and encrypted texts of a reply in order, by field and by what they begin with."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, value in _walk(reply):
        if name in _IDS and isinstance(value, str) and value:
            kind = value.partition("_")[0] if "_" in value[:8] else ""
            known = found.setdefault((name, kind), [])
            if value not in known:
                known.append(value)
    return found


def _walk(value: Any) -> Iterator[tuple[str, Any]]:
    entries = value.items() if isinstance(value, dict) else (("", item) for item in value)
    for name, item in entries:
        yield name, item
        if isinstance(item, (dict, list)):
            yield from _walk(item)


def outcome(tree: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the export of a session says: the turns of each sample, and why each turn is where it is."""
    order = {node["id"]: index for index, node in enumerate(tree)}
    return {
        "samples": sorted([order[name] for name in sample["interaction_ids"]] for sample in samples),
        "reasons": [node["reason"] for node in tree],
        "echoes": [node["notes"].get("echo") for node in tree],
    }


def write(path: Path, client: Mapping[str, Any], turns: Sequence[Turn], expected: Mapping[str, Any]) -> None:
    """Write a conversation: `client` has its name, version and API. A large file is compressed and ends in `.xz`."""
    entries = [_less(turn, before) for before, turn in zip([None, *turns], turns, strict=False)]
    text = json.dumps({**client, "expected": expected, "turns": entries}, indent=1, ensure_ascii=False) + "\n"
    small, large = path.with_suffix(".json"), path.with_suffix(".json.xz")
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in (small, large):
        old.unlink(missing_ok=True)
    data = text.encode()
    if len(data) <= LARGEST:
        small.write_bytes(data)
    else:
        large.write_bytes(lzma.compress(data))


def read(path: Path) -> tuple[dict[str, Any], list[Turn]]:
    """Return what `write` wrote: the client with `expected`, and the whole turns."""
    data = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    content: dict[str, Any] = json.loads(data)
    whole: list[Turn] = []
    for entry in content.pop("turns"):
        whole.append(_whole(entry, whole[-1] if whole else None))
    return content, whole


def _less(turn: Turn, before: Turn | None) -> dict[str, Any]:
    """Return the turn without what it repeats: equal fields, and the first messages of a list."""
    old = before.request if before else {}
    request = {name: value for name, value in turn.request.items() if name not in old or old[name] != value}
    entry: dict[str, Any] = {"path": turn.path, "headers": dict(turn.headers), "kept": {}, "request": request}
    entry["gone"] = [name for name in old if name not in turn.request]
    for name in _LISTS:
        if isinstance(request.get(name), list) and isinstance(old.get(name), list):
            kept = _common(old[name], request[name])
            entry["kept"][name], request[name] = kept, request[name][kept:]
    return {**{name: value for name, value in entry.items() if value or name == "request"}, "reply": turn.reply}


def _whole(entry: Mapping[str, Any], before: Turn | None) -> Turn:
    old = before.request if before else {}
    request = {**{name: value for name, value in old.items() if name not in entry.get("gone", ())}, **entry["request"]}
    for name, kept in entry.get("kept", {}).items():
        request[name] = old[name][:kept] + entry["request"][name]
    return Turn(entry["path"], request, entry["reply"], entry.get("headers", {}))


def _common(old: Sequence[Any], new: Sequence[Any]) -> int:
    pairs = zip(old, new, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(old), len(new)))
