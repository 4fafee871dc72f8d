"""Adapters are published, pinned and unloaded so that no turn waits and none runs on a version that is not loaded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.engine.adapters import BASE, Adapters
from proxy.engine.interface import AdapterEngine, AdapterSource, Capability
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.settings import Settings
from tests.logs import fields_of
from tests.support import says
from tokengrove.errors import (
    EngineFailed,
    EngineIncapable,
    EngineUnavailable,
    InvalidRequest,
    NotFound,
    ProxyError,
)
from tokengrove.options.start import AdapterPinning

FOLLOW, SESSION = AdapterPinning.FOLLOW, AdapterPinning.SESSION


class SlowEngine(ScriptedEngine):
    """An engine whose loads and unloads end when the test says so, if `held`. `failing`: versions that it refuses."""

    def __init__(self) -> None:
        super().__init__(says(), vocab_size=100)
        self.held = False
        self.failing: set[int] = set()
        self.waiting: list[asyncio.Future[None]] = []
        self.done: list[tuple[str, int]] = []
        self.check: Callable[[int], None] = lambda _: None

    async def _turn(self, version: int) -> None:
        if self.held:
            step: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiting.append(step)
            try:
                await step
            finally:
                self.waiting.remove(step)
        if version in self.failing:
            raise EngineFailed(f"version {version} does not fit")

    async def load_adapter(self, version: int, source: AdapterSource) -> None:
        await self._turn(version)
        await super().load_adapter(version, source)
        self.done.append(("load", version))

    async def unload_adapter(self, version: int) -> None:
        self.check(version)
        await self._turn(version)
        self.check(version)
        await super().unload_adapter(version)
        self.done.append(("unload", version))


@dataclass
class Scene:
    """The adapters of a test with its engine, and the sources that were released."""

    most: int = 4
    lora: bool = False
    engine: SlowEngine = field(default_factory=SlowEngine)
    released: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings = Settings(max_live_versions=self.most)
        self.adapters = Adapters(
            self.engine, settings, lambda source: self.released.append(source.path), route="policy", lora=self.lora
        )

    async def publish(self, *versions: int) -> None:
        for version in versions:
            assert await self.adapters.publish(AdapterSource(f"v{version}"), version) == version

    def starts(self, version: int | None, path: str = "") -> asyncio.Task[int]:
        return asyncio.create_task(self.adapters.publish(AdapterSource(path or f"v{version}"), version))

    @property
    def live(self) -> list[int]:
        return [entry["version"] for entry in self.adapters.show()["live"]]


async def settled() -> None:
    """Let everything run that does not wait for the test."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_the_scripted_engine_is_an_adapter_engine() -> None:
    assert isinstance(SlowEngine(), AdapterEngine)


# Versions of turns ---------------------------------------------------------------------------------------------------


async def test_a_session_stays_at_the_version_that_it_began_with_and_another_follows() -> None:
    scene = Scene()
    await scene.publish(1)
    assert scene.adapters.begin("stays") == 1
    assert scene.adapters.begin("follows", policy=FOLLOW) == 1
    scene.adapters.end(1)
    scene.adapters.end(1)
    await scene.publish(2)
    assert scene.adapters.begin("stays") == 1
    assert scene.adapters.begin("follows", policy=FOLLOW) == 2
    assert scene.adapters.begin("new") == 2
    assert scene.adapters.begin(None) == 2


async def test_a_request_may_name_a_live_version_which_stays_live_for_its_session() -> None:
    scene = Scene()
    await scene.publish(1)
    scene.adapters.begin("first")
    await scene.publish(2)
    assert scene.adapters.begin("s", pinned=1, policy=FOLLOW) == 1
    for version in (1, 1):
        scene.adapters.end(version)
    scene.adapters.forget("first")
    await settled()
    assert scene.adapters.begin("s", pinned=1, policy=FOLLOW) == 1
    assert scene.adapters.begin("s", policy=FOLLOW) == 2
    scene.adapters.end(1)
    scene.adapters.forget("s")
    await settled()
    with pytest.raises(NotFound, match="names version 1, which is not live; live versions of the model 'policy': 2"):
        scene.adapters.begin("s", pinned=1)
    with pytest.raises(NotFound):
        scene.adapters.begin("s", pinned=7)


