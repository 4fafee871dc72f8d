"""The scripted engine takes images, and `babble` says other things to other images."""

from __future__ import annotations

from pathlib import Path

from proxy.engine.contract import check_images_are_seen
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import babble
from tests.engines.seeing import seen
from tests.vision import image_file


async def test_contract_of_images(vision_folder: Path) -> None:
    prompt, other = (seen(vision_folder, range(40, 60), image_file(64, 64, seed), range(60, 90)) for seed in (1, 2))
    engine = ScriptedEngine(babble(8, 600, 1), vocab_size=644)
    await check_images_are_seen(engine, prompt.ids, prompt.images, other.images)
