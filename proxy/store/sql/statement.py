"""A statement that runs many times a second: compiled once, then run by the driver itself.

Tables and clauses stay SQLAlchemy's; only its execution is left out, which calls some fifty functions a statement. The
driver's errors are raised as SQLAlchemy's, so no caller can tell the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import orjson
from sqlalchemy import BindParameter, ClauseElement, Column, ColumnElement, Connection, bindparam
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler

Parameters = Mapping[str, Any]
"""Values by bind name: text, numbers, booleans, bytes or None."""
_Compiled = tuple[str, Callable[[Parameters], tuple[Any, ...]]]


class Statement:
    """An insert, update, delete or select of the tables. All its calls give the same parameters.

    A parameter that has the name of a column sets it, in an insert or an update.
    """

    def __init__(self, clause: ClauseElement) -> None:
        self._clause = clause
        self._compiled: dict[str, _Compiled] = {}

    def run(self, connection: Connection, rows: Sequence[Parameters]) -> int:
        """Run once for each of `rows`, of which there is at least one; return how many rows of the table it changed.

        In a pipeline, which does not know that yet, the number has no meaning. Raises DBAPIError.
        """
        sql, values = self._compiled.get(connection.dialect.name) or self._compile(connection, rows[0])
        try:
            cursor = connection.connection.cursor()
            if len(rows) == 1:
                cursor.execute(sql, values(rows[0]))
            else:
                cursor.executemany(sql, list(map(values, rows)))
            return cursor.rowcount
        except connection.dialect.loaded_dbapi.Error as error:
            raise as_sqlalchemy(connection, sql, error) from error

    def fetch(self, connection: Connection, parameters: Parameters) -> list[tuple[Any, ...]]:
        """Run once, and return the rows that it selects. Raises DBAPIError."""
        sql, values = self._compiled.get(connection.dialect.name) or self._compile(connection, parameters)
        try:
            cursor = connection.connection.cursor()
            cursor.execute(sql, values(parameters))
            return list(cursor.fetchall())
        except connection.dialect.loaded_dbapi.Error as error:
            raise as_sqlalchemy(connection, sql, error) from error

    def _compile(self, connection: Connection, parameters: Parameters) -> _Compiled:
        clause = self._clause.compile(dialect=connection.dialect, column_keys=list(parameters))
        names: Sequence[str] = clause.positiontup  # type: ignore[attr-defined]
        values = itemgetter(*names) if len(names) > 1 else lambda row: (row[names[0]],) if names else ()
        compiled = self._compiled[connection.dialect.name] = (str(clause), values)
        return compiled


class Named(ColumnElement[bool]):
    """True if `column` is in the parameter `names`, a JSON list: the same text for lists of any length."""

    inherit_cache = True

    def __init__(self, column: Column[str], names: str = "names") -> None:
        self.column = column
        self.names: BindParameter[str] = bindparam(names)


def json_list(names: Iterable[str]) -> str:
    """A value for the parameter of `Named`."""
    return orjson.dumps(list(names)).decode()


@compiles(Named, "sqlite")
def _named_sqlite(element: Named, compiler: SQLCompiler, **options: Any) -> str:
    column, names = compiler.process(element.column, **options), compiler.process(element.names, **options)
    return f"{column} IN (SELECT value FROM json_each({names}))"


@compiles(Named, "postgresql")
def _named_postgresql(element: Named, compiler: SQLCompiler, **options: Any) -> str:
    column, names = compiler.process(element.column, **options), compiler.process(element.names, **options)
    return f"{column} = ANY (ARRAY(SELECT json_array_elements_text(CAST({names} AS JSON))))"


def as_sqlalchemy(connection: Connection, sql: str, error: Exception) -> BaseException:
    """The error of the driver as SQLAlchemy raises it. A connection that is lost is marked so, as SQLAlchemy does."""
    dialect = connection.dialect
    lost = connection.invalidated or dialect.is_disconnect(error, connection.connection, None)  # type: ignore[arg-type]
    if lost and not connection.invalidated:
        connection.invalidate(error)
    base = dialect.loaded_dbapi.Error
    return DBAPIError.instance(sql, None, error, base, connection_invalidated=lost, dialect=dialect)
