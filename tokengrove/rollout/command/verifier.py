"""Runs the verifier command of an episode, in the place of the command, after all processes of the command have ended.

It has its own HOME on this machine. Its files and the folder of its reward are new, and its environment has no key of
the session. Its variables: `VERIFIER_FILES`, `REWARD_FILE`, `TOKENGROVE_TASK_FILE`, `TOKENGROVE_PROMPT_FILE` (if the
task has a prompt), `AGENT_OUTPUT_FILE`, `AGENT_EXIT_CODE`, `TOKENGROVE_TASK_ID` and `TOKENGROVE_SESSION_ID`.
"""

from __future__ import annotations

import base64
import io
import shlex
import shutil
import tarfile
import tempfile
from pathlib import Path

from tokengrove.rollout.command.failures import SHOWN, how_it_ended
from tokengrove.rollout.command.reward_file import JSON_FILE, REWARD_BYTES, TEXT_FILE, number, parse_reward, read_reward
from tokengrove.rollout.command.variables import inherited_variables, tool_variables
from tokengrove.rollout.command.workplace import Workplace, write_task
from tokengrove.rollout.episodes import RewardFailed
from tokengrove.rollout.sandboxes import CommandResult, Sandbox
from tokengrove.rollout.threads import in_thread

_NO_COMMAND = (126, 127)
"""The exit codes of a shell that could not run a program."""
_READ = f"""
for name in {JSON_FILE} {TEXT_FILE}; do
  file="$0/$name"
  if test -L "$file"; then echo "$name link"; exit; fi
  if test -e "$file"; then
    test -f "$file" || {{ echo "$name other"; exit; }}
    echo "$name file"; head -c {REWARD_BYTES + 1} "$file" | base64; exit
  fi
done"""
"""Prints the name and kind of the reward file, then its content in base64."""


async def verify(place: Workplace, ended: CommandResult, output: Path | None) -> dict[str, float]:
    """Run the verifier; return its rewards by name.

    Raises RewardFailed if it cannot be run or times out, or if its reward cannot be read, and InvalidRequest for a
    placeholder without a value.
    """
    assert place.options.verifier is not None
    on_host = place.sandbox is place.host or place.options.verifier_on_host
    site = _HostSite(place, ended) if on_host else _ContainerSite(place, ended)
    try:
        if on_host:
            await place.fetch()
        await site.prepare()
    except (ValueError, OSError) as error:
        raise RewardFailed(f"the verifier's files cannot be copied: {error}") from error
    try:
        command, values = place.values.script(place.options.verifier)
        limit_s = place.options.verifier_timeout_s
        process = await site.sandbox.launch(command, {**site.variables(), **values}, output=output)
        told = await process.wait(limit_s)
        await site.sandbox.kill_all()
        if told.timed_out:
            return _timed_out(place, limit_s)
        return _rewards(told, await site.written())
    except (ValueError, OSError) as error:
        raise RewardFailed(f"the verifier's reward cannot be read: {error}") from error


def _timed_out(place: Workplace, limit_s: float) -> dict[str, float]:
    if (reward := place.options.timeout_reward) is None:
        raise RewardFailed(f"the verifier has not ended within {limit_s:g} s (verifier_timeout_s)")
    return {"reward": reward}


def _rewards(told: CommandResult, written: dict[str, float] | None) -> dict[str, float]:
    """The rewards: from the reward file, else from the last printed line, else from the exit code."""
    if written is not None:
        return written
    if told.exit_code in _NO_COMMAND:
        raise RewardFailed(f"the verifier {how_it_ended(told)}: {told.output[-SHOWN:].strip()}")
    printed = _printed(told.output) if told.exit_code == 0 else None
    return {"reward": float(told.exit_code == 0) if printed is None else printed}


def _printed(output: str) -> float | None:
    """The number in the last non-empty line of an output, or None. Raises ValueError if it is not finite."""
    lines = output.split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    try:
        found = float(last)
    except ValueError:
        return None
    return number(found)


