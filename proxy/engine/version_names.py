"""The names that SGLang and vLLM give to weights, as integers, and the version runs of the tokens of a reply.

Only a version that was published, or that a server reported when asked, labels tokens: a name that only a reply has
does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.engine.chunks import TokenChunk
from proxy.engine.versions import LARGEST_VERSION, joined
from proxy.types import Ids, Logprobs, VersionRuns
from tokengrove.errors import EngineFailed
from tokengrove.reasons import FinishReason

_FIRST = "default"
"""The version name of weights that were never updated, in SGLang and vLLM."""

_MOST_DIGITS = 19


@dataclass(slots=True)
class VersionNumbers:
    """Integers for an engine's version names. Integer names are kept; other names are numbered in order of appearance.

    An integer above LARGEST_VERSION, such as 20261121120000, counts as another name, since exports store int32.
    `believed`: the versions that the trainer published, or that a server reported when asked. A version that only a
    reply names is not believed.
    """

    names: list[str] = field(default_factory=list)
    believed: set[int] = field(default_factory=lambda: {0})

    def believe(self, name: Any) -> int:
        """Return the integer of a published or reported version, and believe replies that name it from now on."""
        version = self.number(name)
        self.believed.add(version)
        return version

    def named(self, name: Any, current: int, newest: int | None) -> tuple[int, bool]:
        """The version that a reply names, and whether it is believed. If not, the version is `current` or an older one.

        `newest`: the newest version that the server has ever loaded. A newer version is not believed, even if another
        server has it.
        """
        text = str(name)
        if text in self.names:
            version = self.names.index(text)
        elif text.isdecimal() and len(text) < _MOST_DIGITS:
            version = int(text)
        else:
            version = 0 if text == _FIRST else current + 1
        if version in self.believed and (newest is None or version <= newest):
            return version, True
        return min(version, current), False

    def number(self, name: Any) -> int:
        """Return the integer of a version name, the same on every call."""
        text = str(name)
        if text.isdecimal() and len(text) < _MOST_DIGITS and int(text) <= LARGEST_VERSION:
            return int(text)
        if text not in self.names:
            self.names.append(text)
        return self.names.index(text)

    def spans(
        self, spans: Sequence[Mapping[str, Any]], total: int, sent: int, newest: int | None
    ) -> tuple[VersionRuns, int]:
        """The version runs of all `total` tokens of a reply, and the number of tokens with an unbelieved version.

        `spans`: as SGLang and vLLM report them: `version`, `start`, `end`. `sent`: the version when the request was
        sent. Raises EngineFailed if the spans overlap or leave gaps.
        """
        bounds = [(span["start"], min(span["end"], total), span["version"]) for span in spans]
        bounds = [(start, end, name) for start, end, name in bounds if end > start]
        if [start for start, _, _ in bounds] + [total] != [0] + [end for _, end, _ in bounds]:
            raise EngineFailed(f"the engine's spans of weight versions do not cover its {total} tokens exactly")
        runs, unsure, version = [], 0, sent
        for start, end, name in bounds:
            version, certain = self.named(name, version, newest)
            runs.append((end - start, version))
            unsure += 0 if certain else end - start
        return joined((), tuple(runs)), unsure


def version_chunks(
    runs: VersionRuns,
    ids: Ids,
    logprobs: Logprobs,
    tops: Sequence[tuple[tuple[int, float], ...]],
    finish: FinishReason | None,
    cached: int | None,
    correction: VersionRuns,
    unsure: int,
) -> list[TokenChunk]:
    """One chunk for each run. The first chunk has the corrections of earlier tokens; the last has the finish reason."""
    chunks, end = [], 0
    for count, number in runs:
        start, end = end, end + count
        chunks.append(
            TokenChunk(
                ids=ids[start:end],
                logprobs=logprobs[start:end],
                version=number,
                finish=finish if end == len(ids) else None,
                top_logprobs=tuple(tops[start:end]),
                cached_tokens=None if start else cached,
                corrected=() if start else correction,
                unsure=0 if start else unsure,
            )
        )
    return chunks
