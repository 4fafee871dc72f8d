"""The interception of harnesses: the mailbox engine with the names of OpenEnv's contract.

A harness needs only an address and a key. Each has its own session, so that concurrent harnesses never receive each
other's answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from tokengrove.client import Client
from tokengrove.client.options import SessionOptions
from tokengrove.errors import InvalidRequest
from tokengrove.openenv.interception import Interception
from tokengrove.openenv.own_mailbox import OwnMailbox
from tokengrove.rollout.episode import BlockingEpisode
from tokengrove.rollout.session_start import unused_session_id


class InterceptionServer:
    """A server whose engine is the mailbox. Use it in a `with` block, or call `close`. Threads may share it.

    `url` and `admin_key`: a running server (`tokengrove serve --engine mailbox`). `app`: an application in this
    process, which agents reach only through `client.http_client()`. Without both, a server is started, and ended by
    `close`; `flags` are further words of its command. Answers are parsed in the chat format of its model (`--model`,
    `--tool-parser`).
    """

    def __init__(
        self, url: str | None = None, admin_key: str | None = None, *, app: Any = None, flags: Sequence[str] = ()
    ) -> None:
        """Raises InvalidRequest for `flags` with a running server, and RuntimeError if its own does not start."""
        if flags and (url or app):
            raise InvalidRequest(
                "'flags' are for a server that is started here, without 'url' and 'app'", param="flags"
            )
        self._own = None if url or app else OwnMailbox(flags)
        if self._own is not None:
            url, admin_key = self._own.url, self._own.admin_key
        self.client = Client(url, admin_key, app=app)

    def __enter__(self) -> InterceptionServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, rollout_id: str, **options: Unpack[SessionOptions]) -> Interception:
        """The addresses for the harness of a rollout. `options`: of its session, such as `tool_parser`."""
        named: SessionOptions = {"session_id": unused_session_id(rollout_id), **options}
        return Interception(BlockingEpisode.start(self.client, rollout_id, named, delivery="runner"), rollout_id)

    def close(self) -> None:
        """Close the client, and end a server that was started here. Repeated calls do nothing."""
        self.client.close()
        if self._own is not None:
            self._own.close()
