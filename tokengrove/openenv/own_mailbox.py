"""A mailbox server in its own process, which ends with the program that started it."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import sys
from collections.abc import Sequence

from tokengrove.openenv.blocking import run_blocking
from tokengrove.rollout.sandboxes import LocalProcessSandbox

_LISTENING = re.compile(r" at (http://\S+)")
_CONTEXT = 100_000_000  # the sampling server limits the context
_PATIENCE_S = 7 * 24 * 3600  # the caller that answers has time limits
_LOOK_S = 0.05
_KEPT = ("HOME", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_TOKEN")
"""Variables for the locations of model files: the cache, and the hub."""


class OwnMailbox:
    """`tokengrove serve --engine mailbox` on a free port of 127.0.0.1, with `url` and `admin_key`.

    `flags`: further words of the command, such as `--model`, whose chat format is used to parse answers.
    """

    def __init__(self, flags: Sequence[str] = ()) -> None:
        """Start it and wait until it listens. Raises RuntimeError with its output if it does not start."""
        self.admin_key = secrets.token_urlsafe(24)
        self._sandbox = LocalProcessSandbox({})
        try:
            self.url = run_blocking(self._start(flags))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the server and remove its files. Repeated calls do nothing."""
        run_blocking(self._sandbox.stop())

    async def _start(self, flags: Sequence[str]) -> str:
        await self._sandbox.start()
        words = [sys.executable, "-m", "tokengrove", "serve", "--engine", "mailbox", "--port", "0"]
        words += ["--max-context-tokens", str(_CONTEXT), "--engine-timeout-s", str(_PATIENCE_S)]
        words += ["--log-level", "warning", *flags]
        variables = {
            **{name: os.environ[name] for name in _KEPT if name in os.environ},
            "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
            "TOKENGROVE_ADMIN_KEY": self.admin_key,
            "TOKENGROVE_DATABASE_URL": f"sqlite:///{self._sandbox.scratch_folder}/mailbox.db",
        }
        process = await self._sandbox.launch(words, variables)
        while (found := _LISTENING.search(process.output)) is None:
            if process.ended:
                raise RuntimeError(f"the mailbox server did not start: {process.output.strip()}")
            await asyncio.sleep(_LOOK_S)
        return found[1]
