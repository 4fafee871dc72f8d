"""`tokengrove demo`: agents against the built-in model; with --train also a trainer that updates its weights."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from proxy.settings import Settings
from tokengrove.commands.failure import fail
from tokengrove.errors import ConfigurationError, ProxyError

_PACKAGES = ("torch", "transformers", "openai")  # of the extra `cpu`: the engine's, and that of the demo's agents


def demo(
    train: Annotated[
        bool,
        typer.Option("--train", help="Also train: claim samples, update the weights, repeat until the reward is high."),
    ] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, help="With --train: seed of the first weights and of the games (default 0).")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="With --train: file for a plot of the rewards (.svg or .html).")
    ] = None,
) -> None:
    """Run two short agents against the built-in model, reward them, and show their trees and the exported samples."""
    _require_packages("tokengrove demo --train" if train else "tokengrove demo")
    if train:
        _train_demo(seed or 0, plot)
        return
    if seed is not None or plot is not None:
        raise ConfigurationError("--seed and --plot apply only with --train")
    _agents_demo()


def _agents_demo() -> None:
    from rich.console import Console

    from proxy.app import write_tiny_model
    from proxy.serving import server
    from tokengrove.demos.agents import lessons
    from tokengrove.demos.agents_demo import run_demo
    from tokengrove.demos.lesson import teach

    print(TEACHING, flush=True)
    with tempfile.TemporaryDirectory(prefix="tokengrove-demo-") as folder:
        model = Path(folder) / "tokengrove-tiny"
        write_tiny_model(model, seed=0)
        teach(model, list(lessons()))
        stays = sys.stdin.isatty() and sys.stdout.isatty()
        with server.serving(_settings(Path(folder), model)) as url, suppress(KeyboardInterrupt):
            run_demo(url, Console(), stays=stays)
            if stays:
                print("The page stays until you press Ctrl-C.", flush=True)
                threading.Event().wait()


def _require_packages(command: str) -> None:
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ConfigurationError(
                f"the demo needs the package {package}, of the extra cpu: uvx --from 'tokengrove[cpu]' {command}"
            )


def _train_demo(seed: int, plot: Path | None) -> None:
    from rich.console import Console

    from proxy.app import write_tiny_model
    from proxy.serving import server
    from tokengrove.demos.train_demo import check_plot, run_train_demo

    check_plot(plot)
    print("Importing torch and transformers, and starting a server with the built-in model.\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="tokengrove-demo-") as folder:
        model = Path(folder) / "tokengrove-tiny"
        write_tiny_model(model, seed)
        try:
            with server.serving(_settings(Path(folder), model)) as url:
                run_train_demo(url, model, Console(), seed=seed, plot=plot)
        except ProxyError as error:
            fail(error.message)


def _settings(folder: Path, model: Path) -> Settings:
    """A server of `model` on the CPU even if there is a GPU, where a trainer computes the same logprobs."""
    return Settings(
        port=0,
        model=str(model),
        engine="transformers",
        engine_arg=("device=cpu",),
        database_url=f"sqlite:///{folder / 'demo.db'}",
        log_level="warning",
    )


TEACHING = """\
Importing torch and transformers, and teaching the built-in model (0.6 MB, random weights) a few answers,
right and wrong ones alike. It is then served, and samples all that it says below.
"""
