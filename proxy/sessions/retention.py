"""Deletes or archives old ended sessions by the rules of `--keep-days` and `--keep`.

A sweep takes a few sessions at a time, in short transactions of the writer, so turns never wait for it. One server of a
database sweeps at a time. Sessions that were never exported or acknowledged stay, unless a rule says otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from proxy.sessions.registry import Registry
from proxy.settings.retention import Rule
from proxy.store.archive.served import ServedArchive
from proxy.store.pruning import Condition, due_before
from proxy.store.retained import Retained
from tokengrove.errors import ProxyError

logger = logging.getLogger(__name__)

_SWEEP_S = 300.0
_PAGE = 500
# Sessions that are deleted in one transaction.
_AT_ONCE = 20


class Retention:
    """Sweeps the sessions of a database. `folder`: of the archive to which they go; None: they are deleted."""

    def __init__(
        self,
        rules: Sequence[Rule],
        folder: str | None,
        retained: Retained,
        archive: ServedArchive,
        registry: Registry,
        forget: Callable[[str], None],
    ) -> None:
        """`forget` is called with the id of each session that went."""
        self._rules, self._folder, self._retained = rules, folder, retained
        self._archive, self._registry, self._forget = archive, registry, forget

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                await self.sweep()
            except ProxyError as error:
                logger.warning("old sessions could not be removed: %(why)s", {"why": error.message})

    async def sweep(self) -> int:
        """Remove the sessions that are due; return their number. Does nothing while another server sweeps."""
        async with self._archive.sweeping() as alone:
            return await self._sweep() if alone else 0

    async def _sweep(self) -> int:
        ages = [rule.age_s for rule in self._rules if rule.age_s is not None]
        if not ages:
            return 0
        now, after, removed = time.time(), -1, 0
        unexported = any(rule.unexported for rule in self._rules)
        while page := await self._retained.find(due_before(now - min(ages), unexported=unexported), after, _PAGE):
            due: dict[Rule, list[str]] = defaultdict(list)
            for each in page:
                rule = next((rule for rule in self._rules if rule.fits(each.group_id, each.step)), None)
                if rule is not None and rule.age_s is not None and each.ended_at < now - rule.age_s:
                    due[rule].append(each.session_id)
            for rule, names in due.items():
                still = due_before(now - (rule.age_s or 0.0), unexported=rule.unexported)
                removed += await (self._delete(names, still) if self._folder is None else self._move(names, still))
            after = page[-1].number
        if removed:
            logger.info("old sessions removed", {"sessions": removed, "archived": self._folder is not None})
        return removed

    async def _move(self, names: Sequence[str], still: Condition) -> int:
        """Archive those of these sessions that still meet a condition; return their number."""
        assert self._folder is not None
        gone = await self._archive.add(self._folder, names, still)
        self._forget_all(gone)
        return len(gone)

    async def _delete(self, names: Sequence[str], still: Condition) -> int:
        """Delete those of these sessions that still meet a condition; return their number."""
        removed = 0
        for at in range(0, len(names), _AT_ONCE):
            some = names[at : at + _AT_ONCE]
            gone = await self._retained.delete(some, still)
            self._forget_all(gone)
            removed += len(gone)
        return removed

    def _forget_all(self, names: Sequence[str]) -> None:
        for name in names:
            if (session := self._registry.find(name)) is not None:
                self._registry.forget_deleted(session)
            self._forget(name)
