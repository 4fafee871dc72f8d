"""GET /rl/reasons: what the words of other answers mean."""

from __future__ import annotations

from pathlib import Path

from proxy.api.turn_json import Part
from tests.support import says, serving, user
from tokengrove.reasons import BY_FIELD, Explained

BESIDE = {Part}
"""Words of requests: `include` names them, and its error lists them."""


async def test_every_word_of_a_fork_has_its_meaning_there(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        await server.chat([user("a")])
        await server.chat([user("b")])
        words = (await server.http.get("/rl/reasons")).json()
        turn = (await server.http.get("/rl/sessions/s/interactions/1?include=compared")).json()
        assert words["reason"][turn["reason"]].startswith("A conversation that has nothing in common")
        for field in ("status", "finish_reason"):
            assert words[field][turn[field]]
        assert words["why"][turn["compared"]["why"]] == "the text of the message differs"


async def test_no_kind_of_reason_is_left_out(tmp_path: Path) -> None:
    assert {words for _, words in BY_FIELD.values()} == set(Explained.__subclasses__()) - BESIDE
    async with serving(tmp_path, says()) as server:
        words = (await server.http.get("/rl/reasons")).json()
        assert words == {field: {word.value: word.meaning for word in words} for field, (_, words) in BY_FIELD.items()}
        refused = await server.http.get("/rl/reasons?lang=de")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lang")


async def test_only_the_admin_key_reads_the_words(tmp_path: Path) -> None:
    async with serving(tmp_path, says(), admin_key="secret") as server:
        assert (await server.http.get("/rl/reasons")).status_code == 401
        assert (await server.http.get("/rl/reasons", headers={"authorization": "Bearer secret"})).status_code == 200
