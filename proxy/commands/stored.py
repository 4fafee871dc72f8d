"""The data that `tokengrove show` reads from a database without a server, built by the same code as the server's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from proxy.api.annotation_json import read_session
from proxy.api.chosen_routes import check_of_session
from proxy.api.export_request import parse_export
from proxy.api.http import decode_json, encode_json
from proxy.api.listing import Listing
from proxy.api.listing_endpoints import Lists
from proxy.api.pace import Pace
from proxy.api.sorted_listing import SortedListing
from proxy.api.summaries import Summaries
from proxy.api.turn_columns import RowPage, Vocabulary, read_columns
from proxy.api.turn_json import Part, find_turn, tree_json, turn_json
from proxy.api.turn_tokens import tokens_json
from proxy.commands.database_url import database_url_of
from proxy.store.inspection import Broken, Inspection, inspecting
from proxy.store.recordings import SessionReads
from proxy.store.text_search import TextSearch
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.layouts import lay_out
from proxy.trajectory.outline import outline
from proxy.trajectory.summary import certificate
from proxy.types import Interaction, SessionRecord
from tokengrove.commands.session_source import Layout
from tokengrove.errors import ConfigurationError


class StoredSession:
    """A session of a database, read once. Token ids have no text, since a database has no tokenizer."""

    def __init__(
        self, recordings: SessionReads, record: SessionRecord, interactions: Sequence[Interaction], begun: int
    ) -> None:
        self._recordings = recordings
        self._record, self._interactions, self._begun = record, interactions, begun

    def tree(self) -> dict[str, Any]:

        return tree_json(self._record, self._interactions, self._begun, {Part.COMPARED})

    def turn(self, name: str, *include: str) -> dict[str, Any]:

        turn = find_turn(self._interactions, name)
        return turn_json(self._record, self._interactions, turn, frozenset(map(Part, include)))

    def tokens(self, name: str, layout: Layout, routes: Sequence[str]) -> dict[str, Any]:

        turn, options = find_turn(self._interactions, name), self._options(layout, routes)
        return {**self.turn(name), "tokens": tokens_json(self._record, self._interactions, turn, options)}

    def columns(self, name: str, start: int, limit: int) -> dict[str, Any]:

        turn, page = find_turn(self._interactions, name), RowPage(start, limit)
        rows = asyncio.run(read_columns(self._recordings, self._interactions, turn, page, Vocabulary()))
        plain: dict[str, Any] = decode_json(encode_json(rows))
        return plain

    def annotations(self) -> list[dict[str, Any]]:

        return asyncio.run(read_session(self._recordings, self._record.session_id))

    def samples(self, layout: Layout, routes: Sequence[str]) -> dict[str, Any]:

        options = replace(self._options(layout, routes), outline=True)
        session_samples = lay_out(self._record, self._interactions, options)
        entry = {
            **certificate(self._record, self._interactions, self._begun),
            **session_samples.entry,
            **session_samples.counts(options),
        }
        answer = {"samples": [outline(row) for row in session_samples.rows], "sessions": [entry]}
        plain: dict[str, Any] = decode_json(encode_json(answer))
        return plain

    def _options(self, layout: Layout, routes: Sequence[str]) -> LayoutOptions:
        options = parse_export({"layout": layout, "route": list(routes) or None}).options
        check_of_session(options, self._interactions)
        return options


def stored_session(inspection: Inspection, session_id: str) -> StoredSession:
    """Read a session. Raises ConfigurationError if it does not exist or its data is damaged."""
    stored = next(iter(inspection.sessions(session_id)))
    for part in (stored.record, *stored.interactions):
        if isinstance(part, Broken):
            raise ConfigurationError(f"{part.id} cannot be read ({part.why}); run: tokengrove db check")
    whole = [node for node in stored.interactions if not isinstance(node, Broken)]
    assert not isinstance(stored.record, Broken)
    return StoredSession(inspection.recordings, stored.record, whole, len(stored.begun))


class StoredLists:
    """The lists of a database, built by the same code as the server's answers."""

    def __init__(self, inspection: Inspection) -> None:
        recordings = inspection.recordings
        summaries = Summaries(recordings, Pace(lambda: False))
        listing, ordered = Listing(recordings, summaries), SortedListing(recordings, summaries)
        self._lists = Lists(recordings, listing, ordered, TextSearch.of_stored(inspection))

    def sessions(self, query: Mapping[str, str]) -> dict[str, Any]:
        return asyncio.run(self._lists.sessions(query))

    def groups(self, query: Mapping[str, str]) -> dict[str, Any]:
        return asyncio.run(self._lists.groups(query))


@contextmanager
def opened(database_url: str | None, config: Path | None) -> Iterator[Inspection]:
    """Open the database that the flags name."""
    with inspecting(database_url_of(database_url, config)) as inspection:
        yield inspection
