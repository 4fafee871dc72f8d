"""`tokengrove demo`: agents against the built-in model; with --train also a trainer that updates its weights."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from proxy.progress import show_steps
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
    show_steps()
    if train:
        _train_demo(seed or 0, plot)
        return
    if seed is not None or plot is not None:
        raise ConfigurationError("--seed and --plot apply only with --train")
    from rich.console import Console

    from proxy.serving import server
    from tokengrove.demos.agents_demo import run_demo

    with tempfile.TemporaryDirectory(prefix="tokengrove-demo-") as folder:
        database = Path(folder) / "demo.db"
        settings = Settings(port=0, database_url=f"sqlite:///{database}", log_level="warning")
        with server.serving(settings) as url:
            run_demo(url, Console())


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
    with tempfile.TemporaryDirectory(prefix="tokengrove-demo-") as folder:
        model, database = Path(folder) / "tokengrove-tiny", Path(folder) / "demo.db"
        write_tiny_model(model, seed)
        # On the CPU even if there is a GPU: the trainer runs on the CPU, and ratios are exact only on the same device.
        settings = Settings(
            port=0,
            model=str(model),
            engine="transformers",
            engine_arg=("device=cpu",),
            database_url=f"sqlite:///{database}",
            log_level="warning",
        )
        try:
            with server.serving(settings) as url:
                run_train_demo(url, model, Console(), seed=seed, plot=plot)
        except ProxyError as error:
            fail(error.message)
