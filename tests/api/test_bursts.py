"""Many requests at one moment, as when all rollouts of a step start."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from proxy.resources import turnstile
from proxy.turns.turns import Turns
from tests.support import LoopPasses, says, serving, user


async def test_turns_of_all_apis_that_arrive_together_begin_a_few_in_each_pass(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turnstile, "_AT_ONCE", 3)
    passes, begun = LoopPasses(monkeypatch), Counter[int]()
    begin = Turns.begin

    async def counted(self: Turns, *arguments: Any, **more: Any) -> Any:
        begun[passes.count] += 1
        return await begin(self, *arguments, **more)

    body = {"model": "m", "max_tokens": 5, "messages": [user("hi")]}
    async with serving(tmp_path, says(*["yes"] * 20), database_url=database_url) as server:
        with patch.object(Turns, "begin", counted):
            paths = [f"/s{number}/v1/{end}" for number in range(10) for end in ("chat/completions", "messages")]
            await asyncio.gather(*(server.ok(path, body) for path in paths))
    assert begun.total() == 20
    assert max(begun.values()) == 3
