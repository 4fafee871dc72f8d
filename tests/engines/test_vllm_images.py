"""A real vLLM with tiny models that see. The tests are those of SGLang's servers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.engine.tiny.vision import VisionKind
from tests.engines.pictures import Prompts
from tests.engines.test_sglang_server_images import (
    test_a_placeholder_is_never_sampled,
    test_equal_texts_with_other_images_do_not_share_the_cache,
    test_images_stay_through_a_weight_update_and_are_seen_by_the_new_weights,
    test_it_runs_on_our_ids_and_sees_our_pixels,
)
from tests.engines.vllm_process import FULL, VARIABLE, VllmProcess, build_wide_vision_model

__all__ = [
    "test_a_placeholder_is_never_sampled",
    "test_equal_texts_with_other_images_do_not_share_the_cache",
    "test_images_stay_through_a_weight_update_and_are_seen_by_the_new_weights",
    "test_it_runs_on_our_ids_and_sees_our_pixels",
]
pytestmark = [
    pytest.mark.engines,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no Python with vLLM"),
]
_FLAGS = ("--logprobs-mode", "processed_logprobs", "--limit-mm-per-prompt", '{"image": 4, "video": 0}')


@pytest.fixture(scope="module", params=list(VisionKind))
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one kind with other weights."""
    made = [tmp_path_factory.mktemp(f"{request.param}-{seed}") for seed in range(2)]
    for seed, folder in enumerate(made):
        build_wide_vision_model(folder, request.param, seed)
    return made


@pytest.fixture(scope="module")
def server(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmProcess]:
    started = VllmProcess(folders[0], tmp_path_factory.mktemp("server") / "log", *_FLAGS, *FULL)
    started.wait_ready()
    yield started
    started.kill()


@pytest.fixture(scope="module")
def prompts(folders: list[Path]) -> Prompts:
    return Prompts(folders[0])


@pytest.fixture(scope="module")
def tolerance() -> float:
    """vLLM resizes images with torchvision: up to 0.006 was seen, and 3e-6 without resizing."""
    return 0.02
