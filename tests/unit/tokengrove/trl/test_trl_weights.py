"""TRL's weights become a folder that an engine loads, whatever the trainer sends of them and whatever fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import real_server
from tokengrove.client import Client
from tokengrove.errors import InvalidRequest
from tokengrove.trl.shards import BaseModel
from tokengrove.trl.weights import WeightTransfer

NAMES = ("embed", "layer.0", "layer.1", "head")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with four tensors of 16 bytes in two files."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "small"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    for number, names in enumerate((NAMES[:2], NAMES[2:])):
        save_file({name: torch.zeros(4) for name in names}, folder / f"model-{number}.safetensors")
    return folder


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_server(tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.fixture
def transfer(url: str, base: Path, tmp_path: Path) -> Iterator[WeightTransfer]:
    transfer = WeightTransfer(url, model=base, folder=tmp_path / "weights")
    yield transfer
    transfer.destroy()


def tensors(*names: str, value: float = 1.0) -> Iterator[tuple[str, Any]]:
    return ((name, torch.full((4,), value)) for name in names or NAMES)


def loaded(folder: Path) -> dict[str, float]:
    """The value of each tensor, read as the index says."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {path.name for path in folder.glob("*.safetensors")}
    return {name: float(load_file(folder / file)[name][0]) for name, file in index.items()}


@pytest.mark.parametrize(("shard_bytes", "files"), [(1000, 1), (32, 2), (40, 2), (16, 4), (1, 4)])
def test_a_file_holds_no_more_than_it_may(base: Path, tmp_path: Path, shard_bytes: int, files: int) -> None:
    BaseModel(base).write(tmp_path / "new", tensors(), shard_bytes)
    assert len(list((tmp_path / "new").glob("*.safetensors"))) == files
    assert loaded(tmp_path / "new") == dict.fromkeys(NAMES, 1.0)


def test_what_the_trainer_does_not_send_is_that_of_the_base_model(base: Path, tmp_path: Path) -> None:
    BaseModel(base).write(tmp_path / "new", tensors("layer.0"))
    assert loaded(tmp_path / "new") == {"embed": 0.0, "layer.0": 1.0, "layer.1": 0.0, "head": 0.0}
    assert json.loads((tmp_path / "new" / "generation_config.json").read_text()) == {"eos_token_id": 7}


def test_parts_of_one_storage_are_written_as_tensors_of_their_own(base: Path, tmp_path: Path) -> None:
    whole = torch.arange(8.0).reshape(4, 2)
    BaseModel(base).write(tmp_path / "new", iter([("embed", whole[:, 0]), ("head", whole[:, 1])]))
    assert loaded(tmp_path / "new")["head"] == 1.0


def test_names_of_another_model_are_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"'experts'.*no 'layer.0'"):
        BaseModel(base).write(tmp_path / "new", tensors("embed", "experts"))


@pytest.mark.parametrize("left", ["", "config.json"])
def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, left: str) -> None:
    if left:
        (tmp_path / left).write_text("{}")
    with pytest.raises(InvalidRequest, match="safetensors" if left else "config.json"):
        BaseModel(tmp_path)


def test_a_name_on_the_hub_is_the_model_that_was_fetched(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "hub" / "models--org--small"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40)
    shutil.copytree(base, cache / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    BaseModel("org/small").write(tmp_path / "new", tensors("head"))
    assert loaded(tmp_path / "new")["head"] == 1.0
    for name in ("org/other", "no/such/folder"):
        with pytest.raises(InvalidRequest, match=f"{name} is neither a folder"):
            BaseModel(name)


def test_each_transfer_is_the_next_version_of_the_server_and_leaves_one_folder(
    url: str, transfer: WeightTransfer, tmp_path: Path
) -> None:
    transfer.init_weight_transfer()
    with Client(url) as client:
        for version in (1, 2, 3):
            transfer.pause()
            assert client.engine().paused == "abort"
            transfer.send_weights(tensors(value=version))
            assert client.engine().paused == "abort"
            transfer.resume()
            state = client.engine()
            assert (state.version, transfer.version, state.paused) == (version, version, None)
        (folder,) = (tmp_path / "weights").glob("*/*")
        assert loaded(folder) == dict.fromkeys(NAMES, 3.0)
        transfer.destroy()
        assert not list((tmp_path / "weights").iterdir())


def test_an_engine_that_was_paused_runs_again_when_the_trainer_fails(url: str, transfer: WeightTransfer) -> None:
    transfer.init_weight_transfer()
    transfer.pause()
    with Client(url) as client:
        assert client.engine().paused
        transfer.destroy()
        assert client.engine().paused is None


def test_weights_that_do_not_reach_the_server_are_an_error_that_names_the_folder(
    url: str, transfer: WeightTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer.init_weight_transfer()

    def refuse(*_: Any, **__: Any) -> int:
        raise InvalidRequest("there is no such folder", param="path")

    monkeypatch.setattr(transfer._client, "update_weights", refuse)
    with pytest.raises(RuntimeError, match=r"weights 1 have not reached .*no such folder.*give `folder`"):
        transfer.send_weights(tensors())
    assert transfer.version == 0


def test_a_server_that_is_not_there_is_waited_for_no_longer_than_asked(base: Path) -> None:
    transfer = WeightTransfer("http://127.0.0.1:9", model=base, ready_s=0.0)
    with pytest.raises(Exception, match=r"127\.0\.0\.1:9"):
        transfer.init_weight_transfer()
    transfer.destroy()


def test_an_engine_without_weights_is_refused_before_training(
    url: str, transfer: WeightTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(url) as client:
        bare = replace(client.engine(), capabilities=("seed",))
    monkeypatch.setattr(transfer._client, "engine", lambda: bare)
    with pytest.raises(InvalidRequest, match="loads no new weights"):
        transfer.init_weight_transfer()
