"""Episodes for commands: a started session on a server that a process reaches, and what a command leaves of it."""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokengrove.client import AsyncClient
from tokengrove.rollout.command import CommandAgent
from tokengrove.rollout.episodes import AgentSpec, Episode, EpisodePlan, EpisodeResult, Server, Task, play

KEY = "a-key-of-the-administrator"
CURL = """curl -s --fail-with-body "$OPENAI_BASE_URL/chat/completions" \
 -H "authorization: Bearer $OPENAI_API_KEY" -H 'content-type: application/json' \
 -d '{"model": "any", "max_tokens": 4, "messages": [{"role": "user", "content": "Name a tree."}]}'
"""
"""A turn of an agent that is a shell script."""
_numbers = itertools.count()


@dataclass(frozen=True)
class Commands:
    """Plays commands on one server."""

    url: str

    def plan(self, *words: str, data: Mapping[str, Any] | None = None, **options: Any) -> EpisodePlan:
        """`options` are those of the command."""
        task = Task("trees", {"prompt": "Name a tree."} if data is None else data)
        spec = AgentSpec("command", words=words, arguments=options)
        session_id = f"command-{next(_numbers)}"
        return EpisodePlan(task, 1, 0, Server(self.url, KEY), spec, session_id, seed=7)

    async def played(self, *words: str, data: Mapping[str, Any] | None = None, **options: Any) -> EpisodeResult:
        """The result of a whole episode."""
        plan = self.plan(*words, data=data, **options)
        return await play(plan, CommandAgent(plan.agent))

    @asynccontextmanager
    async def episode(self, plan: EpisodePlan) -> AsyncIterator[Episode]:
        """A started session, for an agent that need not call its model."""
        async with AsyncClient(self.url, KEY) as client:
            session = await client.start_session("trees", session_id=plan.session_id)
            yield Episode(plan, session, client)

    async def rewarded(self, *words: str, data: Mapping[str, Any] | None = None, **options: Any) -> float | None:
        """What the agent returns, without a turn."""
        plan = self.plan(*words, data=data, **options)
        async with self.episode(plan) as episode:
            return await CommandAgent(plan.agent).play(episode)

    async def printed(self, script: str, tmp_path: Path, **options: Any) -> str:
        """What a shell script prints as the command of an episode."""
        plan = self.plan("sh", "-c", script, keep_output=str(tmp_path / "kept"), **options)
        async with self.episode(plan) as episode:
            await CommandAgent(plan.agent).play(episode)
        return (tmp_path / "kept" / f"{plan.session_id}.log").read_text()


def python(code: str) -> tuple[str, ...]:
    """The words of a command that runs this code."""
    return (sys.executable, "-c", code)


def sh(*lines: str) -> tuple[str, ...]:
    """The words of a shell script that stops at the first line that fails."""
    return ("sh", "-ec", "\n".join(lines))


def write(path: Path, text: str) -> str:
    """A shell line that writes a file."""
    return f"printf %s {shlex.quote(text)} > {shlex.quote(str(path))}"
