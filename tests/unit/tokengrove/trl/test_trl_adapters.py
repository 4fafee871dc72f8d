"""The adapter of a trainer's PeftModel becomes a version as bytes or as a folder, or an error says why."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import real_server
from tokengrove.client import Client
from tokengrove.errors import InvalidRequest
from tokengrove.trl import AdapterTransfer, publish_adapter, save_adapter

FILES = {"adapter_config.json", "adapter_model.safetensors"}


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)


class Adapted(Small):
    """A stand-in for a PeftModel, whose import takes long; another test has the real one."""

    def __init__(self, name: str = "default") -> None:
        super().__init__()
        self.active_adapter, self.peft_config = name, {name: {"peft_type": "LORA", "r": 2}}
        for key in ("lora_A", "lora_B"):
            self.layer.register_parameter(key, torch.nn.Parameter(torch.ones(2, 4)))

    def save_pretrained(self, folder: str, selected_adapters: list[str]) -> None:
        (name,) = selected_adapters
        place = Path(folder) if name == "default" else Path(folder) / name
        place.mkdir(parents=True, exist_ok=True)
        (place / "adapter_config.json").write_text(json.dumps(self.peft_config[name]))
        tensors = {f"{key}.weight": tensor.detach() for key, tensor in self.named_parameters() if "lora_" in key}
        save_file(tensors, place / "adapter_model.safetensors")


def real(name: str) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(Small(), peft.LoraConfig(r=2, target_modules=["layer"]), adapter_name=name)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with real_server(tmp_path, max_body_bytes=100_000) as url, Client(url) as client:
        yield client


def live(client: Client) -> list[tuple[int, str]]:
    return [(entry["version"], entry["path"]) for entry in client.adapters()[0]["live"]]


@pytest.mark.parametrize("name", ["default", "other"])
@pytest.mark.parametrize("make", [Adapted, pytest.param(real, marks=pytest.mark.engines)])
def test_the_active_adapter_is_saved_in_the_layout_of_peft(
    tmp_path: Path, name: str, make: Callable[[str], Any]
) -> None:
    saved = save_adapter(make(name), tmp_path / "a")
    assert {path.name for path in saved.iterdir()} >= FILES
    assert json.loads((saved / "adapter_config.json").read_text())["r"] == 2
    tensors = load_file(saved / "adapter_model.safetensors")
    assert sorted(key.split(".")[-2] for key in tensors) == ["lora_A", "lora_B"]


def test_a_model_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no active adapter"):
        save_adapter(Small(), tmp_path / "a")


def test_a_model_whose_adapter_is_sharded_is_refused(tmp_path: Path) -> None:
    model = Adapted()
    for key, tensor in model.named_parameters():
        if "lora_A" in key:
            tensor.data = torch.empty(0)
    with pytest.raises(InvalidRequest, match=r"lora_A.* is sharded"):
        save_adapter(model, tmp_path / "a")


def test_an_adapter_is_published_as_bytes_or_as_a_folder(client: Client, tmp_path: Path) -> None:
    assert publish_adapter(client, Adapted()) == 1
    ((_, folder),) = live(client)
    assert {path.name for path in Path(folder).iterdir()} == FILES
    assert publish_adapter(client, Adapted(), folder=tmp_path / "mine", version=5, name="policy") == 5
    assert live(client) == [(5, str(tmp_path / "mine"))]
    assert not Path(folder).exists()


def test_a_transfer_publishes_the_versions_of_the_trainer_and_removes_what_is_unloaded(
    client: Client, tmp_path: Path
) -> None:
    transfer = AdapterTransfer(client.url, model=Adapted(), folder=tmp_path / "shared")
    transfer.init_weight_transfer()
    sent: list[str] = []

    def weights() -> Iterator[tuple[str, Any]]:
        for name in ("a", "b"):
            sent.append(name)
            yield name, torch.zeros(1)

    for version in (1, 2, 3):
        transfer.pause()
        transfer.send_weights(weights())
        transfer.resume()
        assert transfer.version == version == client.adapters()[0]["newest"]
    assert sent == ["a", "b"] * 3
    (place,) = (tmp_path / "shared").iterdir()
    assert (place / "version-3" / "adapter_config.json").is_file()
    assert not (place / "version-1").exists()
    assert client.engine().paused is None
    transfer.destroy()
    assert list((tmp_path / "shared").iterdir()) == []


def test_a_transfer_that_fails_says_so_and_keeps_its_version(client: Client) -> None:
    transfer = AdapterTransfer(client.url, model=Adapted())
    transfer.init_weight_transfer()
    client.publish_adapter("/elsewhere", version=9)
    with pytest.raises(RuntimeError, match="adapter 1 was not published"):
        transfer.send_weights(iter([]))
    assert (transfer.version, client.adapters()[0]["newest"]) == (0, 9)
    transfer.destroy()


def test_an_engine_without_adapters_is_refused_at_the_start(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = AdapterTransfer(client.url, model=Adapted())
    bare = replace(client.engine(), capabilities=("seed",))
    monkeypatch.setattr(transfer._client, "engine", lambda: bare)
    with pytest.raises(InvalidRequest, match="loads no adapters"):
        transfer.init_weight_transfer()
    transfer.destroy()
