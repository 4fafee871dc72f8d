"""The options of a command that is an agent: its working folder, its inputs, and its reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from tokengrove.errors import ConfigurationError
from tokengrove.options.option import Option, flag_of, option, options_of
from tokengrove.options.values import read_value
from tokengrove.rollout.placeholder_names import check_placeholders, has_placeholders

Stdin = Literal["prompt", "task", "none"]
_FOLDER, _GIVEN, _END, _REWARD = "Where a command runs", "Input of a command", "End of a command", "Verifier"
_PLACES = ("copy", "worktree", "clone")
_PATHS = (*_PLACES, "home", "verifier_files", "keep_output")
_WHOLE = ("/", "~", "{")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOptions:
    """How a command plays an episode. `read` makes and checks the options from an agent's arguments.

    Texts with placeholders have the placeholders of `Placeholders`.
    """

    copy: str | None = option(
        None, "Folder that is copied for each episode as the working folder.", panel=_FOLDER, otherwise="an empty one"
    )
    worktree: str | None = option(
        None, "Git repository: the working folder is a detached worktree of it.", panel=_FOLDER
    )
    clone: str | None = option(
        None, "Git repository: the working folder is a clone with its own branches.", panel=_FOLDER
    )
    commit: str | None = option(None, "Commit of --worktree or --clone.", panel=_FOLDER, otherwise="HEAD")
    files: Mapping[str, str] = option({}, "File in the working folder (or HOME, with ~/) and its text.", panel=_FOLDER)
    home: str | None = option(
        None, "Folder that is copied for each episode as the command's HOME.", panel=_FOLDER, otherwise="an empty one"
    )
    setup: str | None = option(
        None, "Shell command that runs before the command, in its folder, without keys.", panel=_FOLDER
    )
    container: str | None = option(
        None,
        "Program that runs the command elsewhere: 'docker run -v {workdir}:{workdir} -w {workdir} ... IMAGE'.",
        panel=_FOLDER,
    )
    container_start: str | None = option(None, "Shell command that runs first, on this machine.", panel=_FOLDER)
    container_stop: str | None = option(
        None, "Shell command that runs last, on this machine, also after a failure.", panel=_FOLDER
    )
    container_workdir: str | None = option(
        None, "Path of the working folder in --container, if it differs.", panel=_FOLDER
    )
    sandbox: str | None = option(
        None,
        "Remote sandbox in which the command runs: a provider (e2b, daytona, modal, kubernetes, agent-sandbox) or "
        "package.module:Class.",
        panel=_FOLDER,
        otherwise="this machine",
    )
    sandbox_args: Mapping[str, Any] = option(
        {}, "Setting of --sandbox: max_concurrent, max_lifetime_s, image (may be '{data.image}'), ...", panel=_FOLDER
    )
    server_url: str | None = option(
        None, "The server's address as the command sees it (http://host.internal:8080).", panel=_GIVEN
    )
    prompt: str | None = option(
        None,
        "Text of {prompt}: '{data.instruction}'.",
        panel=_GIVEN,
        otherwise="the first known text field of the task",
    )
    stdin: Stdin | None = option(
        None,
        "prompt, task (as JSON) or none.",
        panel=_GIVEN,
        otherwise="the prompt, unless the command line has {prompt}",
    )
    model: str = option("tokengrove", "Text of {model}: the name of the model; the server accepts any.", panel=_GIVEN)
    env: Mapping[str, str] = option({}, "Environment variable of the command.", panel=_GIVEN)
    pass_env: tuple[str, ...] = option(
        (),
        "Variable of this process to pass to the command, or a pattern such as 'AWS_*'.",
        panel=_GIVEN,
    )
    command_timeout_s: float | None = option(
        None,
        "Seconds after which the command and its processes are killed.",
        panel=_END,
        above=0,
        otherwise="no limit",
    )
    exit_codes: tuple[int, ...] = option((0,), "Exit codes that count as success.", panel=_END, otherwise="0")
    any_exit_code: bool = option(False, "Accept every exit code.", panel=_END)
    verify_timed_out: bool = option(
        False, "Run the verifier also if the command timed out.", panel=_END, otherwise="the episode fails"
    )
    keep_output: str | None = option(None, "Folder for SESSION.log files with the output.", panel=_END)
    verifier: str | None = option(
        None,
        "Shell command that rewards: it writes $REWARD_FILE, prints a number last, or exits with 0 (reward 1).",
        panel=_REWARD,
    )
    verifier_function: str | None = option(
        None, "package.module:function that rewards the content of the folder.", panel=_REWARD
    )
    verifier_files: str | None = option(
        None, "Folder for the verifier, $VERIFIER_FILES, copied after the command has ended.", panel=_REWARD
    )
    verifier_env: Mapping[str, str] = option({}, "Environment variable of the verifier.", panel=_REWARD)
    verifier_timeout_s: float = option(600.0, "Seconds that the verifier may run.", panel=_REWARD, above=0)
    verifier_on_host: bool = option(
        False, "Run the verifier on this machine, not in --container or --sandbox.", panel=_REWARD
    )
    timeout_reward: float | None = option(
        None, "Reward if the verifier times out.", panel=_REWARD, otherwise="the episode fails"
    )

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> CommandOptions:
        """Make the options from values of JSON types. Raises ConfigurationError, which names the flag."""
        known = options_of(cls)
        for name in arguments:
            if name not in known:
                near = get_close_matches(name, known, 1) or sorted(known)
                raise ConfigurationError(f"{flag_of(name)} is not an option of a command; known: {', '.join(near)}")
        options = cls(**{name: read_argument(known[name], value) for name, value in arguments.items()})
        return options.checked()

    def checked(self) -> CommandOptions:
        """Return these options. Raises ConfigurationError, which names the wrong flag."""
        for name, each in options_of(CommandOptions).items():
            self._check_field(name, each)
        self._check_place()
        self._check_container()
        self._check_sandbox()
        self._check_verifier()
        if self.server_url is not None and not self.server_url.startswith(("http://", "https://")):
            raise ConfigurationError(f"--server-url must begin with http:// or https://, not {self.server_url!r}")
        return self

    def _check_field(self, name: str, option: Option) -> None:
        value = getattr(self, name)
        option.check(value)
        texts = value.values() if isinstance(value, Mapping) else [value]
        for text in (each for each in texts if isinstance(each, str)):
            check_placeholders(text, flag_of(name))

    def _check_place(self) -> None:
        given = [name for name in _PLACES if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigurationError(f"give only one of {', '.join(map(flag_of, given))}: there is one working folder")
        if self.commit is not None and not {"worktree", "clone"} & set(given):
            raise ConfigurationError("--commit needs --worktree or --clone")
        for name in (*given, "home", "verifier_files"):
            path = getattr(self, name)
            if path is not None and not has_placeholders(path) and not Path(path).expanduser().is_dir():
                raise ConfigurationError(f"{flag_of(name)} {path} is not a folder")

    def _check_container(self) -> None:
        if self.container_workdir and self.container is None:
            raise ConfigurationError("--container-workdir needs --container")
        if self.verifier_on_host and self.container is None and self.sandbox is None:
            raise ConfigurationError("--verifier-on-host needs --container or --sandbox")
        if self.container is not None and self.home is not None:
            raise ConfigurationError("--home does not apply to --container: mount a folder, such as -v {home}:/root")

    def _check_sandbox(self) -> None:
        if self.sandbox is None:
            if self.sandbox_args:
                raise ConfigurationError("--sandbox-args needs --sandbox")
            return
        if self.container is not None:
            raise ConfigurationError("give --container or --sandbox, not both: a command runs in one place")
        if self.worktree is not None:
            raise ConfigurationError(
                "--worktree does not apply to --sandbox: a worktree needs its repository beside it; use --clone"
            )

    def _check_verifier(self) -> None:
        if self.verifier is not None and self.verifier_function is not None:
            raise ConfigurationError("give --verifier or --verifier-function, not both")
        if self.verifier is None:
            for name in ("verifier_files", "verifier_env", "verifier_on_host"):
                if getattr(self, name):
                    raise ConfigurationError(f"{flag_of(name)} needs --verifier")
            for name in ("verify_timed_out", "timeout_reward"):
                if getattr(self, name) not in (None, False) and self.verifier_function is None:
                    raise ConfigurationError(f"{flag_of(name)} needs --verifier or --verifier-function")


def from_this_folder(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a command with absolute paths, for processes with another working folder.

    A path that begins with a placeholder or `~` is left unchanged.
    """
    paths = {name: arguments[name] for name in _PATHS if isinstance(arguments.get(name), str)}
    relative = {name: path for name, path in paths.items() if not path.startswith(_WHOLE)}
    return {**arguments, **{name: str(Path.cwd() / path) for name, path in relative.items()}}


def read_argument(option: Option, value: Any) -> Any:
    """The value of an agent's argument; the flag may have parsed it as a number. Raises ConfigurationError."""
    if value is None and option.default is None:
        return None
    alone = option.repeats and isinstance(value, str | int)
    try:
        return read_value(option, [value] if alone else value, numbers=True)
    except ValueError as error:
        raise ConfigurationError(f"{option.flag} must be {error}, not {value!r}") from None
