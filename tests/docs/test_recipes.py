"""The agents and the loop of train.md are those of the examples, which tests run."""

from __future__ import annotations

from tests.docs.pages import ROOT, blocks_of


def test_the_page_shows_the_agents_and_the_loop_as_the_examples_have_them() -> None:
    shown = [block.text for block in blocks_of(ROOT / "docs" / "train.md") if block.language == "python"]
    assert (ROOT / "examples" / "my_agents.py").read_text() == shown[0]
    assert shown[1] in (ROOT / "examples" / "my_loop.py").read_text()
    assert "async def rollout(" in shown[1] and "grpo_loss(" in shown[1]
