"""AReaL's own trie of prefixes, packed from the samples of a sequence of layout forest, is the tree of the sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.conformance.packages import package
from tests.e2e.processes import server_process
from tokengrove.client import Client, Export
from tokengrove.client.forest import PackedSequence, attention_mask

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
RULES = "You are one of several agents that share a page of rules. " * 8
BLOCK = 128


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Export]:
    """Two groups of four sessions of three turns, the last two of which continue the first."""
    openai = package("openai")
    with (
        server_process(tmp_path_factory.mktemp("forest"), "--engine", "scripted") as process,
        Client(process.url) as client,
    ):
        for number in range(8):
            with client.session("t", session_id=f"s{number}", group_id=f"g{number // 4}") as session:
                agent = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
                begun: list[Any] = [{"role": "system", "content": RULES}, {"role": "user", "content": "Begin."}]
                begun.append(said(agent, begun))
                for text in ("Go on.", "Go elsewhere."):
                    said(agent, [*begun, {"role": "user", "content": text}])
                session.set_reward(float(number))
        yield client.export(layout="forest", max_tokens=4096)


def said(agent: Any, messages: list[Any]) -> Any:
    return agent.chat.completions.create(model="any", messages=messages, max_tokens=8).choices[0].message


def test_areals_trie_has_the_tokens_and_the_mask_of_the_sequence(exported: Export) -> None:
    torch, areal = package("torch"), package("areal.models.tree_attn.tree")
    (sequence,) = exported.sequences
    assert len(sequence.rows) == 16 and len(sequence) < sequence.row_tokens / 3
    samples = sequence.samples()
    width = max(len(sample.input_ids) for sample in samples)
    rows = [np.pad(sample.input_ids, (0, width - len(sample.input_ids))) for sample in samples]
    masks = [np.arange(width) < len(sample.input_ids) for sample in samples]
    data = {"input_ids": torch.tensor(np.stack(rows)), "attention_mask": torch.tensor(np.stack(masks))}
    (trie,), (tokens,) = areal._greedy_build_tries(data, 4096)
    # It merges whatever is equal, also equal answers, and the groups, which share their rules.
    assert tokens == len(whole(sequence))
    padded = -(-tokens // BLOCK) * BLOCK
    mask = areal.build_attention_mask_from_trie(trie, padded, torch.device("cpu")).numpy()[:tokens, :tokens]
    assert sorted(mask.sum(1).tolist()) == sorted(len(path) for path in whole(sequence))
    own = attention_mask(sequence)
    assert sorted(own.sum(1).tolist()) == sorted((sequence.position_ids + 1).tolist())


def whole(sequence: PackedSequence) -> set[tuple[int, ...]]:
    """The prefixes of all samples, by ids alone."""
    found = (sample.input_ids.tolist() for sample in sequence.samples())
    return {tuple(ids[: at + 1]) for ids in found for at in range(len(ids))}
