"""`tokengrove eval`: plays an agent on tasks to measure the policy, without training data."""

from __future__ import annotations

from typing import Any

import typer

from tokengrove.commands.rollout import AsJson, Config, OwnServer, Quiet, Words, play
from tokengrove.commands.run_flags import takes_run_flags


@takes_run_flags
def eval_(
    ctx: typer.Context,
    words: Words = None,
    config: Config = None,
    server: OwnServer = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    **flags: Any,
) -> None:
    """Play episodes of an agent on tasks to measure it. Their sessions are for validation: exports and claims exclude
    them unless they request them.

    tokengrove eval agents:solve --data tasks.jsonl --group-size 4 --sampling temperature=0.6
    """
    play(ctx, words, config, server, quiet, as_json, flags, validation=True)
