"""Shared prefixes by key, on transformers' own allocator: what one key has cached no other key finds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from proxy.engine.transformers.prefix_keys import PrefixKeys

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

PAGE = 4
IDS = list(range(10, 22))


class Serial(str):
    """The id of a request with a key."""

    def __new__(cls, text: str, key: int) -> Serial:
        made = super().__new__(cls, text)
        made.prefix_key = key
        return made


class Cache:
    """One allocator of 16 blocks; requests are searched, run and freed as the scheduler does it."""

    def __init__(self) -> None:
        from transformers.generation.continuous_batching.cache_allocators import CachePool, FullAttentionCacheAllocator

        config = SimpleNamespace(head_dim=2)
        self.allocator = FullAttentionCacheAllocator(0, config, 1, torch.float32, PAGE, [0], True)
        size = self.allocator.bytes_per_block
        self.pool = CachePool(16, 1)
        tensor = torch.zeros(18 * size, dtype=torch.uint8)
        self.allocator.register_cache_tensor(size, 16 * size, tensor, self.pool)
        self.keys = PrefixKeys(self, self.allocator)

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        blocks = self.allocator.match_prefix_blocks(prompt_ids)
        if blocks:
            self.allocator.acquire_prefix_blocks(request_id, len(blocks) * PAGE, blocks)
        return len(blocks) * PAGE

    def begin(self, key: int, ids: list[int] = IDS, name: str = "r") -> tuple[str, int]:
        """Run a prompt; return the id of its request, and how many tokens were cached."""
        serial = Serial(f"{name}{key}", key) if key else name
        found = self.search_prefix_match(serial, ids)
        while self.pool.count_free_blocks(0) < -(-(len(ids) - found) // PAGE):
            self.pool.allocate_sector(0)
        self.allocator.allocate_cache_to_request(serial, found, len(ids) - found)
        self.allocator.mark_complete_blocks(serial, ids, (len(ids) - found) // PAGE)
        return serial, found

    def run(self, key: int, ids: list[int] = IDS) -> int:
        serial, found = self.begin(key, ids)
        self.allocator.free_blocks(serial)
        return found


@pytest.fixture
def cache() -> Any:
    return Cache()


def test_a_prefix_is_found_by_its_own_key_only(cache: Cache) -> None:
    for key in (1, 2):
        cache.keys.open(key)
    assert [cache.run(key) for key in (0, 1, 2)] == [0, 0, 0]
    assert [cache.run(key) for key in (0, 1, 2)] == [8, 8, 8]  # the last token always runs
    assert [cache.run(key, [*IDS, 5]) for key in (0, 1, 2)] == [12, 12, 12]
    assert [cache.run(key, IDS[:5]) for key in (0, 1, 2)] == [4, 4, 4]
    assert cache.run(1, [9, *IDS[1:]]) == 0


def test_a_block_whose_tokens_are_those_of_a_first_block_with_a_key_is_another(cache: Cache) -> None:
    cache.keys.open(14)
    cache.run(14, IDS[:5])
    assert cache.run(0, IDS[:9]) == 0 and cache.run(14, IDS[:9]) == 4


def test_a_closed_key_loses_its_blocks_when_the_next_request_begins(cache: Cache) -> None:
    for key in (1, 2):
        cache.keys.open(key)
        cache.run(key)
    held = cache.allocator.ledger.cached_blocks
    assert len(held) == 6 and [cache.keys.cached(key) for key in (1, 2)] == [3, 3]
    cache.keys.close(1)
    free = cache.pool.count_free_blocks(0)
    assert cache.search_prefix_match("other", [1, 2, 3]) == 0
    assert len(held) == 3 and [cache.keys.cached(key) for key in (1, 2)] == [0, 3]
    assert cache.pool.count_free_blocks(0) == free + 3
    assert cache.run(2) == 8 and cache.run(1) == 0


def test_blocks_of_a_closed_key_are_kept_as_long_as_a_request_uses_them(cache: Cache) -> None:
    cache.keys.open(1)
    running, _ = cache.begin(1, name="running")
    cache.keys.close(1)
    cache.run(0)
    assert cache.keys.cached(1) == 3
    cache.allocator.free_blocks(running)
    cache.run(0)
    assert cache.keys.cached(1) == 0


def test_a_block_that_went_to_another_request_is_not_dropped_with_the_key(cache: Cache) -> None:
    cache.keys.open(1)
    cache.run(1)
    cache.pool.free_blocks(0, cache.allocator.ledger.evict_cached_blocks())
    for number in range(5):  # all 16 blocks, but one
        cache.run(0, [number, *IDS[1:]])
    cache.keys.close(1)
    assert [cache.run(0, [number, *IDS[1:]]) for number in range(5)] == [8] * 5


def test_without_shared_prefixes_keys_have_no_effect() -> None:
    keys = PrefixKeys(object(), None)
    keys.open(1)
    assert keys.cached(1) == 0
    keys.close(1)
