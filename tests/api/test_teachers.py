"""Teachers of exports: what is refused, by which name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import says, serving, user


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"teachers": {}}, "teachers", "must be an array"),
        ({"teachers": ["ref"]}, "teachers[0]", "must be an object"),
        ({"teachers": [{"nam": "ref"}]}, "teachers[0].nam", "did you mean 'teachers[0].name'"),
        ({"teachers": [{"name": ""}]}, "teachers[0].name", "letters, digits and underscores"),
        ({"teachers": [{"name": "a b"}]}, "teachers[0].name", "letters, digits and underscores"),
        ({"teachers": [{"name": "x" * 65}]}, "teachers[0].name", "letters, digits and underscores"),
        ({"teachers": [{"name": "kept"}]}, "teachers[0].name", "another column kept_logprobs"),
        ({"teachers": [{"name": "top"}]}, "teachers[0].name", "another column top_logprobs"),
        ({"teachers": [{"name": "unmasked"}]}, "teachers[0].name", "another column unmasked_logprobs"),
        ({"teachers": [{"top_k": 21}]}, "teachers[0].top_k", "between 0 and 20"),
        ({"teachers": [{"temperature": 0}]}, "teachers[0].temperature", "between 0.001 and 100"),
        ({"teachers": [{"top_k": 1}, {"top_k": 2}]}, "teachers[1].top_k", "have the same columns"),
        ({"teachers": [{"metadata": {"a": {"min": "x"}}}]}, "teachers[0].metadata.a.min", "must be a number"),
        ({"teachers": [{}], "outline": True}, "teachers", "'outline' has no scores"),
    ],
)
async def test_a_wrong_field_is_named(tmp_path: Path, fields: dict[str, Any], param: str, words: str) -> None:
    async with serving(tmp_path, says("one")) as server:
        await server.ok("/s/v1/chat/completions", {"messages": [user("a")]})
        refused = await server.post("/trajectories/export", fields)
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert error["param"] == param, error
        assert words in error["message"]


@pytest.mark.parametrize(
    ("teacher", "status", "code"),
    [({}, 501, "engine_incapable"), ({"model": "nobody"}, 404, "model_not_found")],
)
async def test_a_teacher_that_cannot_score_fails_the_export_before_it_begins(
    tmp_path: Path, teacher: dict[str, Any], status: int, code: str
) -> None:
    async with serving(tmp_path, says("one")) as server:
        await server.ok("/s/v1/chat/completions", {"messages": [user("a")]})
        for path, body in (
            ("/trajectories/export", {"teachers": [teacher]}),
            ("/trajectories/export", {"teachers": [teacher], "format": "npz"}),
        ):
            refused = await server.post(path, body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (status, code), refused.text
        await server.ok("/s/rl/end_session", {})
        claimed = await server.post("/trajectories/claim", {"export": {"teachers": [teacher]}})
        assert (claimed.status_code, claimed.json()["error"]["code"]) == (status, code)
        assert (await server.ok("/trajectories/claim", {}))["sessions"] != [], "the lease of a failed claim is released"
