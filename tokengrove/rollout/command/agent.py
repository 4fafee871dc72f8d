"""Plays an episode with a command: makes a folder, runs the command and the verifier, and cleans up."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

from tokengrove.errors import ConfigurationError, InvalidRequest
from tokengrove.loopback import is_loopback
from tokengrove.rollout.cancellation import to_the_end
from tokengrove.rollout.command.failures import failure_of
from tokengrove.rollout.command.reward_file import main_reward
from tokengrove.rollout.command.verifier import verify
from tokengrove.rollout.command.verifier_function import load_verifier, verify_by_function
from tokengrove.rollout.command.workplace import Workplace
from tokengrove.rollout.command_options import CommandOptions
from tokengrove.rollout.episodes import AgentSpec, Episode, EpisodeEnded, RewardFailed
from tokengrove.rollout.placeholder_names import check_placeholders, has_placeholders
from tokengrove.rollout.sandboxes import CommandResult
from tokengrove.rollout.sandboxes.by_name import sandbox_class


class CommandAgent:
    """A command as an agent. `spec.words`: the command, with placeholders.

    `spec.arguments`: the fields of `CommandOptions` by name. Each episode has its own folder, so any number of episodes
    can run concurrently.
    """

    def __init__(self, spec: AgentSpec) -> None:
        """Raises ConfigurationError, which names the flag, for an invalid option or a missing program.

        Raises InvalidRequest for a verifier function that cannot be imported.
        """
        self.words = tuple(spec.words)
        self.options = CommandOptions.read(spec.arguments)
        if not self.words:
            raise ConfigurationError("there is no command: give one after --")
        for word in self.words:
            check_placeholders(word, "the command")
        self._check_program()
        self._sandbox = None if self.options.sandbox is None else sandbox_class(self.options.sandbox)
        if self._sandbox is not None:
            self._sandbox(self.options.sandbox_args)  # raises for wrong settings and for an SDK that is missing
        path = self.options.verifier_function
        self._function = None if path is None else load_verifier(path)
        self._outputs = None if self.options.keep_output is None else _folder(self.options.keep_output)

    async def play(self, episode: Episode) -> float | None:
        """Run the command and its verifier; return the reward, or None without a verifier.

        Raises EpisodeEnded if the command cannot be started, exceeds its time limit or exits with a code that is a
        failure, RewardFailed if the verifier fails, and InvalidRequest if the working folder cannot be made or a
        placeholder has no value.
        """
        if episode.client.app is not None:
            raise InvalidRequest(
                "a command is another process, which cannot reach a server in this process: start `tokengrove serve` "
                "and give its address",
                param="url",
            )
        self.check_server(episode.session.root_url)
        place = Workplace(self.options, episode)
        try:
            await place.open()
            return await self._play(place)
        finally:
            await to_the_end(place.close())

    def check_server(self, url: str = "") -> None:
        """Raise ConfigurationError if a remote sandbox cannot reach `server_url`, or else `url`: a loopback address.

        `url`: the address of a session; "" before the first one, because only the server knows its public address.
        """
        seen = self.options.server_url or url
        if self._sandbox is not None and self._sandbox.elsewhere and is_loopback(seen):
            raise ConfigurationError(
                f"{seen} is reachable from this machine only, and --sandbox {self.options.sandbox} is elsewhere: start "
                "the server with --public-url or --expose, or give its public address as --server-url"
            )

    async def close(self) -> None:
        """Do nothing: episodes share no resources."""

    async def _play(self, place: Workplace) -> float | None:
        output = None if self._outputs is None else self._outputs / f"{place.episode.plan.session_id}.log"
        ended = await self._run(place, output)
        options = self.options
        if not (ended.timed_out and options.verify_timed_out):
            codes = None if options.any_exit_code else options.exit_codes
            if failure := failure_of(ended, "the command", options.command_timeout_s, codes):
                raise failure
        values = await self._verified(place, ended, output)
        return None if values is None else self._rewarded(place.episode, values)

    async def _run(self, place: Workplace, output: Path | None) -> CommandResult:
        """Run the command to its end, and kill the processes that it has left."""
        begun = time.monotonic()
        try:
            words = place.values.words(self.words)
            process = await place.sandbox.launch(words, place.variables(), stdin=self._stdin(place), output=output)
        except (OSError, ValueError) as error:  # no such program, a prompt that is too long or has a null character
            raise EpisodeEnded("Failed", f"the command cannot be started: {error}") from error
        ended = await process.wait(self.options.command_timeout_s)
        await place.sandbox.kill_all()
        place.episode.ending["metrics"] = {
            **place.episode.ending.get("metrics", {}),
            "command_s": round(time.monotonic() - begun, 3),
            "exit_code": float(ended.exit_code),
        }
        return ended

    async def _verified(self, place: Workplace, ended: CommandResult, output: Path | None) -> dict[str, float] | None:
        if self._function is not None:
            return await verify_by_function(place, self._function, ended)
        if self.options.verifier is not None:
            return await verify(place, ended, output)
        return None

    def _rewarded(self, episode: Episode, values: dict[str, float]) -> float:
        """The main reward. The other values become scores of the episode."""
        try:
            reward = main_reward(values)
        except ValueError as error:
            raise RewardFailed(f"the verifier's reward cannot be read: {error}") from error
        episode.scores.update({name: value for name, value in values.items() if name != "reward"})
        return reward

    def _stdin(self, place: Workplace) -> bytes:
        kind = self.options.stdin
        if kind == "task":
            return json.dumps(dict(place.values.data), ensure_ascii=False, default=str).encode()
        if kind == "prompt":
            return place.values.fill("{prompt}").encode()
        if kind is None and not any("{prompt}" in word for word in self.words):
            return (place.values.prompt or "").encode()
        return b""

    def _check_program(self) -> None:
        """Raise ConfigurationError if the program does not exist. A program elsewhere is not checked."""
        program, path = self.words[0], self.options.env.get("PATH")
        elsewhere = self.options.container is not None or self.options.sandbox is not None
        if elsewhere or "/" in program or has_placeholders(program):
            return
        if not has_placeholders(path or "") and shutil.which(program, path=path) is None:
            raise ConfigurationError(f"there is no program {program!r} on PATH; the command begins with it")


def _folder(path: str) -> Path:
    """Create the folder of the outputs and return its absolute path. Raises ConfigurationError."""
    folder = Path(path).expanduser().resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--keep-output {path} cannot be created: {error}") from error
    return folder
