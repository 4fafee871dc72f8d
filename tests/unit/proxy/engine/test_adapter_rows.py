"""LoRA adapters are applied to the rows of their own requests, however these are spread over a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proxy.engine.interface import AdapterSource
from proxy.engine.transformers.adapters import Adapters
from proxy.engine.transformers.batching import StepEntry

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

CONFIG = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["proj"]}


class Keys:
    def __init__(self) -> None:
        self.opened: set[int] = set()

    def open(self, key: int) -> None:
        self.opened.add(key)

    def close(self, key: int) -> None:
        self.opened.remove(key)


class Batch:
    """A batch whose step is given."""

    def __init__(self) -> None:
        self.prefix_keys = Keys()
        self.step: list[StepEntry] = []

    def entries(self) -> list[StepEntry]:
        return self.step


class Model(torch.nn.Module):
    """Passes its rows, or the first `seen` of them, through one linear layer without weights."""

    device = torch.device("cpu")
    seen: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.ModuleDict({"proj": torch.nn.Linear(1, 1, bias=False)})])
        torch.nn.init.zeros_(self.layers[0]["proj"].weight)

    def forward(self, rows: Any) -> Any:
        return self.layers[0]["proj"](rows[:, : self.seen])


@pytest.fixture
def batch() -> Batch:
    return Batch()


@pytest.fixture
def adapters(batch: Batch) -> Adapters:
    """Adapters that add to each row its double, times the version."""
    from safetensors.torch import save

    found = Adapters(Model(), batch)  # type: ignore[arg-type]
    for version in (1, 2, 3):
        name = "base_model.model.layers.0.proj.lora_{}.weight"
        tensors = {name.format("A"): torch.ones(1, 1), name.format("B"): torch.full((1, 1), float(version))}
        found.load(version, AdapterSource("", CONFIG, save(tensors)))
    return found


def added(adapters: Adapters, batch: Batch, *spans: tuple[int | None, int]) -> list[float]:
    """What is added to rows of ones. `spans`: of each request, its version and the number of its rows."""
    named = [None if version is None else adapters.named(version) for version, _ in spans]
    batch.step = [
        StepEntry(str(place), count, True, 0, None, adapter)
        for place, ((_, count), adapter) in enumerate(zip(spans, named, strict=True))
    ]
    rows = torch.ones(1, sum(count for _, count in spans), 1)
    return adapters._model(rows).flatten().tolist()


@pytest.mark.parametrize(
    "spans",
    [
        [(1, 5)],
        [(None, 3)],
        [(1, 2), (1, 1), (2, 3)],
        [(3, 1), (None, 2), (3, 2), (1, 1), (None, 1), (3, 1)],
    ],
)
def test_each_row_gets_what_its_own_adapter_adds(adapters, batch, spans: list[tuple[int | None, int]]) -> None:
    expected = [2.0 * (version or 0) for version, count in spans for _ in range(count)]
    assert added(adapters, batch, *spans) == expected


def test_an_unloaded_adapter_is_applied_to_the_requests_that_still_have_it(adapters, batch) -> None:
    adapter = adapters.named(2)
    for version in (1, 2, 3):
        adapters.unload(version)
    assert not batch.prefix_keys.opened
    batch.step = [StepEntry("a", 2, True, 0, None, adapter)]
    assert adapters._model(torch.ones(1, 2, 1)).flatten().tolist() == [4.0, 4.0]


def test_a_layer_that_does_not_take_in_every_token_fails_the_requests_of_its_adapters(adapters, batch) -> None:
    adapters._model.seen = 2
    assert added(adapters, batch, (1, 2), (None, 1)) == [0.0, 0.0]
    assert adapters.failure(adapters.named(1)) == (
        "the layer layers.0.proj does not take in every token; train an adapter without it"
    )
    assert adapters.failure(adapters.named(2)) == ""


def test_an_adapter_is_loaded_on_its_own_and_not_twice(adapters: Adapters, batch: Batch, tmp_path: Path) -> None:
    keys = {adapters.named(version).prefix_key for version in (1, 2, 3)}
    assert batch.prefix_keys.opened == keys and len(keys) == 3
    assert len([*adapters.tensors()]) == 6
