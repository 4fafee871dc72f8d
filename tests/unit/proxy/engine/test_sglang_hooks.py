"""The hooks in SGLang's scheduler that concern images, with SGLang's own objects simulated."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from proxy.engine.sglang.scheduler import forget_images, never


@pytest.mark.parametrize("holds", [True, False])
def test_new_weights_see_images_anew(monkeypatch: pytest.MonkeyPatch, holds: bool) -> None:
    cache = {"an image": "features of the old weights"}
    schedule: Any = ModuleType("mm_schedule")
    schedule.embedding_cache = cache if holds else None
    managers: Any = ModuleType("managers")
    managers.mm_schedule = schedule
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers", managers)
    recorded: list[Any] = []
    forget_images(lambda *given: recorded.append(given), "scheduler", "new version")
    assert recorded == [("scheduler", "new version")]
    assert not holds or not cache


@pytest.mark.parametrize("whole", [True, False])
def test_placeholders_get_no_chance_and_logprobs_stay_those_of_all_tokens(whole: bool) -> None:
    torch = pytest.importorskip("torch")
    output = SimpleNamespace(next_token_logits=torch.zeros(2, 4))

    def forward(sampler: Any, given: Any, **named: Any) -> Any:
        return given.next_token_logits, named.get("logprob_logits")

    sampled, told = never([1, 3], whole=whole)(forward, "sampler", output)
    assert sampled.isinf().tolist() == [[False, True, False, True]] * 2
    assert told is None if not whole else not told.isinf().any()
