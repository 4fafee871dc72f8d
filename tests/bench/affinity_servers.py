"""Simulated engine servers with a prefix cache, on a virtual clock, for `tests.bench.affinity`.

A server has room for `capacity` tokens. Running requests hold theirs; the rest is a cache of prefixes, from which the
least recently used go first, from their end, and the shared prompt of a group goes after all continuations of it. A
request waits until a place and room for its prompt and its output are free. One prompt is computed at a time, without
the cached tokens, and meanwhile no request gets a token, as in SGLang without mixed chunks. Otherwise all running
requests get a token per step, and a step takes longer the more of them there are.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any


class Clock:
    """Calls functions in the order of virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], Any]]] = []
        self._order = count()

    def call_in(self, seconds: float, function: Callable[[], Any]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._order), function))

    def run(self, going: Callable[[], bool]) -> None:
        """Advance until nothing is due, or `going` is false."""
        while self._due and going():
            self.now, _, function = heapq.heappop(self._due)
            function()


@dataclass(frozen=True, slots=True)
class Speed:
    """A server's speed and room, about those of an 8B model in bfloat16 on an H100."""

    capacity: int = 400_000
    running: int = 64
    prefill_per_s: float = 20_000.0
    step_s: float = 0.008
    step_s_per_request: float = 0.0001


@dataclass(slots=True, eq=False)
class Request:
    """A turn at a server. `chain`: the conversation whose prefixes are equal, in `group`, of which the first `shared`
    tokens are the same for all chains. `done`: the tokens sampled so far, of `output`."""

    session: str
    chain: str
    group: str
    shared: int
    prompt: int
    output: int
    asked_at: float
    done: int = 0
    uncached: int = 0
    end_step: float = 0.0


class PrefixCache:
    """The tokens that a server holds: of each chain those after the shared prompt, and of each group that prompt."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._used = capacity, 0
        self._held: OrderedDict[str, int] = OrderedDict()
        self._group_of: dict[str, str] = {}
        self._chains: Counter[str] = Counter()
        self._locked: Counter[str] = Counter()

    def held(self, request: Request) -> int:
        """The tokens at the beginning of the prompt that are held."""
        if request.group not in self._held:
            return 0
        return min(request.shared + self._held.get(request.chain, 0), request.prompt)

    def take(self, request: Request) -> bool:
        """Hold the prompt and the output of a request until it is given back. Return False if there is no room."""
        own = request.prompt + request.output - request.shared
        self._locked.update((request.chain, request.group))
        need = own - self._held.get(request.chain, 0) + (0 if request.group in self._held else request.shared)
        if not self._make_room(need):
            self.give_back(request)
            return False
        if request.chain not in self._held:
            self._chains[request.group] += 1
            self._group_of[request.chain] = request.group
        self._used += need
        self._held[request.chain], self._held[request.group] = own, request.shared
        self._held.move_to_end(request.chain)
        self._held.move_to_end(request.group)
        return True

    def give_back(self, request: Request) -> None:
        """Let the tokens of a request go when room is needed."""
        for name in (request.chain, request.group):
            self._locked[name] -= 1

    def _make_room(self, need: int) -> bool:
        missing = self._used + need - self._capacity
        if missing <= 0:
            return True
        found: list[tuple[str, int]] = []
        emptied: Counter[str] = Counter()
        for name, tokens in self._held.items():
            if missing <= 0:
                break
            if self._locked[name] or self._chains[name] > emptied[name]:
                continue
            found.append((name, min(tokens, missing)))
            missing -= tokens
            if tokens <= found[-1][1] and name in self._group_of:
                emptied[self._group_of[name]] += 1
        if missing > 0:
            return False
        for name, tokens in found:
            self._drop(name, tokens)
        return True

    def _drop(self, name: str, tokens: int) -> None:
        self._used -= tokens
        if name not in self._group_of:  # a shared prompt goes whole
            self._used -= self._held.pop(name) - tokens
            return
        self._held[name] -= tokens
        if not self._held[name]:
            del self._held[name]
            self._chains[self._group_of.pop(name)] -= 1


@dataclass(slots=True, eq=False)
class SimulatedServer:
    """`prompt_tokens`, `cached_tokens`: of all requests that ran. `on_done` is called with each request that ends."""

    clock: Clock
    speed: Speed
    on_done: Callable[[Request], None]
    cache: PrefixCache = field(init=False)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    _queue: deque[Request] = field(default_factory=deque)
    _lane: deque[Request] = field(default_factory=deque)
    _decoding: list[tuple[float, int, Request]] = field(default_factory=list)
    _order: Any = field(default_factory=count)
    _steps: float = 0.0
    _since: float = 0.0
    _event: int = 0
    _prefilling: bool = False

    def __post_init__(self) -> None:
        self.cache = PrefixCache(self.speed.capacity)

    def submit(self, request: Request) -> None:
        self._queue.append(request)
        self._go_on()

    def die(self) -> list[Request]:
        """Lose all requests, which are returned with what they have sampled, and the cache."""
        self._advance()
        for end, _, request in self._decoding:
            request.done = min(max(request.output - round(end - self._steps), request.done), request.output - 1)
        lost = [*self._queue, *self._lane, *(request for _, _, request in self._decoding)]
        self._queue.clear()
        self._lane.clear()
        self._decoding.clear()
        self._prefilling = False
        self._event += 1
        self.cache = PrefixCache(self.speed.capacity)
        return lost

    def _rate(self) -> float:
        return 1.0 / (self.speed.step_s + self.speed.step_s_per_request * len(self._decoding))

    def _advance(self) -> None:
        if self._decoding and not self._prefilling:
            self._steps += (self.clock.now - self._since) * self._rate()
        self._since = self.clock.now

    def _go_on(self) -> None:
        """Admit what can be admitted, and plan the next event."""
        if self._prefilling:
            return
        self._advance()
        self._admit()
        self._event += 1
        event = self._event
        if self._lane:
            request = self._lane[0]
            self._prefilling = True
            self.clock.call_in(max(request.uncached, 1) / self.speed.prefill_per_s, lambda: self._computed(event))
        elif self._decoding:
            left = max(self._decoding[0][0] - self._steps, 0.0)
            self.clock.call_in(left / self._rate(), lambda: self._ended(event))

    def _admit(self) -> None:
        while self._queue and len(self._lane) + len(self._decoding) < self.speed.running:
            request = self._queue[0]
            held = self.cache.held(request)
            if not self.cache.take(request):
                return
            self._queue.popleft()
            request.uncached = request.prompt + request.done - held
            self.prompt_tokens += request.prompt + request.done
            self.cached_tokens += held
            self._lane.append(request)

    def _computed(self, event: int) -> None:
        if event != self._event:
            return
        self._since, self._prefilling = self.clock.now, False
        request = self._lane.popleft()
        request.end_step = self._steps + request.output - request.done
        heapq.heappush(self._decoding, (request.end_step, next(self._order), request))
        self._go_on()

    def _ended(self, event: int) -> None:
        if event != self._event:
            return
        self._advance()
        _, _, request = heapq.heappop(self._decoding)
        self.cache.give_back(request)
        self.on_done(request)
        self._go_on()
