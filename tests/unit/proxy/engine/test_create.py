"""`--engine auto` is SGLang if there is a GPU and the package, else transformers; unknown arguments are refused."""

from __future__ import annotations

import importlib.util
import socket
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from proxy.engine.create import create_engine, model_folder
from proxy.engine.sglang.engine import SglangEngine
from proxy.engine.transformers.engine import TransformersEngine
from proxy.settings import Settings
from tokengrove.errors import ConfigurationError

VOCABULARY = 640
_find = importlib.util.find_spec


def machine(monkeypatch: pytest.MonkeyPatch, *, gpu: bool, sglang: bool) -> None:
    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return (ModuleSpec(name, None) if sglang else None) if name == "sglang" else _find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)


@pytest.mark.parametrize(
    ("gpu", "sglang", "kind"),
    [
        (True, True, SglangEngine),
        (True, False, TransformersEngine),
        (False, True, TransformersEngine),
        (False, False, TransformersEngine),
    ],
)
def test_auto_is_sglang_if_cuda_and_sglang_are_present(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, sglang: bool, kind: type
) -> None:
    machine(monkeypatch, gpu=gpu, sglang=sglang)
    assert type(create_engine(Settings(), VOCABULARY)) is kind


@pytest.mark.parametrize("gpu", [True, False])
def test_a_named_engine_is_created_on_any_machine(monkeypatch: pytest.MonkeyPatch, gpu: bool) -> None:
    machine(monkeypatch, gpu=gpu, sglang=True)
    assert type(create_engine(Settings(engine="sglang"), VOCABULARY)) is SglangEngine
    assert type(create_engine(Settings(engine="transformers"), VOCABULARY)) is TransformersEngine


def test_a_missing_sglang_is_refused_with_the_command_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu=True, sglang=False)
    with pytest.raises(ConfigurationError, match=r"pip install 'tokengrove\[sglang\]'"):
        create_engine(Settings(engine="sglang"), VOCABULARY)


def test_a_missing_psutil_is_refused_before_continuous_batching_finds_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "psutil" else _find(name))
    with pytest.raises(ConfigurationError, match="needs the package psutil"):
        create_engine(Settings(engine="transformers"), VOCABULARY)


def test_the_one_file_build_names_no_package_to_add_but_what_it_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(
        ConfigurationError, match=r"one-file build lacks it.*engine scripted, mailbox or the URLs"
    ) as refused:
        create_engine(Settings(), VOCABULARY)
    assert "pip install" not in str(refused.value)


def test_an_argument_of_the_mailbox_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="no_such"):
        create_engine(Settings(engine="mailbox", engine_arg=("no_such=1",)), VOCABULARY)


def test_a_model_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"--model {tmp_path} has no config.json"):
        model_folder(Settings(model=str(tmp_path)))


def test_an_unknown_argument_is_refused_with_the_options_of_the_engine() -> None:
    with pytest.raises(ConfigurationError) as refused:
        create_engine(Settings(engine="scripted", engine_arg=("foo=1",)), VOCABULARY)
    assert str(refused.value) == (
        "--engine-arg foo: the scripted engine with play=babble has no option 'foo'; "
        "its options are chunk, delay_s, play, tokens"
    )


async def test_servers_that_do_not_answer_are_named_once_each_with_the_way_out() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        engine = create_engine(Settings(engine=url, engine_arg=("start_timeout_s=0",)), VOCABULARY)
        with pytest.raises(ConfigurationError, match="start_timeout_s=SECONDS") as refused:
            await engine.start()
    assert str(refused.value).count(url) == 1 and f"{url} does not answer" in str(refused.value)
