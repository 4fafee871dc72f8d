"""Logprobs that a trainer computes again, from what each adapter gives it, are those of the engine: with the images.

Without them they are others, so a batch that lost its images would be seen here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from proxy.serving import server
from proxy.settings import Settings
from tests.recomputed import MOST, difference, logprobs, model_of
from tests.support import default_url
from tests.vision import KINDS, image_url, png, text_part
from tokengrove.client import Client, Export
from tokengrove.client.adapters import areal, roll, trl_rollout, verl
from tokengrove.client.forest import model_inputs, token_logprobs
from tokengrove.client.values import MROPE

torch = pytest.importorskip("torch")
pytest.importorskip("PIL")

GREATER = 0.01
"""What a lost image changes at least in some logprob."""


@pytest.fixture(scope="module", params=KINDS)
def exports(
    request: pytest.FixtureRequest, vision_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Export, Export]]:
    """A session of three turns with pictures in the first and the last, and one without; with advantages.

    The second export is of layout forest, and has a session with the same pictures too.
    """
    folder = vision_folders[request.param]
    url = default_url(tmp_path_factory.mktemp("seeing"))
    settings = Settings(port=0, model=str(folder), engine="transformers", database_url=url, log_level="warning")
    with server.serving(settings) as address, Client(address) as client:
        pictures = [[image_url(png(64, 48, 1)), text_part("What is it?")], "And?", [image_url(png(90, 120, 2))]]
        for name, told in (("seen", pictures), ("blind", ["Hi", "And?"]), ("again", pictures)):
            with client.session("t", session_id=name, group_id="g") as session:
                talk(session, told)
                session.set_reward(float(name == "seen"))
        how: Any = {"layout": "concat", "multi_modal_inputs": True, "images": "bytes", "advantages": "grpo"}
        forest = client.export(session_ids=["seen", "blind", "again"], **{**how, "layout": "forest"})
        yield folder, client.export(session_ids=["seen", "blind"], **how), forest


@pytest.fixture(scope="module")
def exported(exports: tuple[Path, Export, Export]) -> tuple[Path, Export]:
    return exports[:2]


def talk(session: Any, contents: list[Any]) -> None:
    messages: list[dict[str, Any]] = []
    for content in contents:
        messages.append({"role": "user", "content": content})
        body = {"model": "m", "messages": messages, "max_tokens": 6, "temperature": 1.0, "seed": 3}
        answer = httpx.post(f"{session.base_url}/chat/completions", json=body, headers=key(session), timeout=60)
        assert answer.status_code == 200, answer.text
        messages.append(answer.json()["choices"][0]["message"])


def key(session: Any) -> dict[str, str]:
    return {"authorization": f"Bearer {session.api_key}"}


def check(folder: Path, expected: Any, mask: Any, images: dict[str, Any], **inputs: Any) -> None:
    """The logprobs match with the images, and do not without."""
    assert difference(logprobs(folder, **inputs, **images), expected, mask) < MOST
    seen = np.asarray(mask)[:1]
    alone = {name: value[:, :1] if name == "position_ids" else value[:1] for name, value in inputs.items()}
    alone.pop("mm_token_type_ids", None)  # the model makes positions of them and of the images
    assert difference(logprobs(folder, **alone), np.asarray(expected)[:1], seen) > GREATER


def packed(rows: Any) -> dict[str, Any]:
    """The images of all rows, as verl's and ROLL's actors pack them."""
    names = ("pixel_values", "image_grid_thw")
    return {name: torch.cat([row[name] for row in rows if name in row]) for name in names}


def test_verl(exported: tuple[Path, Export]) -> None:
    folder, export = exported
    made = verl.padded(export.samples, images=export.images, prompt_length=128, response_length=160)
    batch, prompts = made.batch, made.batch["prompts"].shape[1]
    check(
        folder,
        np.pad(batch["rollout_log_probs"], ((0, 0), (prompts, 0))),
        np.pad(batch["response_mask"], ((0, 0), (prompts, 0))),
        packed(made.non_tensor_batch["multi_modal_inputs"]),
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        position_ids=batch["position_ids"].transpose(1, 0, 2),
    )
    sizes = [image.size for image in made.non_tensor_batch["multi_modal_data"][0]["image"]]
    assert sizes == [(64, 48), (90, 120)]


def test_roll(exported: tuple[Path, Export]) -> None:
    folder, export = exported
    made = roll.trajectories(export.samples, sessions=export.sessions, sequence_length=256)
    batch = made.batch
    check(
        folder,
        np.pad(batch["infer_logprobs"], ((0, 0), (1, 0))),
        batch["response_mask"],
        packed(made.non_tensor_batch["multi_modal_inputs"]),
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        position_ids=batch["position_ids"].transpose(1, 0, 2),
    )


def test_areal(exported: tuple[Path, Export]) -> None:
    folder, export = exported
    for name, entry in areal.interactions(export.samples, torch=True).items():
        row = entry["tensor_dict"]
        [images] = row["multi_modal_input"]
        inputs = {each: row[each] for each in ("input_ids", "attention_mask", "mm_token_type_ids")}
        assert difference(logprobs(folder, **inputs, **images), row["logprobs"], row["loss_mask"]) < MOST, name
        if images:
            del inputs["mm_token_type_ids"]
            assert difference(logprobs(folder, **inputs), row["logprobs"], row["loss_mask"]) > GREATER


def test_trl(exported: tuple[Path, Export]) -> None:
    folder, export = exported
    batch = trl_rollout.training_batch(export.samples)
    prompts = batch["prompt_ids"].shape[1]
    check(
        folder,
        torch.nn.functional.pad(batch["sampling_per_token_logps"], (prompts, 0)),
        torch.nn.functional.pad(batch["completion_mask"] * batch["tool_mask"], (prompts, 0)),
        {name: batch[name] for name in ("pixel_values", "image_grid_thw")},
        input_ids=torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
        attention_mask=torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1),
        mm_token_type_ids=batch["mm_token_type_ids"],
    )
    assert batch["num_images"] == [2, 0] and batch["advantages"].tolist() != [0.0, 0.0]


def test_packed_sequences(exports: tuple[Path, Export, Export]) -> None:
    folder, _, forest = exports
    assert sum(len(each.images) for each in forest.sequences) == 3, "both sessions share the first picture"
    for sequence in forest.sequences:
        inputs: dict[str, Any] = model_inputs(sequence)
        if MROPE in sequence.extra:
            inputs["position_ids"] = torch.tensor(sequence.extra[MROPE])[:, None]
        inputs |= {name: torch.tensor(values) for name, values in (sequence.multi_modal_inputs or {}).items()}
        with torch.no_grad():
            found = token_logprobs(model_of(folder)(**inputs).logits[0], sequence).numpy()
        assert difference(found, sequence.logprobs, sequence.loss_mask) < MOST
