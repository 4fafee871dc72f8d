"""`GET /rl/sessions`, `/rl/groups` and `/rl/runs`: what was recorded, in lists. They change and delay nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from proxy.api.http import JsonResponse, key_of
from proxy.api.listing import Listing
from proxy.api.listing_json import by_status_json, group_json, listed_json, match_json
from proxy.api.listing_request import SUMMARIES, ParsedListing, Part, parse_groups, parse_listing
from proxy.api.runs import Runs
from proxy.api.session_json import record_json
from proxy.api.session_values import SortOrder
from proxy.api.sorted_listing import SortedListing
from proxy.api.summaries import Summed
from proxy.sessions.access import Access
from proxy.store.recordings import SessionReads
from proxy.store.session_query import SessionQuery
from proxy.store.text_search import TextSearch


class Lists:
    """The answers of both endpoints, for any reader of the database."""

    def __init__(self, recordings: SessionReads, listing: Listing, ordered: SortedListing, search: TextSearch) -> None:
        self._recordings, self._listing, self._ordered, self._search = recordings, listing, ordered, search

    async def sessions(self, query: Mapping[str, str]) -> dict[str, Any]:
        """The answer to a query of `/rl/sessions`. Raises InvalidRequest."""
        wanted = parse_listing(query)
        self._search.check(wanted.query)
        answer = await self._page(wanted)
        if Part.MATCHES in wanted.include:
            await self._add_matches(answer["sessions"], wanted.query)
        if self._search.on and (wanted.query.text is not None or Part.COUNTS in wanted.include):
            answer["unindexed"] = await self._search.count_unindexed()
        return answer

    async def _page(self, wanted: ParsedListing) -> dict[str, Any]:
        counts = {"counts": await self._counts(wanted)} if Part.COUNTS in wanted.include else {}
        if wanted.sort is not None:
            return {**await self._in_order(wanted, wanted.sort), **counts}
        if not wanted.include & SUMMARIES and not wanted.summed.asks:
            records, cursor = await self._listing.records(wanted)
            entries = [record_json(each.record) for each in records]
            return {"sessions": entries, "cursor": cursor, **counts}
        page = await self._listing.page(wanted)
        return {"sessions": await self._entries(page.sessions, wanted), "cursor": page.cursor, **counts}

    async def groups(self, query: Mapping[str, str]) -> dict[str, Any]:
        """The answer to a query of `/rl/groups`. Raises InvalidRequest."""
        wanted = parse_groups(query)
        self._search.check(wanted.query)
        page = await self._listing.groups(wanted)
        groups = [
            group_json(group, [(each.session.record, each.summary) for each in sessions])
            for group, sessions in page.groups
        ]
        return {"groups": groups, "cursor": page.cursor}

    async def _in_order(self, wanted: ParsedListing, order: SortOrder) -> dict[str, Any]:
        page = await self._ordered.page(wanted, order)
        if wanted.include & SUMMARIES:
            entries = await self._entries(await self._listing.summed(page.sessions), wanted)
        else:
            entries = [record_json(each.record) for each in page.sessions]
        how = {"sessions": page.sorted, "whole": page.whole}
        return {"sessions": entries, "cursor": page.cursor, "sorted": how}

    async def _entries(self, page: list[Summed], wanted: ParsedListing) -> list[dict[str, Any]]:
        if not wanted.include & SUMMARIES:
            return [record_json(each.session.record) for each in page]
        running = await self._recordings.count_begun([each.session.record.session_id for each in page])
        returns = Part.RETURNS in wanted.include
        return [
            listed_json(session.record, summary, running.get(session.record.session_id, 0), returns=returns)
            for session, summary in page
        ]

    async def _add_matches(self, entries: list[dict[str, Any]], query: SessionQuery) -> None:
        """Add to each entry the turns that have the wanted text."""
        assert query.text is not None
        matches = await self._search.matches([each["session_id"] for each in entries], query.text)
        for entry in entries:
            entry["matches"] = list(map(match_json, matches.get(entry["session_id"], ())))

    async def _counts(self, wanted: ParsedListing) -> dict[str, int] | None:
        """The number of sessions on all pages for each status, whatever the filter; None if they must be read."""
        if wanted.summed.asks or wanted.query.reads_values:
            return None
        return by_status_json(await self._recordings.count_by_status(replace(wanted.query, status=None, after=None)))


class ListingEndpoints:
    """Lists sessions, groups and training runs, with the admin key."""

    def __init__(self, access: Access, lists: Lists, runs: Runs) -> None:
        self._access, self._lists, self._runs = access, lists, runs

    async def index(self, request: Request) -> JsonResponse:
        """A page of at most `limit` sessions that `filter` selects, in `order`, from the `cursor` of the page before.

        `include` adds summaries, returns, counts and matches of a text.
        """
        self._access.check_reader(key_of(request))
        return JsonResponse(await self._lists.sessions(request.query_params))

    async def groups(self, request: Request) -> JsonResponse:
        """A page of groups, newest first, each with the scores of its sessions that `filter` selects."""
        self._access.check_reader(key_of(request))
        return JsonResponse(await self._lists.groups(request.query_params))

    async def runs(self, request: Request) -> JsonResponse:
        """Sums over a page of sessions, by training run and step."""
        self._access.check_reader(key_of(request))
        return JsonResponse(await self._runs.page(request.query_params))