async def test_the_recorded_version_counts_after_a_restart_and_no_other_takes_its_place() -> None:
    scene = Scene()
    await scene.publish(3)
    assert scene.adapters.begin("a", recorded=3) == 3
    assert scene.adapters.begin("b", recorded=2, policy=FOLLOW) == 3
    with pytest.raises(NotFound, match="began with version 2, and stays at it, which is not live"):
        scene.adapters.begin("c", recorded=2)
    assert scene.adapters.show()["live"][0]["running"] == 2


async def test_a_session_that_the_base_model_began_stays_at_the_base_model() -> None:
    scene = Scene()
    assert scene.adapters.begin("old") is None
    scene.adapters.end(None)
    await scene.publish(1)
    assert scene.adapters.begin("old") is None
    assert scene.adapters.begin("restarted", recorded=BASE) is None
    assert scene.adapters.begin("new") == 1


async def test_a_route_of_adapters_only_never_uses_the_base_model() -> None:
    scene = Scene(lora=True)
    for arguments in ({}, {"policy": FOLLOW}):
        with pytest.raises(EngineUnavailable, match="serves adapters only") as failed:
            scene.adapters.begin("s", **arguments)
        assert failed.value.retry_after_s
    await scene.publish(1)
    assert scene.adapters.begin("s") == 1
    with pytest.raises(NotFound):
        scene.adapters.begin("t", recorded=BASE)


async def test_a_refused_turn_leaves_no_trace() -> None:
    scene = Scene(lora=True)
    with pytest.raises(EngineUnavailable):
        scene.adapters.begin("s")
    await scene.publish(1, 2)
    assert scene.live == [2]
    assert scene.adapters.begin("s") == 2


# Publication ---------------------------------------------------------------------------------------------------------


async def test_versions_grow_and_the_default_is_one_more() -> None:
    scene = Scene()
    await scene.publish(5)
    assert await scene.adapters.publish(AdapterSource("next")) == 6
    for wrong in (5, 1, 2**31):
        with pytest.raises(InvalidRequest) as failed:
            await scene.adapters.publish(AdapterSource("x"), wrong)
        assert failed.value.param == "version"
    assert (scene.adapters.newest, scene.live) == (6, [6])


async def test_versions_are_larger_than_that_of_the_weights() -> None:
    scene = Scene()
    await scene.engine.update_weights("w", 7)
    with pytest.raises(InvalidRequest, match="the weights of the engine have version 7"):
        await scene.adapters.publish(AdapterSource("x"), 7)
    assert await scene.adapters.publish(AdapterSource("x")) == 8
    assert scene.adapters.version == 8
    with pytest.raises(InvalidRequest, match="cannot change"):
        scene.adapters.check_weights()


async def test_the_same_publication_twice_has_no_effect_and_another_adapter_is_refused() -> None:
    scene = Scene()
    one = AdapterSource("/tmp/a", {"r": 8}, b"tensors")
    await scene.adapters.publish(one, 1)
    assert await scene.adapters.publish(one._replace(path="/tmp/b"), 1) == 1
    assert scene.engine.done == [("load", 1)]
    assert scene.released == ["/tmp/b"]
    for other in (one._replace(tensors=b"others"), one._replace(config={"r": 16}), AdapterSource("/tmp/a")):
        with pytest.raises(InvalidRequest):
            await scene.adapters.publish(other, 1)
    assert await scene.adapters.publish(AdapterSource("p"), 2) == await scene.adapters.publish(AdapterSource("p"), 2)


async def test_a_failed_load_publishes_nothing_and_the_version_is_free() -> None:
    scene = Scene()
    await scene.publish(1)
    scene.engine.failing = {2}
    with pytest.raises(EngineFailed):
        await scene.adapters.publish(AdapterSource("bad"), 2)
    assert (scene.adapters.newest, scene.live, scene.released) == (1, [1], ["bad"])
    scene.engine.failing = set()
    await scene.publish(2)
    assert scene.adapters.newest == 2


async def test_a_version_that_is_being_loaded_is_not_used_yet() -> None:
    scene = Scene()
    await scene.publish(1)
    scene.engine.held = True
    task = scene.starts(2)
    await settled()
    assert (scene.adapters.newest, scene.adapters.begin("s")) == (1, 1)
    with pytest.raises(NotFound):
        scene.adapters.begin("t", pinned=2)
    scene.engine.waiting[0].set_result(None)
    assert await task == 2
    assert scene.adapters.begin("t") == 2