class _Site:
    """The place of a verifier's files. `control`: the path of a new folder in `sandbox`."""

    sandbox: Sandbox
    control = ""

    def __init__(self, place: Workplace, ended: CommandResult) -> None:
        self.place, self.ended = place, ended

    async def prepare(self) -> None:
        raise NotImplementedError

    async def written(self) -> dict[str, float] | None:
        raise NotImplementedError

    def variables(self) -> dict[str, str]:
        plan = self.place.episode.plan
        own = {name: self.place.values.fill(value) for name, value in self.place.options.verifier_env.items()}
        return {
            "VERIFIER_FILES": f"{self.control}/files",
            "REWARD_FILE": f"{self.control}/reward/{TEXT_FILE}",
            "AGENT_OUTPUT_FILE": f"{self.control}/output.txt",
            "AGENT_EXIT_CODE": str(self.ended.exit_code),
            "TOKENGROVE_TASK_FILE": f"{self.control}/task.json",
            **({} if self.place.values.prompt is None else {"TOKENGROVE_PROMPT_FILE": f"{self.control}/prompt.txt"}),
            "TOKENGROVE_TASK_ID": plan.task.task_id,
            "TOKENGROVE_SESSION_ID": plan.session_id,
            **own,
        }

    def write_control(self, folder: Path) -> None:
        """Write the input of the verifier into an empty folder of this machine."""
        options, values = self.place.options, self.place.values
        (folder / "reward").mkdir()
        write_task(folder, values.data, values.prompt)
        (folder / "output.txt").write_text(self.ended.output, "utf-8")
        if options.verifier_files is None:
            (folder / "files").mkdir()
        else:
            source = Path(values.path(options.verifier_files)).expanduser()
            shutil.copytree(source, folder / "files", symlinks=True)


class _HostSite(_Site):
    """On this machine, next to the working folder."""

    def __init__(self, place: Workplace, ended: CommandResult) -> None:
        super().__init__(place, ended)
        self.sandbox = place.host

    async def prepare(self) -> None:
        def make() -> str:
            # A random name, which the command could not know.
            folder = Path(tempfile.mkdtemp(prefix="verifier-", dir=self.place.host.folder))
            self.write_control(folder)
            (folder / "home").mkdir()
            return str(folder)

        self.control = await in_thread(make, "tokengrove-verifier-files")

    def variables(self) -> dict[str, str]:
        return {**tool_variables(), **inherited_variables(), "HOME": f"{self.control}/home", **super().variables()}

    async def written(self) -> dict[str, float] | None:
        return await in_thread(lambda: read_reward(Path(self.control) / "reward"), "tokengrove-verifier-reward")


class _ContainerSite(_Site):
    """In the container, in a folder in the working folder, which the containers of both commands share."""

    def __init__(self, place: Workplace, ended: CommandResult) -> None:
        super().__init__(place, ended)
        self.sandbox = place.sandbox
        self.control = f"{place.sandbox.working_folder}/.tokengrove-verifier"

    async def prepare(self) -> None:
        packed = await in_thread(self._packed, "tokengrove-verifier-files")
        name = shlex.quote(self.control)
        unpack = f"rm -rf -- {name} && mkdir -p -- {name} && tar -xf - -C {name}"
        process = await self.sandbox.launch(unpack, stdin=packed)
        told = await process.wait()
        if told.exit_code:
            raise RewardFailed(f"the verifier's files cannot be copied: {told.output[-SHOWN:].strip()}")

    def _packed(self) -> bytes:
        packed = io.BytesIO()
        with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=packed, mode="w") as archive:
            self.write_control(Path(folder))
            archive.add(folder, ".")
        return packed.getvalue()

    async def written(self) -> dict[str, float] | None:
        told = await self.sandbox.run(["/bin/sh", "-c", _READ, f"{self.control}/reward"])
        head, _, content = told.output.partition("\n")
        name, _, kind = head.partition(" ")
        if not name:
            return None
        if kind != "file":
            raise ValueError(f"{name} is a link" if kind == "link" else f"{name} is not a file")
        decoded = base64.b64decode(content)
        if len(decoded) > REWARD_BYTES:
            raise ValueError(f"{name} has more than {REWARD_BYTES} bytes")
        return parse_reward(name, decoded)
