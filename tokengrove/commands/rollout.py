"""`tokengrove rollout`: plays an agent on tasks and writes training samples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from tokengrove import initial_block
from tokengrove.commands.plain_help import PlainHelp
from tokengrove.commands.run_flags import takes_run_flags

_COMMAND = "tokengrove.command"

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[AGENT | -- COMMAND ...]",
        help="Class path of what plays (package.module:Name), or behind -- a command. "
        "With --config: KEY=VALUE, changes of the file.",
        show_default=False,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config", help="YAML file of these options (of tokengrove or of ROLL); flags win.", show_default=False
    ),
]
OwnServer = Annotated[
    list[str] | None,
    typer.Option(
        "--server",
        help="Setting of the server that the run starts, as a flag of `tokengrove serve`: NAME=VALUE; repeatable.",
        show_default=False,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")]


class RunCommand(PlainHelp):
    """A command with a program after `--`, which plays the episodes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # typer's own copy of click has these types
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_COMMAND] = args[at + 1 :]
        rest: list[str] = super().parse_args(ctx, args[:at])
        return rest


@takes_run_flags
def rollout(
    ctx: typer.Context,
    words: Words = None,
    config: Config = None,
    server: OwnServer = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    **flags: Any,
) -> None:
    """Play episodes of an agent on tasks, and write their training samples. The same command resumes a run.

    tokengrove rollout agents:solve --data tasks.jsonl --group-size 8 --reward agents:check

    tokengrove rollout --data tasks.jsonl --copy ./repository --verifier "pytest -q" -- claude -p {prompt}
    """
    play(ctx, words, config, server, quiet, as_json, flags, validation=False)


def play(
    ctx: typer.Context,
    words: list[str] | None,
    config: Path | None,
    server: list[str] | None,
    quiet: bool,
    as_json: bool,
    flags: dict[str, Any],
    *,
    validation: bool,
) -> None:
    """Run `rollout` or `eval`."""
    initial_block.hold()
    from tokengrove.commands.run_command import Asked, run_command

    command = ctx.meta.get(_COMMAND, [])
    run_command(Asked(words or [], command, config, server or [], quiet, as_json, flags, validation))
