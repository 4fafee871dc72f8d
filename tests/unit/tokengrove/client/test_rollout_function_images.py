"""TRL's rollout function with a dataset of pictures: the agent sends them, and its tokens stand in the prompt."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.serving import server
from proxy.settings import Settings
from tests.support import default_url
from tests.vision import image_file, png
from tokengrove.client import Client, Session
from tokengrove.client.adapters.openenv import trace_entries
from tokengrove.client.adapters.trl_rollout import RolloutFunction
from tokengrove.errors import InvalidRequest

Image = pytest.importorskip("PIL.Image")


def agent(prompt: list[dict[str, Any]], session: Session) -> None:
    body = {"model": "m", "messages": prompt, "max_tokens": 4}
    httpx.post(session.base_url + "/chat/completions", json=body).raise_for_status()
    session.set_reward(1.0)


def test_pictures_of_prompts_are_sent_and_group_prompts(vision_folder: Path, tmp_path: Path) -> None:
    settings = Settings(
        port=0, model=str(vision_folder), engine="scripted", database_url=default_url(tmp_path), log_level="warning"
    )
    shown = [Image.open(io.BytesIO(png(64, 48, seed))) for seed in (1, 1, 2)]
    parts = [[{"type": "image", "image": image}, {"type": "text", "text": "What?", "image": None}] for image in shown]
    with server.serving(settings) as url, Client(url) as client:
        fields = RolloutFunction(agent, url)([[{"role": "user", "content": each}] for each in parts], object())
        export = client.export(session_ids=fields["session_id"], images="bytes")
        with pytest.raises(InvalidRequest, match="TrainingTrace cannot hold"):
            trace_entries(client, fields["session_id"][0])
    samples = {sample.session_id: sample for sample in export.samples}
    found = [samples[name] for name in fields["session_id"]]
    assert found[0].group_id == found[1].group_id != found[2].group_id
    assert found[0].images == found[1].images != found[2].images
    assert [image.pillow().size for image in export.images.values()] == [(64, 48)] * 2
    for ids, sample in zip(fields["prompt_ids"], found, strict=True):
        [image] = sample.images
        assert image["start"] + image["length"] <= len(ids) and image["width"] == image_file(64, 48, 1).width
