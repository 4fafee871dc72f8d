"""The names of SGLang's arguments come from its source alone, and only from one that is understood."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from proxy.engine.arguments import check_known
from proxy.engine.sglang.option_names import option_names
from tokengrove.errors import ConfigurationError

ALWAYS = ("model_path", "tokenizer_path", "context_length", "log_level", "weight_version")
CLASS = "class {}:\n    constant = 1\n    def method(self): ...\n"


def fields(name: str, *names: str) -> str:
    return CLASS.format(name) + "".join(f"    {each}: A[int, 'help'] = 1\n" for each in names)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    spec = ModuleSpec("sglang", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    (tmp_path / "srt" / "arg_groups" / "fields").mkdir(parents=True)
    return tmp_path / "srt"


def test_names_are_the_annotated_fields_of_one_file_or_of_many(source: Path) -> None:
    (source / "server_args.py").write_text(fields("ServerArgs", *ALWAYS, "tp_size", "_inner"))
    assert option_names() == {*ALWAYS, "tp_size"}
    (source / "arg_groups" / "fields" / "memory.py").write_text(fields("Memory", "mem_fraction_static"))
    assert option_names() == {*ALWAYS, "tp_size", "mem_fraction_static"}


@pytest.mark.parametrize("text", ["", "class ServerArgs(:", fields("ServerArgs", "tp_size")])
def test_a_source_that_is_not_understood_gives_no_names(source: Path, text: str) -> None:
    (source / "server_args.py").write_text(text)
    assert option_names() is None


def test_without_the_package_there_are_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert option_names() is None


def test_of_many_options_the_nearest_is_named() -> None:
    many = [f"option_{number}" for number in range(100)] + ["tp_size"]
    with pytest.raises(ConfigurationError, match="SGLang has no option 'tp_sise'; did you mean tp_size"):
        check_known(["tp_sise"], many, "SGLang")
    with pytest.raises(ConfigurationError, match="SGLang has no option 'qq'; it has 101 others"):
        check_known(["qq"], many, "SGLang")
