"""The answers that have samples: exports, and claims of sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from tokengrove.client.forest import PackedSequence
from tokengrove.client.images import ImageBytes
from tokengrove.client.tensors import to_tensordict, to_torch
from tokengrove.client.values import Json, Sample, batch_of, by_id
from tokengrove.errors import InvalidRequest

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict


@dataclass(frozen=True, slots=True)
class Export:
    """All pages of an export. `sessions`: an entry per session id, which also lists the missing parts of the session.

    `left_out`: the number of matching sessions that were left out, by reason: `validation`. `images`: images by digest,
    with `images="bytes"` or `multi_modal_inputs`. In layout forest, `sequences` replace the samples, and `forest` has
    counts: `sequences`, `rows`, `row_tokens`, `tokens`, `merged_tokens`, `repeated_tokens`, `unmerged_tokens`.
    """

    samples: list[Sample]
    sessions: dict[str, dict[str, Json]]
    left_out: Mapping[str, int] = field(default_factory=dict)
    images: dict[str, ImageBytes] = field(default_factory=dict, repr=False)
    sequences: list[PackedSequence] = field(default_factory=list)
    forest: dict[str, Json] = field(default_factory=dict)

    def extend(self, page: Export) -> None:
        """Append another page."""
        self.samples.extend(page.samples)
        self.sessions.update(page.sessions)
        self.images.update(page.images)
        self.sequences.extend(page.sequences)
        for name, value in page.forest.items():
            counts = self.forest.setdefault(name, {} if isinstance(value, Mapping) else 0)
            if isinstance(value, Mapping):
                counts |= {reason: counts.get(reason, 0) + count for reason, count in value.items()}
            else:
                self.forest[name] = counts + value

    def image(self, digest: str) -> ImageBytes:
        """Return an image of the samples. Raises InvalidRequest if the export was made without `images="bytes"`."""
        if (found := self.images.get(digest)) is None or not found.data:
            raise InvalidRequest(
                f'the image {digest} is not in this export: export with images="bytes", or read it with Client.image',
                param="images",
            )
        return found

    @property
    def untrained_tokens(self) -> dict[str, int]:
        """The number of sampled tokens of all sessions that no sample trains, by reason."""
        counts: Counter[str] = Counter()
        for entry in self.sessions.values():
            counts.update(entry.get("untrained_tokens", {}))
        return dict(counts)

    @property
    def warnings(self) -> list[str]:
        """Likely mistakes in the sampling or the export of the sessions."""
        told = [(name, text) for name, entry in self.sessions.items() for text in entry.get("warnings", ())]
        return [f"session {name}: {text}" for name, text in told]

    def to_tensor_dict(self, pad_token_id: int = 0) -> dict[str, NDArray[Any]]:
        """Return all samples as one numpy batch, padded on the right to the longest: [B, L], rewards [B]. Raises
        InvalidRequest for an export of layout forest."""
        if self.sequences:
            message = "an export of layout forest has sequences: take their samples(), or export with layout='concat'"
            raise InvalidRequest(message, param="layout")
        return batch_of(self.samples, pad_token_id)

    def to_torch(self, pad_token_id: int = 0) -> dict[str, torch.Tensor]:
        """`to_tensor_dict` in torch, of the same dtypes."""
        return to_torch(self.to_tensor_dict(pad_token_id))

    def to_tensordict(self, pad_token_id: int = 0) -> TensorDict:
        """`to_tensor_dict` as a `tensordict.TensorDict` of batch size B."""
        return to_tensordict(self.to_tensor_dict(pad_token_id))


@dataclass(frozen=True, slots=True)
class Claim:
    """Ended sessions leased to this consumer until `lease_until` (Unix seconds).

    `sessions` has an entry per session id, in the order in which they ended: as in `Export` if the claim requested
    samples, else as in `Client.sessions`. `claim_id` is None if there was nothing to claim, so nothing is leased.
    `export` has the samples of the sessions if the claim requested them.
    """

    claim_id: str | None
    sessions: Mapping[str, dict[str, Json]]
    lease_until: float | None
    export: Export | None = None


def claim_of(answer: Mapping[str, Json], export: Export | None = None) -> Claim:
    """Parse the answer to a claim."""
    sessions = by_id(answer["sessions"]) if export is None else export.sessions
    return Claim(answer["claim_id"], sessions, answer["lease_until"], export)
