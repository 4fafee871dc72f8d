"""Work that waits for threads and is cancelled at every moment: at the end all threads are free again."""

from __future__ import annotations

from collections import Counter

from proxy.resources.fair_pool import LARGE, FairPool
from proxy.resources.memory import FreedMemory
from proxy.resources.senders import Sender, Tally
from tests.torture.fibres import give_way
from tests.torture.runs import World, scenario


class _Forgetful(FreedMemory):
    """Gives no memory back: the work is pretended."""

    def expect(self) -> None:
        pass


@scenario
async def pool_of_threads(world: World) -> None:
    """Callers come and are cancelled; no more work runs than there are threads, and none is kept from running."""
    work_of, running, seen = Tally(), Counter[str](), Counter[str]()
    pool = FairPool(2, _Forgetful(), work_of)

    def work(kind: str) -> str:
        running[kind] += 1
        assert running.total() <= 2 and running["large"] <= 1
        give_way()
        running[kind] -= 1
        return kind

    async def caller(number: int) -> None:
        for _ in range(world.random.randrange(1, 4)):
            await world.some_time(0.01)
            kind = world.random.choice(["small", "small", "large"])
            size = LARGE if kind == "large" else 1
            seen[kind] += await world.abandon_some(pool.run(Sender(name=str(number)), size, work, kind), 0.01) == kind

    await world.all(*(caller(number) for number in range(6)))
    # Whatever was cancelled, both threads take work again, and large work too.
    await world.all(
        *(pool.run(Sender(name=str(number)), LARGE if number == 0 else 1, work, "late") for number in range(4))
    )
    await world.until(lambda: not world.loop.busy_threads())  # what abandoned callers began
    assert pool.waiting == 0 and pool._running == 0 and not pool._large and not work_of.of and work_of.total == 0
    pool.close()
