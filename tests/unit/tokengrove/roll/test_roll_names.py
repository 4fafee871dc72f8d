"""Code written for ROLL imports our classes under ROLL's names; class paths in a configuration mean the same."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tokengrove.roll as roll
from tokengrove.client import Client
from tokengrove.errors import InvalidRequest
from tokengrove.roll.config.roll_modules import MODULES, ours

RUNNER = """
from roll.pipeline.agentic.agent_runner.base import AgentRunner, EpisodeResult


class MyRunner(AgentRunner):
    def run_job(self, seed):
        return EpisodeResult("Finished", 1.0)
"""


@pytest.fixture(autouse=True)
def no_names_of_other_tests() -> Iterator[None]:
    finders = list(sys.meta_path)
    sys.meta_path[:] = [each for each in finders if type(each).__module__ != roll.use_roll_names.__module__]
    forget()
    yield
    sys.meta_path[:] = finders
    forget()


def forget() -> None:
    for name in [each for each in sys.modules if each == "roll" or each.startswith(("roll.", "my_agents"))]:
        del sys.modules[name]


def write(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()


def test_imports_of_roll_have_our_classes() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("roll")
    roll.use_roll_names()
    roll.use_roll_names()
    space: dict[str, object] = {}
    exec(
        "from roll.pipeline.agentic.agent_runner.base import AgentRunner, EpisodeResult\n"
        "from roll.distributed.scheduler.protocol import DataProto as Batch\n"
        "import roll.pipeline.agentic.agentic_config as configs\n"
        "from roll.configs.generating_args import *\n"
        "from roll.utils.logging import get_logger\n"
        "from roll.distributed.scheduler.router import RouterManager\n",
        space,
    )
    assert space["AgentRunner"] is roll.AgentRunner
    assert space["EpisodeResult"] is roll.EpisodeResult
    assert space["Batch"] is roll.DataProto
    assert space["configs"].AgenticConfig is roll.AgenticConfig  # type: ignore[attr-defined]
    assert space["GeneratingArguments"] is roll.GeneratingArguments
    assert space["get_logger"] is logging.getLogger
    assert space["RouterManager"] is Client
    assert not hasattr(space["configs"], "Nothing")  # as pickle asks every module


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_name_of_the_table_is_there(module: str) -> None:
    if "envs" in MODULES[module].values():
        pytest.importorskip("gem")
    for name in MODULES[module]:
        assert ours(f"{module}.{name}") is not None, name


def test_a_tensor_is_cut_or_padded_to_a_length() -> None:
    torch = pytest.importorskip("torch")
    roll.use_roll_names()
    pad_to_length = importlib.import_module("roll.utils.functionals").pad_to_length
    mask = torch.tensor([[True, False, True]])
    assert torch.equal(pad_to_length(mask, 4, 0), torch.tensor([[True, False, True, False]]))
    assert torch.equal(pad_to_length(mask, 2, 0), torch.tensor([[True, False]]))
    assert pad_to_length(torch.ones(1, 2), 3, 7.0, dim=0).tolist() == [[1, 1], [7, 7], [7, 7]]


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("from roll.pipeline.agentic.agentic_pipeline import AgenticPipeline", "it trains; AgenticRolloutPipeline"),
        ("from roll.pipeline.agentic.agentic_config import RewardConfig", "there are AgenticConfig, EnvManagerConfig"),
        ("import roll.third_party.megatron", r"roll\.third_party is not here"),
        ("from roll.pipeline.agentic.proxy.proxy_server import ProxyServer", "the server is the proxy"),
        ("from roll.datasets.global_dataset import GlobalDatasetManager", "reset_datasets"),
        ("from roll.pipeline.agentic.env.webshop import env", "register yours with gem.register"),
    ],
)
def test_a_name_that_is_not_here_says_why(statement: str, message: str) -> None:
    roll.use_roll_names()
    with pytest.raises(ImportError, match=message):
        exec(statement, {})


def test_an_installed_package_roll_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "roll/__init__.py", "value = 1", monkeypatch)
    with pytest.raises(InvalidRequest, match=f"installed at {tmp_path}"):
        roll.use_roll_names()
    assert importlib.import_module("roll").value == 1
    assert roll.resolve("roll.value") == 1  # what it has and we lack is its own
    path = "roll.pipeline.agentic.agentic_config.AgenticConfig"
    assert roll.resolve(path) is roll.AgenticConfig


def test_a_folder_roll_without_code_is_no_package_and_hides_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "roll/service_config.yaml", "agents: []", monkeypatch)
    importlib.import_module("roll")
    write(tmp_path, "my_agents.py", RUNNER, monkeypatch)
    assert issubclass(roll.resolve("my_agents.MyRunner"), roll.AgentRunner)
    write(tmp_path, "roll/code.py", "value = 1", monkeypatch)
    forget()
    sys.meta_path[:] = [each for each in sys.meta_path if type(each).__module__ != roll.use_roll_names.__module__]
    with pytest.raises(InvalidRequest, match="is installed at"):
        roll.use_roll_names()


def test_a_path_of_roll_means_our_class() -> None:
    assert roll.resolve("roll.pipeline.agentic.agent_runner.base.AgentRunner") is roll.AgentRunner
    assert roll.resolve("roll.distributed.scheduler.protocol:DataProto") is roll.DataProto
    assert roll.resolve(roll.AgentRunner) is roll.AgentRunner


def test_a_class_of_a_module_written_for_roll_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "my_agents.py", RUNNER, monkeypatch)
    runner = roll.resolve("my_agents.MyRunner")
    assert issubclass(runner, roll.AgentRunner)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, "agent_runner_cls must be the path of a class"),
        ("<fully qualified class path>", "agent_runner_cls: '<fully qualified class path>' names no Python object"),
        ("no_such_package.Runner", "agent_runner_cls: .*there is no module 'no_such_package'"),
        ("roll.pipeline.agentic.agentic_pipeline.AgenticPipeline", "agent_runner_cls: .*it trains"),
    ],
)
def test_a_path_that_names_nothing_is_refused(path: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        roll.resolve(path, "agent_runner_cls")
    assert caught.value.param == "agent_runner_cls"
