"""Descriptions of database faults for clients. They contain no address; the log has the driver's own message."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

_BY_STATE = {"53100": "its disk is full", "25006": "it is read-only"}
# Messages of SQLite, and of PostgreSQL while it refuses connections, when the driver has no SQLSTATE.
_BY_TEXT = {
    "disk is full": "its disk is full",
    "disk I/O error": "its disk fails",
    "database is locked": "another process holds it",
    "readonly": "it is read-only",
    "starting up": "it is starting up",
    "shutting down": "it is shutting down",
}

# SQLSTATEs of PostgreSQL when it refuses or ends connections because it stops, has crashed, starts or recovers.
_AWAY = ("57P01", "57P02", "57P03")
# Messages of a permanently refused connection. The driver has no SQLSTATE for them.
_FOR_GOOD = ("authentication failed", "does not exist", "no pg_hba.conf entry")


def fault_of(error: BaseException) -> str:
    """The fault that an error of the database means."""
    state, text = _state(error), str(getattr(error, "orig", None) or error)
    if state in _BY_STATE:
        return _BY_STATE[state]
    if (found := next((words for part, words in _BY_TEXT.items() if part in text), None)) is not None:
        return found
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    # PostgreSQL errors without a SQLSTATE are the driver's own, such as a refused connection.
    postgres = hasattr(getattr(error, "orig", None), "sqlstate")
    unreachable = postgres and state is None and isinstance(error, OperationalError | InterfaceError)
    return "the connection to it is lost" if lost or unreachable else "it failed; see the server's log"


def is_away(error: BaseException | None) -> bool:
    """Whether PostgreSQL is temporarily unavailable: its connection is lost, or it starts, recovers or shuts down."""
    if not isinstance(error, DBAPIError) or not hasattr(error.orig, "sqlstate"):
        return False
    state = _state(error)
    if state in _AWAY or error.connection_invalidated:
        return state not in _BY_STATE
    if state is not None or not isinstance(error, OperationalError | InterfaceError):
        return False
    text = str(error.orig)
    return not any(part in text for part in _FOR_GOOD)


def is_read_only(error: BaseException) -> bool:
    """Whether PostgreSQL refuses writes on this connection, like a primary that has become a replica."""
    return _state(error) == "25006"


def reason_of(error: BaseException) -> str:
    """The message of the driver for the log, without the statement and its values."""
    return " ".join(str(getattr(error, "orig", None) or error).split())


def _state(error: BaseException) -> str | None:
    return getattr(getattr(error, "orig", None), "sqlstate", None)
