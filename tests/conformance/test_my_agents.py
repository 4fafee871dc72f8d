"""The agents of examples/my_agents.py answer through the server, and each answer is a sample that trains its tokens."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.conformance.packages import package
from tests.conformance.served import Served, assert_one_chain

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("served", ["0"], ids=["plain"], indirect=True)  # two tokens are too few for a thought
@pytest.mark.parametrize(
    ("name", "needed"), [("plain", "openai"), ("openai_agents", "agents"), ("langgraph", "langchain")]
)
async def test_an_agent_of_the_examples_answers_in_one_sample(
    served: Served, monkeypatch: pytest.MonkeyPatch, name: str, needed: str
) -> None:
    package(needed)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    agent = getattr(importlib.import_module("my_agents"), name)
    session = f"mine-{name}"
    answer = await agent(served.openai(session), "any", "Say a vowel.")
    assert isinstance(answer, str)
    assert_one_chain(served, session, turns=1)
    assert served.tree(session)[0]["output_tokens"] == 2
