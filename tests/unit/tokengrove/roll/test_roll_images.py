"""ROLL's VLTrajEnvManager on a vision model: what an environment shows is in the recorded turns and in the batch."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxy.serving import server
from proxy.settings import Settings
from tests.support import default_url, real_server
from tests.unit.tokengrove.roll.roll_queues import Queue
from tokengrove.client import Client
from tokengrove.roll import DataProto, RolloutCache, Section, VLTrajEnvManager

gem = pytest.importorskip("gem")
Image = pytest.importorskip("PIL.Image")
torch = pytest.importorskip("torch")

LENGTH = 700
SEED = DataProto(meta_info={"seed": 100})
GAME = "tests.unit.tokengrove.roll.roll_pictures:Pictures"
gem.register("roll-test:Pictures-v0", GAME)


@pytest.fixture(scope="module")
def client(vision_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    settings = Settings(
        port=0,
        model=str(vision_folder),
        engine="scripted",
        engine_arg=("tokens=4",),
        database_url=default_url(tmp_path_factory.mktemp("pictures")),
        log_level="warning",
    )
    with server.serving(settings) as url, Client(url) as client:
        yield client


class Remembering(VLTrajEnvManager):
    """Keeps the histories of its episodes."""

    def formulate_rollouts(self, rollout_cache: RolloutCache) -> DataProto:
        rollout = super().formulate_rollouts(rollout_cache)
        self.history, self.failed = rollout_cache.history, self.failure
        return rollout


def played(client: Client, env_type: str = "roll-test:Pictures-v0", **env: Any) -> tuple[Any, DataProto]:
    entry = {
        **{"env_type": env_type, "tag": "Look", "group_id": 3, "env_id": 7, "group_seed": 11},
        **{"max_steps": 5, "max_tokens_per_step": 8, "config": env, "agent_system_template": "You see."},
        **{"pre_step_template": "Turn {turn_idx}:", "next_step_template": "{actions_left} left."},
    }
    queue = Queue(1)
    manager = Remembering(
        worker_config=Section(generating_args={"max_new_tokens": 8}, llm_proxy={"proxy_type": None}),
        pipeline_config=Section(exp_name="exp", sequence_length=LENGTH, custom_envs={"Look": entry}),
        env_config=entry,
        processor=object(),
        generate_scheduler=client,
        output_queue=queue,
        extra_data_provider=None,
    )
    manager.run_rollout_loop(SEED)
    [rollout] = queue.rollouts
    return manager, rollout


def exported(client: Client, rollout: DataProto) -> Any:
    how: Any = {"layout": "concat", "multi_modal_inputs": True, "images": "bytes"}
    return client.export(session_id=rollout.meta_info["session_id"], **how)


def pixels(data: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def test_pictures_of_an_environment_are_turns_of_one_conversation(client: Client) -> None:
    manager, rollout = played(client)
    export = exported(client, rollout)
    [sample] = export.samples
    assert len(sample.interaction_ids) == 2 and len(sample.images) == 2
    count = len(sample.input_ids)
    assert rollout.batch["input_ids"][0, :count].tolist() == sample.input_ids.tolist()
    kept = [token for entry in manager.history for token in (*entry["prompt_ids"], *entry["response_ids"])]
    assert kept == sample.input_ids.tolist()
    shown = [pixels(export.images[image["digest"]].data) for image in sample.images]
    env = manager.env
    env.at = 0
    assert np.array_equal(shown[0], env.picture()) and not np.array_equal(shown[0], shown[1])


def test_the_batch_has_the_tensors_and_positions_of_the_pictures(client: Client) -> None:
    _, rollout = played(client)
    [sample] = exported(client, rollout).samples
    count = len(sample.input_ids)
    assert rollout.batch["position_ids"].shape == (1, 3, LENGTH)
    assert rollout.batch["position_ids"][0, :, :count].tolist() == sample.extra["mrope_position_ids"].tolist()
    [inputs] = rollout.non_tensor_batch["multi_modal_inputs"]
    assert torch.equal(inputs["pixel_values"], torch.as_tensor(sample.multi_modal_inputs["pixel_values"]))
    for image in sample.images:
        assert not rollout.batch["response_mask"][0, image["start"] : image["start"] + image["length"]].any()


SYSTEM = "<|im_start|>system\n{}<|im_end|>\n"


@pytest.mark.parametrize(
    ("form", "system", "pictures", "said"),
    [
        ("array", "You see.", 1, "Look at it. Turn 1:@5 left."),
        ("dict", "You see.", 2, "Look at it. Turn 1:Here: @ and @.5 left."),
        ("parts", "You see.", 1, "Look at it. Turn 1:@What is it?5 left."),
        ("messages", "Be brief.", 1, "Look at it. Turn 1:@What is it?5 left."),
        ("text", "You see.", 0, "Look at it. Turn 1:There is nothing to see.5 left."),
    ],
)
def test_every_form_of_an_observation_is_shown_as_roll_shows_it(
    client: Client, form: str, system: str, pictures: int, said: str
) -> None:
    manager, rollout = played(client, form=form, length=1)
    [sample] = exported(client, rollout).samples
    assert len(sample.images) == pictures
    text = client.detokenize(manager.history[0]["prompt_ids"])
    for image in reversed(sample.images):
        token = client.detokenize(sample.input_ids[image["start"] :][:1])
        text = text.replace(token * image["length"], "@", 1)
    user = said.replace("@", "<|vision_start|>@<|vision_end|>")
    assert SYSTEM.format(system) + f"<|im_start|>user\n{user}<|im_end|>" in text


def test_the_history_has_messages_that_are_json_and_the_pictures_beside_them(client: Client) -> None:
    manager, rollout = played(client, length=1)
    [entry] = manager.history
    assert entry["messages"][1]["content"][1] == {"type": "image"}
    [url] = entry["images"]
    assert pixels(base64.b64decode(url.partition(",")[2])).shape == (48, 64, 3)
    assert "base64" not in rollout.non_tensor_batch["messages"][0]
    assert len(entry["state_hash"]) == 64


@pytest.mark.parametrize(
    ("form", "reason"), [("missing", "its prompt places 0"), ("video", "observations with 'video' are not supported")]
)
def test_observations_that_cannot_be_shown_fail_the_episode_with_the_reason(
    client: Client, form: str, reason: str
) -> None:
    manager, rollout = played(client, form=form)
    assert reason in str(manager.failed)
    assert not rollout.batch["response_mask"].any()


@pytest.mark.parametrize("game", ["frozen_lake", "sokoban"])
def test_games_are_played_by_their_pictures(client: Client, game: str) -> None:
    config: dict[str, Any] = {"dim_room": [6, 6], "num_boxes": 1} if game == "sokoban" else {"is_slippery": False}
    _, rollout = played(client, env_type=game, render_mode="rgb_array", max_steps=2, **config)
    [sample] = exported(client, rollout).samples
    assert len(sample.images) == 2
    assert len(rollout.non_tensor_batch["multi_modal_inputs"][0]["image_grid_thw"]) == 2


def test_a_model_of_text_fails_the_episode_by_name(tmp_path: Path) -> None:
    with real_server(tmp_path) as url, Client(url) as client:
        manager, _ = played(client)
    assert "image" in str(manager.failed)
