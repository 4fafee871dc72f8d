"""Builds the parts of this package and wires them to each other."""

from __future__ import annotations

from collections.abc import Callable

from proxy.sessions.access import Access
from proxy.sessions.end_waiter import EndWaiter
from proxy.sessions.endings import Deletion, Endings, Withdrawal
from proxy.sessions.episodes import Episodes
from proxy.sessions.idle_sweep import IdleSweep
from proxy.sessions.key_rotation import KeyRotation
from proxy.sessions.keys import Keyring
from proxy.sessions.named_sessions import NamedSessions
from proxy.sessions.new_records import CheckBindings, NewRecords, WhyUnrecorded
from proxy.sessions.registry import Registry
from proxy.sessions.rewards import Scores
from proxy.sessions.session_memory import SessionMemory
from proxy.sessions.session_series import SessionSeries
from proxy.sessions.session_starter import SessionStarter
from proxy.sessions.start_limits import StartLimits
from proxy.settings import Settings
from proxy.store.store import Store
from proxy.telemetry.metrics import Metrics


class SessionParts:
    """The parts of `proxy.sessions`, wired to each other and to the parts of the store that they use."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        metrics: Metrics,
        weight_version: Callable[[], int],
        forget: Callable[[str], None] = lambda _: None,
        why_unrecorded: WhyUnrecorded = lambda _: None,
        check_bindings: CheckBindings = lambda _: None,
    ) -> None:
        """`forget` is called with the id of each session that was ended or deleted here. The others: see NewRecords."""
        keys = Keyring(store.keys, settings.admin_key, settings.trainer_key, settings.reader_key)
        limits, records = (
            StartLimits(settings, weight_version),
            NewRecords(settings, weight_version, why_unrecorded, check_bindings),
        )
        self.registry = Registry(store.news, keys, metrics)
        self.named = NamedSessions(self.registry, store.starts, limits, records)
        self.scores = Scores(self.registry, store.changes)
        self.endings = Endings(self.registry, self.named, store.changes, keys, forget)
        self.starter = SessionStarter(self.registry, store.starts, limits, records, keys, self.endings, settings)
        self.deletion = Deletion(self.registry, store.changes, forget)
        self.withdrawal = Withdrawal(self.registry, self.endings, store.changes)
        self.rotation = KeyRotation(self.registry, store.changes, keys, settings.key_lifetime_s)
        self.waiter = EndWaiter(self.registry, store.news)
        self.idle_sweep = IdleSweep(self.registry, store.changes, self.endings)
        self.memory = SessionMemory(self.registry, settings.session_memory_bytes)
        series = SessionSeries(self.registry, self.named, store.starts)
        self.episodes = Episodes(self.registry, series, self.endings, store.changes)
        about = (self.registry, self.named, series, self.episodes, keys, settings)
        self.access, self.agent_access = Access(*about), Access(*about, takes_admin=False)
