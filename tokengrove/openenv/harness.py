"""Harnesses that can be intercepted: an unmodified agent, run by a function or a command."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokengrove.openenv.interception import Interception
from tokengrove.rollout.agent_call import call_agent
from tokengrove.rollout.command.addresses import addresses_of
from tokengrove.rollout.command.placeholders import Placeholders
from tokengrove.rollout.command.prompts import usual_prompt
from tokengrove.rollout.command.variables import codex_configuration, program_variables, tool_variables
from tokengrove.rollout.environment import placeholder_key
from tokengrove.rollout.failures import AgentFailed
from tokengrove.rollout.placeholder_names import check_placeholders
from tokengrove.rollout.sandboxes import LocalProcessSandbox

_TASK, _CODEX = "task.json", "../home/.codex/config.toml"
_MODEL = "tokengrove"
_SHOWN = 2000
"""Characters of a command's output in its error: the end of the output, which has the reason."""


class Harness(Protocol):
    """Runs an agent. It is cancelled when its session is closed, and must leave no process behind."""

    async def run(self, task: Any, access: Interception) -> Any:
        """Run the agent on `task` to its end. An exception fails its session."""
        ...


class FunctionHarness:
    """Calls `function(task, ...)`, a coroutine function or a plain function, which runs in a thread.

    The function receives, by name, the arguments that its signature accepts of `base_url`, `root_url`, `api_key` and
    `http_client` (an httpx client that also reaches a server of this process). A plain function cannot be stopped, but
    its next call of the model fails after its session has ended.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    async def run(self, task: Any, access: Interception) -> Any:
        with access.http_client() as http, placeholder_key():
            extra = {"base_url": access.base_url, "root_url": access.root_url, "api_key": access.api_key}
            return await call_agent(self._function, task, {**extra, "http_client": http})


class CommandHarness:
    """Runs a command in its own folder, with the variables and files by which SDKs and coding agents find their server.

    `words` is a program with its arguments, in which placeholders (`{prompt}`, `{base_url}`, `{data.FIELD}`, ...) are
    replaced by values of the rollout, or a text for the shell, without placeholders. `TASK_FILE` is the path of a file
    with the task as JSON. `variables`: additional environment variables. Raises ConfigurationError for a misspelt
    placeholder.
    """

    def __init__(self, words: Sequence[str] | str, variables: Mapping[str, str] | None = None) -> None:
        self._words, self._variables = words, dict(variables or {})
        for word in () if isinstance(words, str) else words:
            check_placeholders(word, "the command")

    async def run(self, task: Any, access: Interception) -> str:
        """Return the end of its output. Raises AgentFailed, with the output, if the exit code is not 0."""
        sandbox, addresses = LocalProcessSandbox({}), addresses_of(access)
        try:
            await sandbox.start()
            folder = Path(sandbox.working_folder)
            await sandbox.upload(_TASK, json.dumps(task, ensure_ascii=False, default=str).encode())
            await sandbox.upload(_CODEX, codex_configuration(addresses, _MODEL).encode())
            variables = {**tool_variables(), **program_variables(addresses, _MODEL), "TASK_FILE": str(folder / _TASK)}
            words = self._words if isinstance(self._words, str) else _values(task, access, folder).words(self._words)
            process = await sandbox.launch(words, {**variables, **self._variables})
            code, output, _ = await process.wait()
        finally:
            await sandbox.stop()
        if code != 0:
            ended = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise AgentFailed("the command", f"ended with {ended}: {output[-_SHOWN:].strip()}")
        return output


def _values(task: Any, access: Interception, folder: Path) -> Placeholders:
    """The values of placeholders. A task that is a text is the prompt."""
    data = task if isinstance(task, Mapping) else {}
    values = {
        **{"base_url": access.base_url, "root_url": access.root_url, "api_key": access.api_key, "model": _MODEL},
        **{"task_id": access.rollout_id, "session_id": access.session_id, "sample": "0", "seed": "0"},
        **{"workdir": str(folder), "home": str(folder.parent / "home"), "container": ""},
    }
    return Placeholders(values, data, task if isinstance(task, str) else usual_prompt(data))


def harness_of(agent: Harness | Callable[..., Any] | Sequence[str] | str) -> Harness:
    """A harness for an object that is a harness, a function, or the words of a command."""
    if isinstance(agent, str) or not callable(getattr(agent, "run", agent)):
        return CommandHarness(agent)  # type: ignore[arg-type]
    return agent if hasattr(agent, "run") else FunctionHarness(agent)  # type: ignore[arg-type]
