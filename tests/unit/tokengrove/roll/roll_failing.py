"""Runners that fail, each in a way of its own, as users of ROLL write them by mistake."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, ClassVar

import httpx

from tests.support import user
from tokengrove.roll.runners import AgentRunner
from tokengrove.roll.runners.agent_runner import EpisodeTimeout
from tokengrove.roll.values import EpisodeResult


class Asks(AgentRunner):
    """Asks once, and is Finished."""

    def ask(self, content: Any = "Say exactly: one") -> None:
        with httpx.Client() as http:
            self._llm_request(http, [user(content)])

    def run_job(self, seed: int) -> Any:
        self.ask()
        return EpisodeResult("Finished", 1.0)


class ReturnsDict(Asks):
    def run_job(self, seed: int) -> Any:
        self.ask()
        return {"status": "Finished", "score": 1.0}


class ReturnsNothing(Asks):
    def run_job(self, seed: int) -> Any:
        self.ask()


class Misspells(Asks):
    def run_job(self, seed: int) -> Any:
        self.ask()
        return EpisodeResult("Fnished", 1.0)


class Raises(Asks):
    def run_job(self, seed: int) -> Any:
        self.ask()
        raise KeyError("instance_id")


class Exits(Asks):
    def run_job(self, seed: int) -> Any:
        raise SystemExit(1)


class Cancelled(Asks):
    def run_job(self, seed: int) -> Any:
        self.ask()
        raise asyncio.CancelledError


class SaysFailed(Asks):
    def run_job(self, seed: int) -> Any:
        self.ask()
        return EpisodeResult("Failed", 0.0, agent_exit_reason="the sandbox is gone")


class Silent(Asks):
    """Catches what goes wrong with its request, as agents do, and says that it has finished."""

    def run_job(self, seed: int) -> Any:
        try:
            self.ask(content=3)
        except httpx.HTTPError:
            return EpisodeResult("Finished", 0.0)


class TooLate(Asks):
    def run_job(self, seed: int) -> Any:
        self.ask()
        raise EpisodeTimeout("the episode has run for longer than it may")


class NoNumber(Asks):
    def run_job(self, seed: int) -> Any:
        self.ask()
        return EpisodeResult("Finished", float("nan"))


class NoStepNumber(Asks):
    def run_job(self, seed: int) -> Any:
        self.ask()
        return EpisodeResult("Finished", 1.0, [float("nan")])


class RefusedRequest(Asks):
    def run_job(self, seed: int) -> Any:
        self.ask(content=3)
        return EpisodeResult("Finished", 1.0)


class NoSetup(Asks):
    def setup(self) -> None:
        raise OSError("there is no image")


class Hangs(Asks):
    """Waits for `released`, which each test sets at its end."""

    released: ClassVar[threading.Event]

    def run_job(self, seed: int) -> Any:
        self.released.wait()
        return EpisodeResult("Finished", 1.0)


class FailsAtFirst(Asks):
    """Fails twice, and then goes well: never three times in a row."""

    def run_job(self, seed: int) -> Any:
        if seed % 3:
            raise ValueError(f"seed {seed}")
        return super().run_job(seed)


class Broken:
    """An environment of gem whose steps fail."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return "Say exactly: one", {}

    def step(self, action: Any) -> Any:
        raise ArithmeticError("the board is gone")


class Unpaid(Broken):
    """An environment of gem whose steps give `reward`."""

    def __init__(self, reward: Any = None, **others: Any) -> None:
        self.reward = reward

    def step(self, action: Any) -> Any:
        return "The end.", self.reward, True, False, {}
