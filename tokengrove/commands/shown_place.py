"""The server or the database that `tokengrove show` reads. Its errors become one line on stderr and exit code 1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokengrove.commands.failure import fail, message_of
from tokengrove.commands.list_source import ListSource, ServedLists
from tokengrove.commands.listed_sessions import in_flags
from tokengrove.commands.session_source import ServedSession, SessionSource
from tokengrove.errors import ConfigurationError, ProxyError
from tokengrove.server_part import server_part

if TYPE_CHECKING:
    from tokengrove.client import Client


@dataclass(frozen=True, slots=True)
class Place:
    """The flags for the source of sessions. Raises ConfigurationError for both a server and a database."""

    url: str | None
    admin_key: str | None
    database_url: str | None
    config: Path | None

    def __post_init__(self) -> None:
        if self.url is not None and self.database_url is not None:
            raise ConfigurationError("give either --url (a running server) or --database-url, not both")

    @contextmanager
    def session(self, session_id: str) -> Iterator[SessionSource]:
        """Open one session."""
        if self.url is not None:
            with served(self.url, self.admin_key) as client:
                yield ServedSession(client, session_id)
            return
        stored = server_part("commands.stored")
        with self._database(stored) as database:
            yield stored.stored_session(database, session_id)

    @contextmanager
    def lists(self) -> Iterator[ListSource]:
        """Open the lists of sessions and groups."""
        if self.url is not None:
            with served(self.url, self.admin_key) as client:
                yield ServedLists(client)
            return
        stored = server_part("commands.stored")
        with self._database(stored) as database:
            yield stored.StoredLists(database)

    @contextmanager
    def _database(self, stored: Any) -> Iterator[Any]:
        with stored.opened(self.database_url, self.config) as database:
            try:
                yield database
            except ConfigurationError:
                raise
            except ProxyError as error:
                fail(in_flags(error.message))


@contextmanager
def served(url: str, admin_key: str | None) -> Iterator[Client]:
    """A client of the server at `url`. An error in the block ends the command."""
    from tokengrove.client import Client, ServerUnreachable

    try:
        with Client(url, admin_key, retry_s=0.0) as client:  # a person is waiting: fail at once
            yield client
    except ServerUnreachable as error:
        fail(error.message)
    except ProxyError as error:
        fail(f"{url}: {in_flags(message_of(error))}")
