"""Sampling of a turn by an external model."""

from __future__ import annotations

from proxy.images.image_pool import ReadImages
from proxy.turns.given_answer import GivenAnswer
from proxy.turns.turn import Turn
from proxy.upstream.client import UpstreamClient
from tokengrove.reasons import FinishReason


async def ask_upstream(
    client: UpstreamClient, answer: GivenAnswer, read_images: ReadImages, turn: Turn
) -> FinishReason:
    """Ask an external model, publish its answer as it comes, and note what it told of itself. Raises UpstreamFailed."""
    told = await client.answer(turn.request, turn.generate.sampling, turn.receive, read_images)
    answer.stop_string = told.stop_string
    answer.reasoning_tokens = told.usage.reasoning_tokens or 0
    counts = {name: count for name, count in told.usage._asdict().items() if count is not None}
    turn.interaction.external = {"model": told.model, **counts}
    return told.finish
