"""PostgreSQL's pipeline mode: the statements of a transaction are sent without waiting for each result.

The driver waits when rows are fetched and at the commit. So an error may be raised at a later statement, and the number
of changed rows is not known at once. SQLite does not need it, because it runs in this process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection

from proxy.store.sql.statement import as_sqlalchemy

# A pipeline whose connection breaks cannot be terminated cleanly. The error that broke it is raised anyway.
logging.getLogger("psycopg").addFilter(lambda record: not str(record.msg).startswith("error ignored terminating"))


@contextmanager
def pipelined(connection: Connection) -> Iterator[None]:
    """Send the statements in this context to PostgreSQL in one pipeline. Raises DBAPIError."""
    try:
        with connection.connection.driver_connection.pipeline():  # type: ignore[union-attr]
            yield
    except connection.dialect.loaded_dbapi.Error as error:
        raise as_sqlalchemy(connection, "pipeline", error) from error


def is_aborted(error: BaseException) -> bool:
    """Return True if an earlier statement of a pipeline failed, and this is not its error."""
    return type(getattr(error, "orig", None)).__name__ == "PipelineAborted"
