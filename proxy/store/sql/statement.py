"""A statement that runs many times a second: compiled once, then run by the driver directly.

Tables and clauses are SQLAlchemy's; only its execution is bypassed, which calls about fifty functions per statement.
Errors of the driver are raised as SQLAlchemy errors, so callers see no difference.
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
_Compiled = tuple[str, Callable[[Parameters], Any] | None, bool]
"""The text, what gets its values from the parameters (None: it has none), and whether that is a tuple of several."""


class Statement:
    """An insert, update, delete or select. All calls pass the same parameter names.

    In an insert or an update, a parameter with the name of a column sets that column.
    """

    def __init__(self, clause: ClauseElement) -> None:
        self._clause = clause
        self._compiled: dict[str, _Compiled] = {}

    def run(self, connection: Connection, rows: Sequence[Parameters]) -> int:
        """Run once for each of `rows` (at least one); return the number of changed rows.

        In a pipeline the number has no meaning, because it is not known yet. Raises DBAPIError.
        """
        sql, values, several = self._compiled.get(connection.dialect.name) or self._compile(connection, rows[0])
        try:
            cursor: Any = connection.connection.dbapi_connection.cursor()  # type: ignore[union-attr]
            if values is None:
                cursor.execute(sql)
            elif len(rows) == 1:
                cursor.execute(sql, values(rows[0]) if several else (values(rows[0]),))
            else:
                cursor.executemany(sql, list(map(values, rows) if several else zip(map(values, rows), strict=True)))
            return cursor.rowcount  # type: ignore[no-any-return]
        except connection.dialect.loaded_dbapi.Error as error:
            raise as_sqlalchemy(connection, sql, error) from error

    def fetch(self, connection: Connection, parameters: Parameters) -> list[tuple[Any, ...]]:
        """Run once and return the selected rows. Raises DBAPIError."""
        sql, values, several = self._compiled.get(connection.dialect.name) or self._compile(connection, parameters)
        try:
            cursor: Any = connection.connection.dbapi_connection.cursor()  # type: ignore[union-attr]
            if values is None:
                cursor.execute(sql)
            else:
                cursor.execute(sql, values(parameters) if several else (values(parameters),))
            return list(cursor.fetchall())
        except connection.dialect.loaded_dbapi.Error as error:
            raise as_sqlalchemy(connection, sql, error) from error

    def _compile(self, connection: Connection, parameters: Parameters) -> _Compiled:
        clause = self._clause.compile(dialect=connection.dialect, column_keys=list(parameters))
        names: Sequence[str] = clause.positiontup  # type: ignore[attr-defined]
        compiled = (str(clause), itemgetter(*names) if names else None, len(names) > 1)
        self._compiled[connection.dialect.name] = compiled
        return compiled


class DriverView:
    """What a Statement reads of a connection, as attributes. In SQLAlchemy it is a property, called once a statement.

    Give it to functions that run statements only. `of`: the connection.
    """

    def __init__(self, connection: Connection) -> None:
        self.of, self.dialect, self.connection = connection, connection.dialect, connection.connection

    @property
    def invalidated(self) -> bool:
        return self.of.invalidated

    def invalidate(self, error: BaseException | None = None) -> None:
        """Mark the connection as lost."""
        self.of.invalidate(error)


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
    """The SQLAlchemy error for an error of the driver. Like SQLAlchemy, it marks a lost connection."""
    dialect = connection.dialect
    lost = connection.invalidated or dialect.is_disconnect(error, connection.connection, None)  # type: ignore[arg-type]
    if lost and not connection.invalidated:
        connection.invalidate(error)
    base = dialect.loaded_dbapi.Error
    return DBAPIError.instance(sql, None, error, base, connection_invalidated=lost, dialect=dialect)
