"""Write `benchmarks/shapes.json`: lengths and forms of sessions, without any text of theirs.

The recorded sessions are those of real agents in `tests/golden/clients`; token counts are as the proxy counted them
with the built-in tokenizer. The recordings have no compaction, few forks and no images, so some sessions are drawn from
the distribution of `tests.bench.affinity_sessions` with these. Run `python -m tests.bench.benchmark_shapes`.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench.affinity_sessions import counts_of
from tests.captures import FOLDER, Turn, read

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes.json"
RECORDINGS = (
    *("cli-claude", "cli-cline-chat", "cli-codex", "cli-copilot-chat", "cli-opencode", "cli-qwen", "crewai-chat"),
    *("deepagents-chat", "dspy-chat", "harbor-chat", "langgraph-chat", "openai-agents-chat"),
    *("openhands-sdk-chat", "semantic-kernel-chat-stream", "browser-use-chat"),
)
CONTEXT, FIRST, SUMMARY, TURNS, ATTEMPTS = 8_000, 2_000, 800, 24, 4
SOURCE = (
    "Recorded: requests of the named agents, as in tests/golden/clients of Tokengrove; prompts and answers "
    "in tokens of its built-in tokenizer of 640 tokens, so about twice those of a real vocabulary. Drawn: answers "
    "exp(N(ln 110, 0.8)) tokens, each turn adds exp(N(ln 200, 0.9)); seed 1."
)

Entry = dict[str, Any]


def recorded(name: str) -> Entry:
    """Return the shape of a recording."""
    path = next(path for path in FOLDER.glob(f"{name}.json*"))
    client, turns = read(path)
    parents = _parents(client["expected"]["samples"])
    counts = counts_of(turns)
    steps = [_step(turns, counts, index, parents[index]) for index in range(len(turns))]
    stream = any(isinstance(turn.reply, list) for turn in turns)
    return {
        "name": f"{client['client']} {client['version']} ({client['api']})",
        "kind": "recorded",
        "stream": stream,
        "tools": max(len(turn.request.get("tools") or []) for turn in turns),
        "turns": steps,
    }


def _parents(samples: Sequence[Sequence[int]]) -> dict[int, int | None]:
    """Return the turn that each turn continues. `samples`: the turns of each path."""
    found: dict[int, int | None] = {}
    for path in samples:
        for before, turn in zip([None, *path], path, strict=False):
            found[turn] = before
    return found


def _step(turns: Sequence[Turn], counts: Sequence[tuple[int, int]], index: int, parent: int | None) -> Entry:
    prompt, output = counts[index]
    messages = _messages(turns[index].request)
    known = 0 if parent is None else len(_messages(turns[parent].request)) + 1
    tokens = prompt if parent is None else prompt - sum(counts[parent])
    new = [message for message in messages[known:] if message.get("role") != "assistant"] or [messages[-1]]
    return {
        "parent": parent,
        "new": _shares(new, max(tokens, 1), bool(turns[index].request.get("tools"))),
        "output": output,
        "calls": _calls(turns[index].reply),
    }


def _messages(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a request, with the system prompt of any API as the first."""
    system = request.get("system") or request.get("instructions")
    listed = request.get("messages") or request.get("input") or []
    if isinstance(listed, str):
        listed = [{"role": "user", "content": listed}]
    found = [message for message in listed if message.get("type") in (None, "message", "function_call_output")]
    return [*([{"role": "system", "content": system}] if system else []), *found]


def _shares(messages: Sequence[Mapping[str, Any]], tokens: int, has_tools: bool) -> list[list[Any]]:
    """Return role and tokens of each message. System prompts are cut in the recordings, so they get what is left."""
    found: list[list[Any]] = []
    for message in messages:
        characters = len(json.dumps(message.get("content") or message.get("output") or ""))
        found.append([_role(message), max(4, characters // 3)])
    for entry in found[1:]:
        entry[0] = "user" if entry[0] == "system" else entry[0]  # many chat templates take only one system prompt
    fixed = sum(count for role, count in found if role != "system")
    if found[0][0] == "system":
        found[0][1] = max(8, tokens - fixed) // (2 if has_tools else 1)  # the other half are the tools
    elif fixed:
        found = [[role, max(4, count * tokens // fixed)] for role, count in found]
    return found


def _role(message: Mapping[str, Any]) -> str:
    if message.get("type") == "function_call_output" or "tool_result" in json.dumps(message.get("content") or ""):
        return "tool"
    role = str(message.get("role"))
    return role if role in ("system", "user", "tool") else "system" if role == "developer" else "user"


def _calls(reply: Any) -> bool:
    text = json.dumps(reply)
    return any(mark in text for mark in ('"tool_use"', '"function_call"', '"tool_calls": [{'))


def drawn(rng: random.Random, name: str, *, compacts: bool = False, forks: bool = False, images: bool = False) -> Entry:
    """Return a drawn shape.

    `compacts`: a context beyond CONTEXT becomes a first prompt and a summary. `forks`: every fourth turn is tried
    ATTEMPTS times, and the last attempt goes on. `images`: each result of a tool has a screenshot.
    """
    turns: list[Entry] = []
    parent, prompt = None, FIRST
    while len(turns) < (8 if images else TURNS):
        output, added = _lognormal(rng, 110, 0.8), _lognormal(rng, 200, 0.9)
        role = "tool" if parent is not None and turns[parent]["calls"] else "user"
        new: list[list[Any]] = [["system", FIRST // 2], ["user", added]] if parent is None else [[role, added]]
        if parent is not None and compacts and prompt > CONTEXT:
            parent, prompt, new = None, FIRST + SUMMARY, [["system", FIRST // 2], ["user", SUMMARY]]
        entry: Entry = {"parent": parent, "new": new, "output": output, "calls": len(turns) % 3 != 2}
        if images:
            entry["image"] = True
        attempts = ATTEMPTS if forks and len(turns) % (ATTEMPTS + 3) == 3 else 1
        turns += [dict(entry) for _ in range(attempts)]
        parent, prompt = len(turns) - 1, prompt + output + added
    kind = "forks" if forks else "compaction" if compacts else "images" if images else "drawn"
    return {"name": name, "kind": kind, "stream": False, "tools": 6, "turns": turns}


def _lognormal(rng: random.Random, median: float, sigma: float) -> int:
    return min(2_000, math.ceil(rng.lognormvariate(math.log(median), sigma)))


def main() -> None:
    rng = random.Random(1)
    shapes = [recorded(name) for name in RECORDINGS]
    shapes += [
        drawn(rng, "long session with compaction", compacts=True),
        drawn(rng, "search with 4 attempts at a turn", forks=True),
        drawn(rng, "screenshots", images=True),
    ]
    lines = ",\n".join(json.dumps(shape) for shape in shapes)
    SHAPES.write_text(f'{{\n"source": {json.dumps(SOURCE)},\n"shapes": [\n{lines}\n]\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
