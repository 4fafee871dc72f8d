"""What real clients sent in captured conversations, sent again, makes the samples that it made when it was captured.

`tests/golden/clients` has a file for each client and API; the marked tests of clients write them (`--keep-sessions`). A
replayed reply has other ids than the captured one, so each id of ours that the client sent back is replaced by the new
one.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.captures import FOLDER, Turn, ids, outcome, parse_reply, read
from tests.conformance.planned import follow
from tests.support import Server, serving, tiny_renderer
from tests.wide import few

CONVERSATIONS = sorted(FOLDER.glob("*.json*"))


def one_of_each_client() -> list[Path]:
    """For each client one of its conversations: with the first client its first, with the second its second, ..."""
    clients: dict[str, list[Path]] = defaultdict(list)
    for path in CONVERSATIONS:
        clients[API.sub("", path.name.partition(".")[0])].append(path)
    return [paths[number % len(paths)] for number, paths in enumerate(clients.values())]


API = re.compile("-(chat|messages|responses|google|compatible|router)(-stream)?$")


@pytest.mark.parametrize("path", few(CONVERSATIONS, one_of_each_client()), ids=lambda path: path.name.partition(".")[0])
async def test_a_captured_conversation_makes_the_samples_of_its_entry(path: Path, tmp_path: Path) -> None:
    captured, turns = read(path)
    async with serving(tmp_path, follow(tiny_renderer(), chunk=1000)) as server:
        await replay(server, turns)
        train = {"constrained": True}  # some clients force their calls
        assert outcome(await server.tree(), await server.export(train=train)) == captured["expected"]


async def replay(server: Server, turns: list[Turn]) -> None:
    """Send the turns, one after another."""
    renewed: dict[str, str] = {}
    for turn in turns:
        body = json.dumps(turn.request)
        for old, new in renewed.items():
            body = body.replace(old, new)
        headers = {**turn.headers, "content-type": "application/json", "authorization": "Bearer any"}
        response = await server.http.post(f"/s{turn.path}", content=body, headers=headers)
        assert response.status_code == 200, response.text
        renewed |= pairs(ids(turn.reply), ids(parse_reply(response.content)))


def pairs(old: dict[tuple[str, str], list[str]], new: dict[tuple[str, str], list[str]]) -> dict[str, str]:
    """Return the new id for each old one. Only ids that clients send back must be there again."""
    found: dict[str, str] = {}
    for kind, names in old.items():
        assert len(new.get(kind, ())) == len(names), f"the reply has other {kind} than the captured one: {new}"
        found |= dict(zip(names, new[kind], strict=True))
    return found
