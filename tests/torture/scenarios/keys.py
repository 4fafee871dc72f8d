"""Keys that are replaced, or move to another session, while agents use old and new ones: each opens what it should."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from tests.torture.asking import Asker, Reply
from tests.torture.callers import Caller
from tests.torture.runs import World, scenario
from tests.torture.sites import Site, check_database

_KEY = "a-key-that-somebody-chose"
_SESSION = "s"


@dataclass
class _Key:
    """`since`: it works from then on at the latest. It works until `replacing` at least, until `replaced` at most."""

    kind: str
    value: str
    since: float
    replacing: float = inf
    replaced: float = inf

    def check(self, reply: Reply) -> None:
        """Raise AssertionError for a reply that it may not have had."""
        if self.since <= reply.sent and reply.came <= self.replacing:
            assert reply.status == 200, f"the {self.kind} is refused, although nothing replaced it"
        if self.replaced <= reply.sent:
            assert reply.status == 401, f"the {self.kind} works after it was replaced"


@dataclass
class _Keys:
    """All keys that a session has had, by kind, oldest first."""

    known: dict[str, list[_Key]] = field(default_factory=lambda: {"agent": [], "path": [], "control": []})

    def replace(self, kinds: list[str], now: float) -> None:
        """Note that keys of these kinds are about to be replaced."""
        for kind in kinds:
            self.known[kind][-1].replacing = now

    def take(self, issued: dict[str, str | None], came: float) -> None:
        """Note what a start or a rotation has issued."""
        secret = (issued["root_url"] or "").rpartition("/")[2].partition("~")[2]
        values = {"agent": issued["api_key"], "path": secret, "control": issued["control_key"]}
        for kind, value in values.items():
            if not value:
                continue
            if self.known[kind]:
                self.known[kind][-1].replaced = came
            self.known[kind].append(_Key(kind, value, came))


async def _use(world: World, asker: Asker, keys: _Keys) -> None:
    """An agent that has one of the keys, perhaps an old one."""
    for _ in range(world.random.randrange(2, 5)):
        await world.some_time(0.5)
        key = world.random.choice([*keys.known["agent"][-2:], *keys.known["path"][-2:]])
        address, headers = f"/{_SESSION}~{key.value}", {}
        if key.kind == "agent":
            in_path = world.random.random() < 0.5
            address, headers = (f"/~{key.value}", {}) if in_path else ("", {"authorization": f"Bearer {key.value}"})
        reply = await asker.ask(address, refused=(401,), **headers)
        assert reply is not None
        key.check(reply)
        assert reply.session in ("", _SESSION), reply


async def _rotate(world: World, caller: Caller, keys: _Keys, admin: dict[str, str]) -> None:
    for _ in range(world.random.randrange(1, 4)):
        await world.some_time(0.7)
        kinds = world.random.choice([["agent"], ["path"], ["agent", "path"], ["agent", "control", "path"]])
        by = admin or {"authorization": f"Bearer {keys.known['control'][-1].value}"}
        keys.replace(kinds, world.loop.time())
        answer = await caller.ok("POST", f"/{_SESSION}/rl/rotate_keys", {"keys": kinds}, **by)
        keys.take(answer.body, answer.came)


async def _forget(world: World, site: Site) -> None:
    for _ in range(world.random.randrange(3)):
        await world.some_time(0.7)
        site.forget_idle()


@scenario
async def keys_are_replaced(world: World) -> None:
    """A key works until it is replaced and never after, whatever the server had in memory."""
    admin_key = world.random.choice([None, "the-key-of-the-administrator"])
    admin = {} if admin_key is None else {"authorization": f"Bearer {admin_key}"}
    site = Site(world, alone=world.random.random() < 0.7, admin_key=admin_key, shutdown_timeout_s=0.5)
    keys, caller = _Keys(), Caller(world, site)
    asker = Asker(world, site, most_tokens=3)
    async with site.running():
        started = await caller.ok("POST", "/rl/start_session", {"session_id": _SESSION}, **admin)
        keys.take(started.body, started.came)
        site.forget_idle()
        await world.all(
            *(_use(world, asker, keys) for _ in range(3)),
            _rotate(world, caller, keys, admin),
            world.random.choice([site.restarts, lambda: _forget(world, site)])(),
        )
        await world.all(*(_use(world, asker, keys) for _ in range(2)))
    check_database(world)


@dataclass
class _Owner:
    """A session that has the chosen key. See `_Key` for the times."""

    name: str
    since: float = inf
    ending: float = inf
    ended: float = inf


async def _follow(world: World, caller: Caller, owners: list[_Owner]) -> None:
    """Start session after session with the same key."""
    for number in range(world.random.randrange(2, 5)):
        owner = _Owner(f"e{number}")
        owners.append(owner)
        body = {"session_id": owner.name, "api_key": _KEY}
        owner.since = (await caller.ok("POST", "/rl/start_session", body)).came
        await world.some_time(0.6)
        owner.ending = world.loop.time()
        owner.ended = (await caller.ok("POST", f"/{owner.name}/rl/end_session", {})).came
        await world.some_time(0.3)


def _check_owner(owners: list[_Owner], reply: Reply) -> None:
    for owner in owners:
        if owner.since <= reply.sent and reply.came <= owner.ending:
            assert reply.status == 200 and reply.session == owner.name, f"the key is that of {owner}: {reply}"
        if reply.status == 200 and reply.session == owner.name:
            assert reply.sent < owner.ended, f"a turn was answered after its session had ended: {owner}"


@scenario
async def keys_move_to_new_sessions(world: World) -> None:
    """A chosen key belongs to the session that was started with it last, and no turn goes to an earlier one."""
    site = Site(world, alone=world.random.random() < 0.7)
    owners: list[_Owner] = []
    asker = Asker(world, site, most_tokens=3)

    async def agent() -> None:
        await world.until(lambda: bool(owners) and owners[0].since < inf)
        for _ in range(world.random.randrange(3, 7)):
            await world.some_time(0.5)
            reply = await asker.ask("", refused=(403,), authorization=f"Bearer {_KEY}")
            assert reply is not None
            _check_owner(owners, reply)

    async with site.running():
        await world.all(*(agent() for _ in range(3)), _follow(world, Caller(world, site), owners), _forget(world, site))
    check_database(world)
