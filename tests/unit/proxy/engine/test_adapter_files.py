"""Adapters that were sent as bytes are whole files in private folders, which are removed."""

from __future__ import annotations

import errno
import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from proxy.engine.adapter_files import AdapterFiles
from proxy.engine.interface import AdapterSource
from tokengrove.errors import InvalidRequest, ScratchFull

CONFIG = {"peft_type": "LORA", "r": 2}
TENSORS = save({"a.lora_A.weight": np.ones((2, 3), np.float32), "a.lora_B.weight": np.zeros((3, 2), np.float32)})


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdapterFiles]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files = AdapterFiles()
    yield files
    files.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_has_both_files_and_only_its_user_can_read_it(files: AdapterFiles) -> None:
    source = files.write(CONFIG, TENSORS)
    folder = Path(source.path)
    assert (source.config, source.tensors) == (CONFIG, TENSORS)
    assert json.loads((folder / "adapter_config.json").read_bytes()) == CONFIG
    assert set(load_file(folder / "adapter_model.safetensors")) == {"a.lora_A.weight", "a.lora_B.weight"}
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]


def test_only_folders_of_its_own_are_removed(files: AdapterFiles, tmp_path: Path) -> None:
    files.remove(AdapterSource(str(tmp_path)))
    one, other = files.write(CONFIG, TENSORS), files.write(CONFIG, TENSORS)
    trainers = tmp_path.parent / "adapter"
    trainers.mkdir()
    for source in (one, AdapterSource(str(trainers)), AdapterSource(str(Path(one.path).parent))):
        files.remove(source)
    assert [Path(path).exists() for path in (one.path, other.path, trainers)] == [False, True, True]


@pytest.mark.parametrize(
    "tensors",
    [
        b"",
        b"1234567",
        TENSORS[:-1],
        TENSORS + b"x",
        TENSORS[:100],
        (2).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"null",
        (9).to_bytes(8, "little") + b'{"a":{} }',
        (8).to_bytes(8, "little") + b'{"a":[]}',
        b"\xff" * 40,
        b"PK\x03\x04" + bytes(100),
    ],
)
def test_bytes_that_are_no_whole_safetensors_file_are_refused(files: AdapterFiles, tensors: bytes) -> None:
    with pytest.raises(InvalidRequest) as failed:
        files.write(CONFIG, tensors)
    assert failed.value.param == "tensors"


@pytest.mark.parametrize(("number", "raised"), [(errno.ENOSPC, ScratchFull), (errno.EACCES, PermissionError)])
def test_a_disk_that_takes_no_file_leaves_nothing(files: AdapterFiles, number: int, raised: type[Exception]) -> None:
    files.write(CONFIG, TENSORS)
    before = list(Path(tempfile.gettempdir()).rglob("*"))
    with mock.patch.object(Path, "write_bytes", side_effect=OSError(number, "no")), pytest.raises(raised):
        files.write(CONFIG, TENSORS)
    assert list(Path(tempfile.gettempdir()).rglob("*")) == before


def test_the_first_adapters_that_arrive_at_once_have_one_root(files: AdapterFiles) -> None:
    with ThreadPoolExecutor(8) as threads:
        written = [*threads.map(lambda _: files.write(CONFIG, TENSORS), range(16))]
    assert len({Path(source.path).parent for source in written}) == 1
