"""The options of a command that is an agent: where it runs, what it is given, and how it is rewarded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

from tokengrove.errors import ConfigurationError
from tokengrove.rollout.option_values import flag, read_value
from tokengrove.rollout.placeholder_names import check_placeholders, has_placeholders

Stdin = Literal["prompt", "task", "none"]
_FOLDER, _GIVEN, _END, _REWARD = "Where a command runs", "What a command is given", "End of a command", "Verifier"
_PLACES = ("copy", "worktree", "clone")
_PATHS = (*_PLACES, "home", "verifier_files", "keep_output")
_WHOLE = ("/", "~", "{")


def _option(panel: str, text: str, default: Any = None, **bounds: float) -> Any:
    return field(default=default, metadata={"help": text, "panel": panel, "bounds": bounds})


def _mapping(panel: str, text: str) -> Any:
    return field(
        default_factory=dict, metadata={"help": f"{text} NAME=VALUE; repeatable.", "panel": panel, "bounds": {}}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOptions:
    """How a command plays an episode. `read` makes it of an agent's arguments and says what is wrong with them.

    Where a text may have placeholders, they are those of `Placeholders`.
    """

    copy: str | None = _option(_FOLDER, "Folder that is copied anew as the working folder (default: an empty one).")
    worktree: str | None = _option(_FOLDER, "Git repository: the working folder is a detached worktree of it.")
    clone: str | None = _option(_FOLDER, "Git repository: the working folder is a clone with branches of its own.")
    commit: str | None = _option(_FOLDER, "Commit of --worktree or --clone (default: HEAD).")
    files: Mapping[str, str] = _mapping(_FOLDER, "File below the working folder, or ~/ for HOME, and its text:")
    home: str | None = _option(_FOLDER, "Folder that is copied anew as the command's HOME (default: an empty one).")
    setup: str | None = _option(_FOLDER, "Shell command that is run there before, without keys.")
    container: str | None = _option(
        _FOLDER, "Program that runs the command elsewhere: 'docker run -v {workdir}:{workdir} -w {workdir} ... IMAGE'."
    )
    container_start: str | None = _option(_FOLDER, "Shell command of this machine that is run first.")
    container_stop: str | None = _option(_FOLDER, "Shell command of this machine that is run last, in any case.")
    container_workdir: str | None = _option(_FOLDER, "The working folder's path in --container, if it is another one.")
    server_url: str | None = _option(_GIVEN, "The server's address as the command sees it (http://host.internal:8080).")
    prompt: str | None = _option(_GIVEN, "Text of {prompt}: '{data.instruction}' (default: a usual field of the task).")
    stdin: Stdin | None = _option(
        _GIVEN, "prompt, task (as JSON) or none (default: the prompt, unless the command line has {prompt})."
    )
    model: str = _option(_GIVEN, "Text of {model}: the name of the model; the server takes any.", "tokengrove")
    env: Mapping[str, str] = _mapping(_GIVEN, "Variable of the command:")
    pass_env: tuple[str, ...] = _option(
        _GIVEN, "Variable of this process that the command gets too, or a pattern such as 'AWS_*'; repeatable.", ()
    )
    command_timeout_s: float | None = _option(
        _END, "Seconds after which the command and what it has started are killed (default: no limit).", min=0
    )
    exit_codes: tuple[int, ...] = _option(_END, "Exit codes that are no failure; repeatable (default: 0).", (0,))
    any_exit_code: bool = _option(_END, "No exit code is a failure.", False)
    verify_timed_out: bool = _option(_END, "Reward what a command left that ran too long (default: it fails).", False)
    keep_output: str | None = _option(_END, "Folder for SESSION.log files with all output.")
    verifier: str | None = _option(
        _REWARD, "Shell command that rewards: it writes $REWARD_FILE, prints a number last, or exits with 0 for 1."
    )
    verifier_function: str | None = _option(_REWARD, "package.module:function that rewards what is in the folder.")
    verifier_files: str | None = _option(
        _REWARD, "Folder that the verifier finds as $VERIFIER_FILES; put there when the command has ended."
    )
    verifier_env: Mapping[str, str] = _mapping(_REWARD, "Variable of the verifier:")
    verifier_timeout_s: float = _option(_REWARD, "Seconds that the verifier may run.", 600.0, min=0)
    verifier_on_host: bool = _option(_REWARD, "Run the verifier on this machine, not in --container.", False)
    timeout_reward: float | None = _option(
        _REWARD, "Reward if the verifier runs too long (default: the episode fails)."
    )

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> CommandOptions:
        """Make the options of values in JSON's types. Raises ConfigurationError that names the flag."""
        known = {each.name: each for each in fields(cls)}
        for name in arguments:
            if name not in known:
                near = get_close_matches(name, known, 1) or sorted(known)
                raise ConfigurationError(f"{flag(name)} is no option of a command; known: {', '.join(near)}")
        # The types are written out in this file, so that their text says it all.
        options = cls(**{name: read_value(name, known[name].type, value) for name, value in arguments.items()})
        return options.checked()

    def checked(self) -> CommandOptions:
        """Return these options. Raises ConfigurationError that names the flag that is wrong."""
        for spec in fields(self):
            self._check_field(spec.name, spec.metadata["bounds"])
        self._check_place()
        self._check_container()
        self._check_verifier()
        if self.server_url is not None and not self.server_url.startswith(("http://", "https://")):
            raise ConfigurationError(f"--server-url must begin with http:// or https://, not {self.server_url!r}")
        if self.stdin is not None and self.stdin not in get_args(Stdin):
            raise ConfigurationError(f"--stdin must be one of {', '.join(get_args(Stdin))}, not {self.stdin!r}")
        return self

    def _check_field(self, name: str, bounds: Mapping[str, float]) -> None:
        value = getattr(self, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigurationError(f"{flag(name)} must be a finite number, not {value}")
        if "min" in bounds and value is not None and value <= bounds["min"]:
            raise ConfigurationError(f"{flag(name)} must be more than {bounds['min']:g}, not {value:g}")
        texts = value.values() if isinstance(value, Mapping) else [value] if isinstance(value, str) else []
        for text in texts:
            check_placeholders(text, flag(name))

    def _check_place(self) -> None:
        given = [name for name in _PLACES if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigurationError(f"give one of {', '.join(map(flag, given))}: there is one working folder")
        if self.commit is not None and not {"worktree", "clone"} & set(given):
            raise ConfigurationError("--commit is one of --worktree or --clone, which is missing")
        for name in (*given, "home", "verifier_files"):
            path = getattr(self, name)
            if path is not None and not has_placeholders(path) and not Path(path).expanduser().is_dir():
                raise ConfigurationError(f"{flag(name)} {path} is no folder")

    def _check_container(self) -> None:
        for name in ("container_workdir", "verifier_on_host"):
            if getattr(self, name) and self.container is None:
                raise ConfigurationError(f"{flag(name)} applies to --container, which is missing")
        if self.container is not None and self.home is not None:
            raise ConfigurationError("--home is no folder of --container: mount one there, such as -v {home}:/root")

    def _check_verifier(self) -> None:
        if self.verifier is not None and self.verifier_function is not None:
            raise ConfigurationError("give --verifier or --verifier-function, not both")
        if self.verifier is None:
            for name in ("verifier_files", "verifier_env", "verifier_on_host"):
                if getattr(self, name):
                    raise ConfigurationError(f"{flag(name)} applies to --verifier, which is missing")
            for name in ("verify_timed_out", "timeout_reward"):
                if getattr(self, name) not in (None, False) and self.verifier_function is None:
                    raise ConfigurationError(f"{flag(name)} needs --verifier or --verifier-function")


def from_this_folder(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a command with whole paths, for processes that have another working folder than this one. A path
    that begins with a placeholder is left as it is.
    """
    paths = {name: arguments[name] for name in _PATHS if isinstance(arguments.get(name), str)}
    relative = {name: path for name, path in paths.items() if not path.startswith(_WHOLE)}
    return {**arguments, **{name: str(Path.cwd() / path) for name, path in relative.items()}}
