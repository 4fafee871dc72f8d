"""Keys that separate the shared prefixes of transformers' paged cache: requests share only those of their own key.

The cache finds a prefix by a chain of hashes of its blocks. The key enters the hash of the first block, and so those of
all others. Request ids carry their key (`prefix_key`); a plain string has none and shares with other plain strings. A
request whose prompt is scored finds no prefix of the part that its logits are needed of (`scored_from`).
"""

from __future__ import annotations

from typing import Any, SupportsIndex


class PrefixKeys:
    """The keys of one cache. `open` and `close` may be called on any thread, everything else on the batching thread."""

    def __init__(self, cache: Any, allocator: Any) -> None:
        """`allocator`: that of the blocks that requests share, one for all layers; None if they share none."""
        self._allocator = allocator
        self._open: set[int] = set()
        self._hashes: dict[int, dict[int, int]] = {}  # by key: the hash of each of its blocks
        if allocator is not None:
            self._search, self._mark = cache.search_prefix_match, allocator.mark_complete_blocks
            cache.search_prefix_match, allocator.mark_complete_blocks = self._searched, self._marked

    def open(self, key: int) -> None:
        """Keep the prefixes of `key`, which is positive and was never used before."""
        self._open.add(key)

    def close(self, key: int) -> None:
        """Drop the prefixes of `key` before the next request begins, or once no request uses them."""
        self._open.discard(key)

    def cached(self, key: int) -> int:
        """The number of blocks with prefixes of `key`."""
        known = {} if self._allocator is None else self._allocator.ledger.block_to_hash
        return sum(known.get(block) == value for block, value in self._hashes.get(key, {}).items())

    def _searched(self, request_id: str, prompt_ids: list[int]) -> int:
        """Replaces `PagedAttentionCache.search_prefix_match`."""
        self._drop_closed()
        if (scored_from := getattr(request_id, "scored_from", None)) is not None:
            prompt_ids = prompt_ids[: scored_from - 1]
        return int(self._search(request_id, self._keyed(request_id, prompt_ids)))

    def _marked(self, request_id: str, token_ids: list[int], new_blocks: int) -> None:
        """Replaces `CacheAllocator.mark_complete_blocks`."""
        self._mark(request_id, self._keyed(request_id, token_ids), new_blocks)
        if key := _key_of(request_id):
            known, table = self._allocator.ledger.block_to_hash, self._allocator.block_table[request_id]
            self._hashes.setdefault(key, {}).update((block, known[block]) for block in table if block in known)

    def _keyed(self, request_id: str, ids: list[int]) -> list[int]:
        key = _key_of(request_id)
        return _Keyed(ids, key, self._allocator.tokens_per_page) if key else ids

    def _drop_closed(self) -> None:
        """Free the blocks of closed keys, except those that running requests use: these are freed by a later call."""
        ledger = self._allocator.ledger
        for key in [key for key in self._hashes if key not in self._open]:
            ours = {block: value for block, value in self._hashes[key].items() if _holds(ledger, block, value)}
            free = [block for block in ours if block in ledger.cached_blocks]
            for block in free:
                del ledger.cached_blocks[block], ledger.block_to_hash[block], ledger.hash_to_block[ours.pop(block)]
            self._allocator.pool.free_blocks(self._allocator.index, free)
            if ours:
                self._hashes[key] = ours
            else:
                del self._hashes[key]


class _Keyed(list[int]):
    """Token ids whose first whole block, as a slice, also has the key. Later blocks have the hash of the one before."""

    def __init__(self, ids: list[int], key: int, block_tokens: int) -> None:
        super().__init__(ids)
        self._key, self._block_tokens = key, block_tokens

    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        if not isinstance(place, slice):
            return super().__getitem__(place)
        part = super().__getitem__(place)
        first = place.indices(len(self))[0] == 0 and len(part) == self._block_tokens
        return [*part, self._key] if first else part


def _key_of(request_id: str) -> int:
    return int(getattr(request_id, "prefix_key", 0))


def _holds(ledger: Any, block: int, value: int) -> bool:
    """Whether `block` still has the content with this hash, and was not given to others."""
    return bool(ledger.block_to_hash.get(block) == value)
