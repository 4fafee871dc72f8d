"""The other kinds of models that the transformers engine shows images to: tiny ones, made of the folders of tests."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.contract import complete
from proxy.engine.tiny.vision import save_tiny_weights
from proxy.engine.transformers.engine import TransformersEngine
from proxy.settings import Settings
from tests.engines.seeing import check_blind_differs, check_exact, seen
from tests.vision import image_file

transformers = pytest.importorskip("transformers")
pytest.importorskip("torch")

pytestmark = pytest.mark.engines


def parts(folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Configuration of the text and the vision part, and the ids of tokens."""
    settings = transformers.AutoConfig.from_pretrained(folder).to_dict()
    text, vision = settings["text_config"], settings["vision_config"]
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "tie_word_embeddings")
    for part in (text, vision):
        part.pop("model_type")
    return text, vision, {name: settings[name] for name in names}


def qwen2_vl(folder: Path) -> Any:
    text, _, tokens = parts(folder)
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
    return transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **tokens)


def qwen3_vl_moe(folder: Path) -> Any:
    text, vision, tokens = parts(folder)
    text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": []}
    return transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision, **tokens)


@pytest.mark.parametrize(("like", "config"), [("qwen2_5_vl", qwen2_vl), ("qwen3_vl", qwen3_vl_moe)])
async def test_logprobs_are_those_of_a_plain_forward_pass(
    vision_folders: dict[str, Path], tmp_path: Path, like: str, config: Any
) -> None:
    shutil.copytree(vision_folders[like], tmp_path, dirs_exist_ok=True)
    save_tiny_weights(tmp_path, config(vision_folders[like]), seed=0)
    engine = TransformersEngine(Settings(model=str(tmp_path), engine_arg=("batch_tokens=8",)), tmp_path)
    await engine.start()
    assert engine.info().detail.endswith("sees images")
    prompt = seen(tmp_path, range(40, 60), image_file(100, 60, 1), range(60, 90), image_file(60, 200, 2), range(90, 99))
    reply = await complete(engine, prompt.request(12))
    check_exact(tmp_path, prompt, reply)
    check_blind_differs(tmp_path, prompt, reply)
    await engine.close()
