"""The doctor reports what holds, forks, is refused or breaks, from tokenizer and chat template alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from proxy.rendering import Renderer, load_renderer
from proxy.rendering.examination import SHAPES, Verdict, examine
from proxy.settings import Settings
from tests.unit.proxy.rendering.rendering_folders import FAMILIES
from tokengrove import commands

# What a chat template refuses or moves; everything else holds.
REFUSED = {
    "cohere2": 9,
    "gemma3": 10,
    "phi3": 7,
    "deepseekv3": 7,
    "llama3_1": 1,
    "gptoss": 2,
    "qwen3_5_think": 1,
    "qwen3_8": 1,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_breaks_with_a_published_template(spelled: Callable[[str], Renderer], name: str) -> None:
    found = examine(spelled(name))
    assert not found.broken
    verdicts = [check.verdict for check in found.checks]
    assert verdicts.count(Verdict.REFUSED) == REFUSED.get(name, 0)
    forks = [check.name for check in found.checks if check.verdict is Verdict.FORKS]
    assert forks == (["late system message"] if name == "deepseekv3" else [])
    assert {check.name.partition(":")[0] for check in found.checks} == {shape.name for shape in SHAPES}


def test_the_built_in_model_holds_in_every_shape(tiny: Renderer) -> None:
    found = examine(tiny)
    assert {check.verdict for check in found.checks} == {Verdict.HOLDS}
    assert dict(found.facts)["tool calls"] == "hermes (<tool_call>)"
    assert dict(found.facts)["template"] == "minijinja (same text as jinja2 in the self-check)"
    details = {check.name: check.detail for check in found.checks}
    assert details["cut inside reasoning"] == "closed with '</think><|im_end|>' as context"


def test_template_retention_forks_at_a_user_turn_and_says_so(tiny_folder: Path) -> None:
    found = examine(load_renderer(Settings(thinking_retention="template"), tiny_folder))
    forks = {check.name for check in found.checks if check.verdict is Verdict.FORKS}
    assert {"new user turn", "reasoning kept"} <= forks
    assert "tool loop" not in forks
    assert not found.broken


def test_a_wrong_tool_parser_is_reported_as_broken(published: Callable[[str], Path]) -> None:
    found = examine(load_renderer(Settings(tool_parser="hermes"), published("glm4moe")))
    broken = {check.name for check in found.checks if check.verdict is Verdict.BREAKS}
    assert "tool loop: calls read back" in broken
    assert found.broken


def test_checks_are_values(tiny: Renderer) -> None:
    assert examine(tiny) == examine(tiny)
    assert all(dataclasses.asdict(check) for check in examine(tiny).checks)


def test_the_command_ends_with_1_only_if_something_breaks(published: Callable[[str], Path]) -> None:
    folder = str(published("glm4moe"))
    fine = CliRunner().invoke(commands.app, ["doctor", "--tokenizer", folder])
    assert (fine.exit_code, "glm-4.5" in fine.stdout, "breaks" in fine.stdout) == (0, True, False)
    wrong = CliRunner().invoke(commands.app, ["doctor", "--tokenizer", folder, "--tool-parser", "hermes"])
    assert (wrong.exit_code, "breaks" in wrong.stdout) == (1, True)
