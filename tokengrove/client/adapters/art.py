"""Samples as the fields of ART's `TokenizedResult`, which its packer joins to sequences with shared prompts.

Names and rules are those of `art/preprocessing/tokenize.py` and `pack.py` (openpipe-art 0.5.18), in which the results
of a group share one prompt. ART's later packer, which builds a tree of prefixes (pull request 586), takes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from tokengrove.client.adapters import vision
from tokengrove.client.adapters.parts import group_of
from tokengrove.client.values import Sample
from tokengrove.errors import InvalidRequest


def tokenized_results(samples: Sequence[Sample], *, kind: type[Any] | None = None) -> list[Any]:
    """Return the fields of one `TokenizedResult` per sample, or with `kind`, ART's class, the results themselves.

    `token_ids`, `input_pos`, `assistant_mask` (1 on trained tokens) and `logprobs` (NaN on others), lists of L;
    `advantage`; `weight`, 1 / trained tokens of the session; `prompt_id`, one number for each group, and
    `prompt_length`: the tokens that all samples of the group begin with, less the last one before the first trained
    token, whose logits each result needs. `pixel_values` and `image_grid_thw`, tensors, for samples with images.
    Samples without trained tokens are left out. Raises InvalidRequest for samples without advantages, and for a sample
    with images that was exported without `multi_modal_inputs`.
    """
    trained = [sample for sample in samples if sample.loss_mask.any()]
    groups: dict[str, list[Sample]] = {}
    for sample in trained:
        groups.setdefault(group_of(sample), []).append(sample)
    prompts = {group: _shared(members) for group, members in groups.items()}
    ids = dict(zip(groups, range(1, len(groups) + 1), strict=True))
    tokens: dict[str, int] = {}
    for sample in trained:
        tokens[sample.session_id] = tokens.get(sample.session_id, 0) + int(sample.loss_mask.sum())
    found = [
        {
            **_fields(sample),
            "weight": 1 / tokens[sample.session_id],
            "prompt_id": ids[group_of(sample)],
            "prompt_length": prompts[group_of(sample)],
        }
        for sample in trained
    ]
    return found if kind is None else [kind(**fields) for fields in found]


def _shared(samples: Sequence[Sample]) -> int:
    """The length of the prompt that the results of a group share."""
    columns = zip(*(sample.input_ids.tolist() for sample in samples), strict=False)
    common = sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, columns))
    first = min(int(np.flatnonzero(sample.loss_mask)[0]) for sample in samples)
    return max(min(common, first) - 1, 0)


def _fields(sample: Sample) -> dict[str, Any]:
    if sample.advantage is None:
        raise InvalidRequest(f"sample {sample.interaction_id!r} has no advantage: export with 'advantages'")
    images = vision.tensors(sample) if vision.has_vision([sample]) else {}
    logprobs = np.where(sample.loss_mask > 0, sample.logprobs, np.float32("nan"))
    return {
        "advantage": sample.advantage,
        "chat": "",
        "token_ids": sample.input_ids.tolist(),
        "input_pos": list(range(len(sample.input_ids))),
        "assistant_mask": sample.loss_mask.tolist(),
        "logprobs": logprobs.tolist(),
        "pixel_values": images.get("pixel_values"),
        "image_grid_thw": images.get("image_grid_thw"),
        "trajectory": None,
        "choice_offsets": [int(turn["span"][0]) for turn in sample.turns if turn.get("span") is not None],
        "extra_logprobs": {},
        "_tokenizer": None,
    }
