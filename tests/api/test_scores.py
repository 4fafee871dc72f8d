"""`POST /v1/logprobs`: what is refused, by which name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import says, serving, user


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input_ids", "give one of"),
        ({"input_ids": [1, 2], "session_id": "s"}, "input_ids", "give one of"),
        ({"input_ids": []}, "input_ids", "at least one token id"),
        ({"input_ids": [7]}, "input_ids", "none to score from position 1 on"),
        ({"input_ids": [[1, 2], [3]]}, "input_ids[1]", "none to score"),
        ({"input_ids": [[1, 2], 3]}, "input_ids[1]", "must be an array"),
        ({"input_ids": [1, 2, True]}, "input_ids", "a boolean"),
        ({"input_ids": [[1, 2]] * 257}, "input_ids", "at most 256 lists"),
        ({"input_ids": [1, 2], "start": 2}, "input_ids", "position 2"),
        ({"input_ids": [1, 2], "start": 0}, "start", "between 1"),
        ({"session_id": "s", "start": 2}, "start", "belongs to 'input_ids'"),
        ({"input_ids": [1, 2], "temperature": 0}, "temperature", "between"),
        ({"input_ids": [1, 2], "top_k": 21}, "top_k", "between 0 and 20"),
        ({"input_ids": [1, 2], "topk": 2}, "topk", "did you mean 'top_k'"),
        ({"interaction_ids": []}, "interaction_ids", "1 to 256"),
        ({"interaction_ids": [3]}, "interaction_ids[0]", "must be a string"),
    ],
)
async def test_a_wrong_field_is_named(tmp_path: Path, body: dict[str, Any], param: str, words: str) -> None:
    async with serving(tmp_path, says()) as server:
        refused = await server.post("/v1/logprobs", body)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, param), refused.text
        assert words in error["message"]


async def test_an_engine_without_a_model_scores_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one")) as server:
        await server.ok("/s/v1/chat/completions", {"messages": [user("a")]})
        refused = await server.post("/v1/logprobs", {"session_id": "s"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (501, "engine_incapable")
        assert "gives no logprobs of given tokens" in refused.json()["error"]["message"]