async def test_publications_run_one_after_the_other() -> None:
    scene = Scene()
    scene.engine.held = True
    tasks = [scene.starts(None, path) for path in "abc"]
    for _ in tasks:
        await settled()
        assert len(scene.engine.waiting) == 1
        scene.engine.waiting[0].set_result(None)
    scene.engine.held = False
    await settled()
    scene.adapters._clean()
    for step in scene.engine.waiting:
        step.set_result(None)
    assert await asyncio.gather(*tasks) == [1, 2, 3]


async def test_a_publication_waits_for_room_and_says_for_which_sessions(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scene = Scene(most=2)
    for version, session in ((1, "a"), (2, "b")):
        await scene.publish(version)
        scene.adapters.begin(session)
        scene.adapters.end(version)
    task = scene.starts(3)
    await settled()
    waiting = {"version": 3, "sessions": ["a", "b"], "count": 2, "requests": 0}
    assert (scene.adapters.show()["waiting_for"], task.done()) == (waiting, False)
    (told,) = fields_of(caplog, "publication waits")
    assert (told["version"], told["live"], told["waits_for"]) == (3, 2, "2 sessions (a, b)")
    assert scene.adapters.begin("c") == 2
    assert scene.engine.done == [("load", 1), ("load", 2)]
    scene.adapters.forget("a")
    assert await task == 3
    assert (scene.live, scene.adapters.show()["waiting_for"]) == ([2, 3], None)
    assert scene.engine.done[2:] == [("unload", 1), ("load", 3)]
    published = fields_of(caplog, "adapter published")
    assert [fields["version"] for fields in published] == [1, 2, 3]
    assert [fields["version"] for fields in fields_of(caplog, "adapter unloaded")] == [1]


async def test_a_session_that_begins_with_the_newest_during_a_load_keeps_it_and_the_publication_waits_again() -> None:
    scene = Scene(most=1)
    await scene.publish(1)
    scene.engine.held = True
    task = scene.starts(2)
    await settled()
    assert scene.adapters.begin("late") == 1
    scene.engine.waiting[0].set_result(None)
    await settled()
    assert (task.done(), scene.adapters.newest, scene.adapters.show()["waiting_for"]["requests"]) == (False, 1, 1)
    scene.engine.held = False
    scene.adapters.end(1)
    scene.adapters.forget("late")
    assert await task == 2
    await settled()
    assert list(scene.engine.adapters) == [2]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_publication_that_is_cancelled_while_it_loads_leaves_nothing(fails: bool) -> None:
    scene = Scene()
    await scene.publish(1)
    scene.engine.held = True
    task = scene.starts(2, "mine")
    await settled()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (scene.adapters.newest, scene.live) == (1, [1])
    again = scene.starts(2, "again")
    await settled()
    scene.engine.failing = {2} if fails else set()
    scene.engine.waiting[0].set_result(None)
    await settled()
    scene.engine.held, scene.engine.failing = False, set()
    for step in scene.engine.waiting:
        step.set_result(None)
    assert await again == 2
    assert scene.engine.adapters[2].path == "again"
    assert scene.released.count("mine") == 1


async def test_a_publication_that_is_cancelled_while_it_waits_leaves_nothing() -> None:
    scene = Scene(most=1)
    await scene.publish(1)
    scene.adapters.begin("s")
    task, queued = scene.starts(2), scene.starts(3)
    await settled()
    for each in (queued, task):
        each.cancel()
        with pytest.raises(asyncio.CancelledError):
            await each
    assert (scene.adapters.newest, scene.released, scene.adapters.show()["waiting_for"]) == (1, ["v3", "v2"], None)
    scene.adapters.end(1)
    scene.adapters.forget("s")
    await scene.publish(2)


# Unloading -----------------------------------------------------------------------------------------------------------


async def test_a_version_is_unloaded_after_its_last_session_and_request_and_its_source_is_released() -> None:
    scene = Scene()
    await scene.publish(1)
    scene.adapters.begin("s")
    scene.adapters.begin("t")
    await scene.publish(2)
    scene.adapters.forget("s")
    scene.adapters.forget("t")
    scene.adapters.end(1)
    await settled()
    assert scene.live == [1, 2]
    scene.adapters.end(1)
    await settled()
    assert (scene.live, list(scene.engine.adapters), scene.released) == ([2], [2], ["v1"])
    scene.adapters.forget("s")


async def test_an_adapter_that_could_not_be_unloaded_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(most=1)
    await scene.publish(1)
    scene.engine.failing = {1}
    await scene.publish(2)
    await settled()
    (told,) = fields_of(caplog, "adapter not unloaded")
    assert (told["version"], scene.live, sorted(scene.engine.adapters)) == (1, [2], [1, 2])
    with pytest.raises(EngineFailed, match="version 1 does not fit"):
        await scene.adapters.publish(AdapterSource("v3"), 3)
    with pytest.raises(EngineFailed):
        await scene.adapters.withdraw(1)
    scene.engine.failing = set()
    await scene.publish(3)
    await settled()
    assert list(scene.engine.adapters) == [3]


async def test_only_a_version_that_is_unused_and_not_the_newest_is_withdrawn() -> None:
    scene = Scene()
    await scene.publish(1)
    scene.adapters.begin("s")
    await scene.publish(2)
    with pytest.raises(InvalidRequest, match="is the newest"):
        await scene.adapters.withdraw(2)
    with pytest.raises(InvalidRequest, match=r"in use by 1 sessions \(s\) and 1 requests"):
        await scene.adapters.withdraw(1)
    with pytest.raises(NotFound, match="version 9 cannot be withdrawn"):
        await scene.adapters.withdraw(9)
    scene.engine.failing = {1}
    scene.adapters.end(1)
    scene.adapters.forget("s")
    await settled()
    scene.engine.failing = set()
    await scene.adapters.withdraw(1)
    assert list(scene.engine.adapters) == [2]


# Refusals and shutdown -----------------------------------------------------------------------------------------------


class Plain:
    """An engine that is no AdapterEngine."""

    def info(self) -> Any:
        return SlowEngine().info()


class Without(SlowEngine):
    """An engine that was not set up for adapters."""

    def info(self) -> Any:
        return replace(super().info(), capabilities=frozenset(Capability) - {Capability.ADAPTERS})


@pytest.mark.parametrize("engine", [Plain(), Without()])
async def test_an_engine_without_adapters_is_refused_by_name(engine: Any) -> None:
    released: list[AdapterSource] = []
    adapters = Adapters(engine, Settings(), released.append)
    with pytest.raises(EngineIncapable, match="the engine 'scripted' loads no LoRA adapters"):
        await adapters.publish(AdapterSource("x"))
    assert released == [AdapterSource("x")]
    assert adapters.begin("s") is None


async def test_several_workers_are_refused_by_name() -> None:
    url = "postgresql://u@h/d"
    settings = Settings(workers=2, engine="scripted", database_url=url)
    with pytest.raises(EngineIncapable, match="without --workers"):
        await Adapters(SlowEngine(), settings).publish(AdapterSource("x"))


@pytest.mark.parametrize("loading", [False, True])
async def test_shutdown_ends_publications_and_releases_every_source(loading: bool) -> None:
    scene = Scene(most=1)
    await scene.publish(1)
    if loading:
        scene.engine.held = True
    else:
        scene.adapters.begin("s")
    tasks = [scene.starts(version) for version in (2, 3)]
    await settled()
    await scene.adapters.close()
    for task in tasks:
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await task
    assert set(scene.released) == {"v1", "v2", "v3"}
    with pytest.raises(EngineUnavailable):
        await scene.adapters.publish(AdapterSource("v4"))
    scene.adapters.end(None if loading else 1)


# Any order -----------------------------------------------------------------------------------------------------------

SESSIONS = st.integers(0, 4)
STEPS = st.one_of(
    st.tuples(st.just("publish"), st.none()),
    st.tuples(st.just("cancel"), st.integers(0, 3)),
    st.tuples(st.just("begin"), SESSIONS),
    st.tuples(st.just("name"), SESSIONS),
    st.tuples(st.just("end"), st.integers(0, 20)),
    st.tuples(st.just("forget"), SESSIONS),
    st.tuples(st.just("engine"), st.booleans()),
    st.tuples(st.just("engine"), st.just(True)),
)


class Play:
    """A random play of trainers, turns and an engine, with what must hold at any time."""

    POLICIES: ClassVar = (SESSION, SESSION, FOLLOW, SESSION, FOLLOW)

    def __init__(self, most: int) -> None:
        self.scene = Scene(most=most)
        self.engine = self.scene.engine
        self.engine.held, self.engine.check = True, self.check_unused
        self.tasks: list[asyncio.Task[int]] = []
        self.running: list[tuple[int, int | None]] = []
        self.own: dict[int, int | None] = {}
        self.named: dict[int, set[int]] = {}
        self.count = 0

    def check_unused(self, version: int) -> None:
        assert version not in [used for _, used in self.running]
        assert version not in self.own.values()
        assert not any(version in versions for versions in self.named.values())
        assert version != self.scene.adapters.newest

    async def step(self, what: str, which: Any) -> None:
        adapters = self.scene.adapters
        if what == "publish":
            self.count += 1
            self.tasks.append(self.scene.starts(None, f"p{self.count}"))
        elif what == "cancel" and which < len(self.tasks):
            self.tasks.pop(which).cancel()
        elif what == "begin":
            policy, own = self.POLICIES[which], self.own.get(which, adapters.newest)
            version = adapters.begin(str(which), policy=policy)
            assert version == (own if policy is SESSION else adapters.newest)
            if policy is SESSION:
                self.own[which] = version
            self.running.append((which, version))
        elif what == "name" and self.scene.live:
            version = self.scene.live[0]
            assert adapters.begin(str(which), pinned=version, policy=self.POLICIES[which]) == version
            if self.POLICIES[which] is SESSION:
                self.own.setdefault(which, version)
            self.named.setdefault(which, set()).add(version)
            self.running.append((which, version))
        elif what == "end" and which < len(self.running):
            adapters.end(self.running.pop(which)[1])
        elif what == "forget":
            self.own.pop(which, None)
            self.named.pop(which, None)
            adapters.forget(str(which))
        elif what == "engine" and self.engine.waiting:
            step = self.engine.waiting[0]
            if which:
                step.set_result(None)
            else:
                step.set_exception(EngineFailed("not this time"))
        await settled()
        self.check()

    def check(self) -> None:
        adapters, loaded = self.scene.adapters, set(self.engine.adapters)
        assert len(loaded) <= adapters._settings.max_live_versions + 1
        assert len(self.scene.live) <= adapters._settings.max_live_versions
        assert set(self.scene.live) <= loaded
        assert {version for _, version in self.running if version is not None} <= set(self.scene.live)
        assert adapters.newest is None or adapters.newest == max(self.scene.live)

    async def finish(self) -> None:
        """End everything; whatever waits goes on, and only the newest version is left."""
        for _, version in self.running:
            self.scene.adapters.end(version)
        self.running, self.own, self.named = [], {}, {}
        for session in range(len(self.POLICIES)):
            self.scene.adapters.forget(str(session))
        self.engine.held = False
        for _ in range(5 * self.count + 5):
            for step in self.engine.waiting:
                if not step.done():
                    step.set_result(None)
            await settled()
        for task in self.tasks:
            assert task.done()
            with contextlib.suppress(ProxyError):
                task.result()
        await self.scene.publish((self.scene.adapters.newest or 0) + 1)
        await settled()
        assert list(self.engine.adapters) == self.scene.live == [self.scene.adapters.newest]
        assert sorted(self.scene.released) == sorted(f"p{n + 1}" for n in range(self.count))


@settings(max_examples=90, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(STEPS, min_size=15, max_size=60), most=st.integers(1, 3))
def test_no_order_of_publications_turns_and_ends_breaks_the_rules(steps: list[tuple[str, Any]], most: int) -> None:
    async def run() -> None:
        play = Play(most)
        for what, which in steps:
            await play.step(what, which)
        await play.finish()

    asyncio.run(run())


async def test_a_pinned_version_does_not_change_the_one_that_a_session_began_with_before_a_restart() -> None:
    scene = Scene()
    for version in (3, 5):
        await scene.publish(version)
        scene.adapters.begin(f"keeps {version}")
    assert scene.adapters.begin("s", pinned=5, recorded=3) == 5
    assert scene.adapters.begin("s") == 3
    scene.adapters.forget("keeps 3")
    await settled()
    assert scene.adapters.begin("s") == 3, "the session keeps it live"
