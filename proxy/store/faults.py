"""What is wrong with the database, in words for clients: they name no address. The log has the driver's own words."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

_BY_STATE = {"53100": "its disk is full", "25006": "it is read-only"}
# Of SQLite, and of PostgreSQL while it refuses connections, when the driver has no SQLSTATE.
_BY_TEXT = {
    "disk is full": "its disk is full",
    "disk I/O error": "its disk fails",
    "database is locked": "another process holds it",
    "readonly": "it is read-only",
    "starting up": "it is starting up",
    "shutting down": "it is shutting down",
}


def fault_of(error: BaseException) -> str:
    """What an error of the database means."""
    state, text = _state(error), str(getattr(error, "orig", None) or error)
    if state in _BY_STATE:
        return _BY_STATE[state]
    if (found := next((words for part, words in _BY_TEXT.items() if part in text), None)) is not None:
        return found
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    # Of PostgreSQL's errors, those without a SQLSTATE are the driver's own, such as a connection that was refused.
    postgres = hasattr(getattr(error, "orig", None), "sqlstate")
    unreachable = postgres and state is None and isinstance(error, OperationalError | InterfaceError)
    return "the connection to it is lost" if lost or unreachable else "it failed; see the server's log"


def is_read_only(error: BaseException) -> bool:
    """Whether PostgreSQL takes no writes on this connection, as a primary that has become a replica."""
    return _state(error) == "25006"


def reason_of(error: BaseException) -> str:
    """The message of the driver, without the statement and its values: for the log."""
    return " ".join(str(getattr(error, "orig", None) or error).split())


def _state(error: BaseException) -> str | None:
    return getattr(getattr(error, "orig", None), "sqlstate", None)
