"""A runner that tests name in configurations; `Runner.log` has what happened to all of its kind."""

from __future__ import annotations

import threading
from typing import ClassVar

import httpx

from tests.support import user
from tokengrove.roll.runners import AgentRunner
from tokengrove.roll.values import EpisodeResult


class Runner(AgentRunner):
    """Asks as often as its steps say, and ends the episode as `params.status` says. `log` has what happened to it."""

    log: ClassVar[list[str]] = []
    hangs: ClassVar[threading.Event] = threading.Event()
    hanging: ClassVar[threading.Event] = threading.Event()

    def setup(self) -> None:
        self.log.append("setup")

    def teardown(self) -> None:
        self.log.append("teardown")

    def cancel(self) -> None:
        self.log.append("cancel")
        self.hangs.set()

    def run_job(self, seed: int) -> EpisodeResult:
        self.log.append(f"seed {seed}")
        with httpx.Client() as client:
            for step in range(self.max_steps):
                self._llm_request(client, [user(f"Step {step}.")])
                self.step_scores.append(float(step))
        if self.env_params.get("hangs"):
            self.hanging.set()
            self.hangs.wait()
        if "raises" in self.env_params:
            raise RuntimeError(self.env_params["raises"])
        return EpisodeResult(
            self.env_params.get("status", "Finished"),
            0.5,
            self.step_scores,
            "as told",
            {"pass_rate": 0.25, "board": "#"},
        )
