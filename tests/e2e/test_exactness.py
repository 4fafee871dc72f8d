"""Exact logprobs on the real path: 20 turns with tools through the stock openai client, every logprob recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import OpenAI

from proxy.engine.create import model_folder
from proxy.serving.server import serving
from proxy.settings import Settings
from tests.support import function_tool
from tokengrove.client import Client

TOOLS: Any = [function_tool("lookup", {"key": {"type": "string", "maxLength": 8}})]
TURNS = 20


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("exactness")
    database, keeps = f"sqlite:///{folder / 'e.db'}", ("unmasked_logprobs=true",)
    with serving(Settings(port=0, database_url=database, engine_arg=keeps, log_level="warning")) as url:
        yield url


@pytest.mark.parametrize("stream", [False, True])
def test_every_exported_logprob_equals_the_models(url: str, stream: bool) -> None:
    client = Client(url)
    with (
        client.session("exact", sampling={"seed": 7}) as session,
        OpenAI(base_url=session.base_url, api_key="x") as agent,
    ):
        converse(agent, stream)
        session.set_reward(1.0)
    (sample,) = client.export(session_id=session.session_id, layout="concat").samples
    assert len(sample.turns) == TURNS
    spans = [turn["span"] for turn in sample.turns]
    expected = recomputed_logprobs(sample.input_ids)
    for index, (start, end) in enumerate(spans):
        if index % 3 == 2:
            assert not sample.loss_mask[start:end].any()  # sampled under a grammar: logprobs of another distribution
            continue
        assert sample.loss_mask[start:end].all()
        assert np.abs(expected[start:end] - sample.logprobs[start:end]).max() < 1e-3
    assert [turn["recomputable"] for turn in sample.turns] == [None, None, "grammar"] * (TURNS // 3) + [None] * (
        TURNS % 3
    )
    assert "unmasked_logprobs" not in sample.extra
    (every,) = client.export(session_id=session.session_id, train={"constrained": True}).samples
    trained = every.loss_mask == 1
    assert int(trained.sum()) == sum(end - start for start, end in spans)
    assert np.abs(expected - every.extra["unmasked_logprobs"])[trained].max() < 1e-3
    assert np.abs(expected - every.logprobs)[trained].max() > 1
    tree = client.session_tree(session.session_id)
    assert all(node.aligned for node in tree.interactions[1:])
    client.close()


def converse(agent: OpenAI, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "begin"}]
    for turn in range(TURNS):
        choice = "required" if turn % 3 == 2 else "none"
        message = one_turn(agent, messages, choice, stream)
        messages.append(message)
        for call in message.get("tool_calls") or []:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"result {turn}"})
        if not message.get("tool_calls"):
            messages.append({"role": "user", "content": f"turn {turn}"})


def one_turn(agent: OpenAI, messages: list[Any], choice: Any, stream: bool) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": "m",
        "messages": messages,
        "tools": TOOLS,
        "tool_choice": choice,
        "max_tokens": 96,
    }
    if not stream:
        reply = agent.chat.completions.create(**arguments)
        return reply.choices[0].message.model_dump(exclude_none=True)
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: list[Any] = []
    for chunk in agent.chat.completions.create(**arguments, stream=True):
        delta = chunk.choices[0].delta
        message["content"] += delta.content or ""
        for piece in delta.tool_calls or []:
            if piece.id:
                calls.append(
                    {"id": piece.id, "type": "function", "function": {"name": piece.function.name, "arguments": ""}}
                )
            calls[piece.index]["function"]["arguments"] += piece.function.arguments or ""
    return {**message, "tool_calls": calls} if calls else message


def recomputed_logprobs(input_ids: Any) -> Any:
    """Return log p(token | tokens before it) at temperature 1 by one plain forward pass; 0 for the first token."""
    import torch
    from transformers import AutoModelForCausalLM

    folder: Path = model_folder(Settings())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(np.asarray(input_ids), dtype=torch.long)[None]
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0].float(), -1)
    picked = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
    return np.concatenate([[0.0], picked])
