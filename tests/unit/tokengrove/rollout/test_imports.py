"""What a text names is found in both notations, and what is not there is said with the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokengrove.errors import InvalidRequest
from tokengrove.rollout.imports import load


@pytest.mark.parametrize("path", ["collections.OrderedDict", "collections:OrderedDict"])
def test_both_notations_name_the_same_object(path: str) -> None:
    from collections import OrderedDict

    assert load(path) is OrderedDict


def test_a_name_inside_of_a_class_is_found_behind_a_colon() -> None:
    assert load("pathlib:Path.cwd") == Path.cwd


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("agent", "package.module:Name"),
        ("", "package.module:Name"),
        ("pkg.module:", "package.module:Name"),
        (":Name", "package.module:Name"),
        ("no.such.module:Name", "no module 'no'"),
        ("collections.NoSuchName", "module 'collections' has no 'NoSuchName'"),
    ],
)
def test_what_is_not_there_is_said(path: str, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        load(path)


def test_a_module_that_lacks_one_of_its_own_imports_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needy_agent.py").write_text("import a_package_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_missing"):
        load("needy_agent:Agent")
