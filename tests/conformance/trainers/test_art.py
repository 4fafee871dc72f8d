"""ART's own packer joins what its adapter makes of samples: each trained token still sees its sample."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conformance.packages import package
from tests.samples import chain, sample
from tokengrove.client import Sample
from tokengrove.client.adapters import art

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
LENGTH = 64


def samples() -> list[Sample]:
    """Two groups: one with a shared prompt, a tool result and a fork; one with a prompt of its own."""
    how = {"group": "g", "advantages": [0.5]}
    return [
        chain([([1, 2, 3, 4], [5, 6]), ([8], [7])], rewards=[0.0, 1.0], session="a", **how),
        sample([1, 2, 3, 4], [5, 9], session="b", **how),
        sample([1, 2, 3, 4, 11], [12], session="c", **how),
        sample([20, 21], [22, 23, 24], session="d", group="h", advantages=[-1.0]),
    ]


@pytest.fixture
def transformers_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing ART replaces a function of transformers; the tests after these have the original."""
    masks = package("transformers.masking_utils")
    monkeypatch.setattr(masks, "_preprocess_mask_arguments", masks._preprocess_mask_arguments)


@pytest.mark.usefixtures("transformers_unchanged")
def test_arts_packer_keeps_what_each_trained_token_sees() -> None:
    pack, results = package("art.preprocessing.pack"), package("art.preprocessing.tokenize")
    packed = pack.packed_tensors_from_tokenized_results(
        art.tokenized_results(samples(), kind=results.TokenizedResult), LENGTH
    )
    (row,) = range(len(packed["tokens"]))
    tokens, groups, parents = (packed[name][row].numpy() for name in ("tokens", "group_ids", "parent_ids"))
    mask, positions = packed["assistant_mask"][row].numpy(), packed["input_pos"][row].numpy()
    assert int((tokens >= 0).sum()) == 3 + (5 + 3 + 3) + 1 + 4, "the prompt of the first group is there once"
    seen = []
    for at in np.flatnonzero(mask):
        # ART's rule: the same group, or that of the prompt.
        above = np.flatnonzero((groups[: at + 1] == groups[at]) | (groups[: at + 1] == parents[at]))
        assert positions[above].tolist() == list(range(len(above)))
        seen.append((tokens[above].tolist(), round(float(packed["logprobs"][row][at]), 4)))
    expected = [
        (each.input_ids[: at + 1].tolist(), round(float(each.logprobs[at]), 4))
        for each in samples()
        for at in np.flatnonzero(each.loss_mask)
    ]
    assert sorted(seen) == sorted(expected)
