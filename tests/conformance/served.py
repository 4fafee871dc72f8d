"""A server under test from a client's side: the addresses of sessions and their results.

This module uses only the standard library, because clients run in an environment without the server's packages."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import captures
from tests.conformance.recorder import Recorder

MODEL = "agent-model"


@dataclass(frozen=True)
class Capture:
    """Writes sessions that `recorder` saw into `folder`."""

    folder: Path
    recorder: Recorder

    def save(
        self,
        session: str,
        client: str,
        version: str,
        tree: list[Any],
        samples: list[Any],
        scrub: Mapping[str, str] | None = None,
    ) -> None:
        """Write the session as `SESSION.json`; `scrub`: texts of this machine, and what stands for them."""
        exchanges = [exchange for exchange in self.recorder.exchanges if exchange.session == session]
        text = {"client": client, "version": version, "api": tree[0]["api"]}
        places = {self.recorder.url: "http://127.0.0.1", str(Path.home()): "/home/agent", **(scrub or {})}
        turns = [captures.brief(captures.without(turn, places)) for turn in captures.turns(exchanges)]
        captures.write(self.folder / f"{session}.json", text, turns, captures.outcome(tree, samples))


@dataclass(frozen=True)
class Served:
    """`url` without a slash at the end. `capture`: where `keep` writes sessions."""

    url: str
    capture: Capture | None = None

    def openai(self, session: str) -> str:
        """Return the base URL for the OpenAI SDK and packages built on it."""
        return f"{self.url}/{session}/v1"

    def anthropic(self, session: str) -> str:
        """Return the base URL for the Anthropic SDK and packages built on it."""
        return f"{self.url}/{session}"

    def tree(self, session: str) -> list[Any]:
        """Return the interactions of a session in order of completion."""
        found: list[Any] = self._json(f"/rl/sessions/{session}")["interactions"]
        return found

    def samples(self, session: str) -> list[Any]:
        """Return the samples of a session in layout concat. Forced calls are trained too: some clients force them."""
        body = {"session_id": session, "layout": "concat", "train": {"constrained": True}}
        found: list[Any] = self._json("/export_trajectories", body)["samples"]
        return found

    def read(self, path: str) -> Any:
        """Return the JSON of a GET."""
        return self._json(path)

    def content(self, path: str) -> bytes:
        """Return the content of a GET."""
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            found: bytes = response.read()
        return found

    def keep(self, session: str, client: str, version: str, scrub: Mapping[str, str] | None = None) -> None:
        """Write the session for the fast tests, if asked to; `scrub` is `Capture.save`'s."""
        if self.capture is not None:
            self.capture.save(session, client, version, self.tree(session), self.samples(session), scrub)

    def _json(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=30) as response:
            return json.loads(response.read())


def assert_trained_once(served: Served, session: str, *samples: int) -> None:
    """Assert that the session has samples of so many turns, and that each sampled token is trained once."""
    tree, found = served.tree(session), served.samples(session)
    assert [node["status"] for node in tree] == ["complete"] * len(tree), tree
    assert [len(sample["interaction_ids"]) for sample in found] == list(samples), [node["reason"] for node in tree]
    assert sum(sum(sample["loss_mask"]) for sample in found) == sum(node["output_tokens"] for node in tree)


def assert_one_chain(served: Served, session: str, turns: int) -> None:
    """Assert that the session is one sample of `turns` turns in which every sampled token is trained once."""
    tree = served.tree(session)
    assert [node["status"] for node in tree] == ["complete"] * turns, tree
    samples = served.samples(session)
    assert len(samples) == 1, [(node["reason"], node["parent_id"]) for node in tree]
    (sample,) = samples
    assert sample["interaction_ids"] == [node["id"] for node in tree]
    assert sum(sample["loss_mask"]) == sum(node["output_tokens"] for node in tree)
    assert all(node["aligned"] for node in tree[1:])
