"""Files and answers of models that are nested deeper than their parsers recurse are refused, or taken as text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.rendering.json_files import read_json
from proxy.rendering.templates.template_text import TemplateText
from proxy.settings.sources import read_config_file
from tokengrove.errors import ConfigurationError, InvalidRequest
from tokengrove.kinds import verl_loop
from tokengrove.openenv import model_step, react
from tokengrove.roll.config import compose
from tokengrove.roll.rock.data_files import read_rows
from tokengrove.roll.runners.tools import mcp_tool
from tokengrove.rollout.config import Config
from tokengrove.rollout.harbor import data, task_folder
from tokengrove.rollout.harbor.dockerfile import instructions
from tokengrove.verl.registry import register_file
from tokengrove.verl.tools.registry import _entries

DEEP = "[" * 1_500
DEEP_JSON = "[" * 100_000


@pytest.mark.parametrize(
    ("name", "text", "read", "error"),
    [
        ("tokengrove.toml", f"port = {DEEP}", lambda file: read_config_file(file), ConfigurationError),
        ("task.toml", f"version = {DEEP}", lambda file: task_folder._config(file.parent), task_folder.BadTask),
        ("config.yaml", DEEP, lambda file: verl_loop._of_file(str(file)), InvalidRequest),
        ("loops.yaml", DEEP, lambda file: register_file(file), InvalidRequest),
        ("roll.yaml", DEEP, lambda file: compose(file), InvalidRequest),
        ("tools.yaml", DEEP, lambda file: _entries(str(file)), InvalidRequest),
    ],
)
def test_a_file_of_any_depth_is_refused_by_name(
    tmp_path: Path, name: str, text: str, read: Callable[[Path], Any], error: type[Exception]
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(error, match=f"{name}.* is nested too deeply"):
        read(file)


def test_sections_that_defaults_name_may_be_of_any_depth(tmp_path: Path) -> None:
    (tmp_path / "part.yaml").write_text("a: 1")
    file = tmp_path / "whole.yaml"
    file.write_text(f"defaults: [part@{'a.' * 2_000}a]")
    with pytest.raises(InvalidRequest, match=r"whole\.yaml' is nested too deeply"):
        compose(file)


def test_json_files_of_any_depth_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "deep.json"
    file.write_text(DEEP_JSON)
    with pytest.raises(ConfigurationError, match=r"deep\.json cannot be read"):
        read_json(file)
    with pytest.raises(InvalidRequest, match=r"deep\.json"):
        read_rows(str(file))
    assert data._registry(file) is None


def test_a_dockerfile_may_have_any_depth_and_length(tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text(f"FROM a\nCMD {DEEP_JSON}\n")
    assert instructions(file)[-1].words is None
    file.write_text("FROM a\n" + "#\n" * 200_000 + "RUN a \\\n" + "b \\\n" * 100_000 + "\\\n# no line\n\nc\n")
    assert instructions(file)[-1].value == "a" + " b" * 100_000 + " c"


@pytest.mark.parametrize(
    "text",
    ["{% if x %}" * 150 + "{% endif %}" * 150, "{{ " + "(" * 3_000 + "1" + ")" * 3_000 + " }}", "{{ " + "not " * 3_000],
)
def test_a_chat_template_of_any_depth_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="the chat template is nested too deeply"):
        TemplateText(text, {})


def test_interpolations_and_sections_may_be_of_any_depth() -> None:
    chain = {f"a{number}": f"${{a{number + 1}}}" for number in range(2_000)}
    with pytest.raises(InvalidRequest, match="more than 50 interpolations of the configuration"):
        Config({**chain, "a2000": 1}).to_dict()
    assert Config({**chain, "a2000": 1}).select("a1960") == 1
    deep: dict[str, Any] = {}
    for _ in range(2_000):
        deep = {"a": deep}
    with pytest.raises(InvalidRequest, match="the configuration is nested too deeply"):
        Config(deep).to_dict()


def test_answers_of_a_model_may_be_of_any_depth() -> None:
    assert react._arguments(DEEP_JSON) == DEEP_JSON
    assert model_step._arguments(DEEP_JSON) == {}
    with pytest.raises(ValueError, match="not JSON"):
        mcp_tool._call(DEEP_JSON)
