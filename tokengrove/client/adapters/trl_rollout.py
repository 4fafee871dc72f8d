"""TRL's `GRPOTrainer.rollout_func`: an agent plays each prompt as one session, which gives one completion.

A completion begins with the first sampled token and contains everything after it. `env_mask` is 1 on the trained
tokens, so tool results and user turns are in the completion with mask 0.

TRL has no field for routed experts or kept sets (1.16.0). `training_batch` has both on request, for a trainer whose
forward pass takes them.

GRPOTrainer supports images only in the prompt, from its dataset. To train samples with images in tool results, use
`training_batch` in a trainer whose `_generate_and_score_completions` returns it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tokengrove.client.adapters import parts, replay, vision
from tokengrove.client.adapters.parts import Annotation, as_json, prompt_length, score_of, teacher_logprobs
from tokengrove.client.blocking_client import Client, Session
from tokengrove.client.image_urls import ImageUrls
from tokengrove.client.libraries import library
from tokengrove.client.tensors import Array, pad_left, pad_right
from tokengrove.client.values import Json, Sample
from tokengrove.errors import InvalidRequest

if TYPE_CHECKING:
    import torch

Replayed = Literal["experts", "kept"]
"""The replay columns that `training_batch` can have."""
Agent = Callable[[Json, Session], None]
"""Plays one prompt at `session.base_url` with `session.api_key`, and sets the session's reward.

The prompt is text or messages, as in the dataset, with images as `image_url` parts with data URLs, as in a chat
completion.
"""


def completions(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """One row per sample, in the fields of TRL's rollout functions. C is the length of a completion.

    `prompt_ids`; `completion_ids` and `env_mask` (int) [C], `logprobs` (float, 0 outside the mask) [C]; and for reward
    functions `session_reward` (the score of the session), `session_id`, `interaction_id`, `weight`, `advantage`. Images
    of the prompt are in `prompt_ids` as their tokens; the trainer takes the images themselves from its dataset. Raises
    InvalidRequest for a sample in which nothing was sampled, and for a sample with images after its prompt.
    """
    for sample in samples:
        _check_images(sample)
    rows = [_row(sample, score_of(sample)) for sample in samples]
    return {name: [row[name] for row in rows] for name in _FIELDS}


_FIELDS = (
    *("prompt_ids", "completion_ids", "logprobs", "env_mask"),
    *("session_reward", "session_id", "interaction_id", "weight", "advantage"),
)


def _check_images(sample: Sample) -> None:
    """Refuse images after the prompt: GRPOTrainer takes images from its dataset only, so they would be missing."""
    if any(image["start"] >= prompt_length(sample) for image in sample.images):
        raise InvalidRequest(
            f"sample {sample.interaction_id!r} has images after its prompt, which a rollout function cannot give to "
            "GRPOTrainer; return training_batch of the samples from its _generate_and_score_completions",
            param="samples",
        )


def training_batch(
    samples: Sequence[Sample],
    *,
    advantages: Sequence[float] | None = None,
    pad_token_id: int = 0,
    replayed: Iterable[Replayed] = (),
    vocab_size: int | None = None,
    max_support: int = 1024,
    teacher: str | None = None,
) -> dict[str, Any]:
    """The batch that `GRPOTrainer._generate_and_score_completions` returns, for samples with or without images.

    `prompt_ids`, `prompt_mask` int64 [B, P], padded on the left; `completion_ids`, `completion_mask`, `tool_mask` int64
    [B, C], on the right; `sampling_per_token_logps` and `old_per_token_logps` float32 [B, C]; `advantages` float32 [B],
    by default those of the export; `num_items_in_batch`, the number of trained tokens. With images, also `pixel_values`
    and `image_grid_thw` of all rows, `num_images` (a list of B) and `mm_token_type_ids` int64 [B, P + C]. Raises
    InvalidRequest without torch, without advantages, for a sample in which nothing was sampled, and for a sample with
    images that was exported without `multi_modal_inputs`.

    `replayed` adds columns that TRL does not know, for a trainer that overrides the forward pass. `experts`:
    `routed_experts` int16 or int32 [B, P + C, layers, k], -1 in the padding and in missing rows, which such a trainer
    routes itself. `kept`: `kept_ids` int32 [B, C, K], the kept set of each token of the completion, the sampled token
    first, -1 after the last id; the logprobs are then those within the sets. Raises InvalidRequest if the samples have
    no such column, for a trained token without a set, for a set of more than `max_support` ids, and without
    `vocab_size`, the number of logits, for a set stored as the ids that it does not have.

    `teacher`: the name of a teacher of the export; `ref_per_token_logps` float32 [B, C], which TRL's reference model
    else computes with `beta`, has its logprobs, 0 for tokens that are not trained. Raises InvalidRequest if a trained
    token has none.
    """
    torch, has_images = library("torch"), vision.has_vision(samples)
    wanted = frozenset(replayed)
    arrays = _padded(samples, pad_token_id, is_kept="kept" in wanted)
    if "experts" in wanted:
        arrays["routed_experts"] = _experts(samples, arrays["prompt_ids"].shape[1], arrays["completion_ids"].shape[1])
    if teacher is not None:
        scores = [teacher_logprobs(sample, teacher)[prompt_length(sample) :] for sample in samples]
        arrays["ref_per_token_logps"] = pad_right(scores, np.float32, 0.0)
    if "kept" in wanted:
        arrays["kept_ids"] = _kept(samples, arrays["completion_ids"].shape[1], vocab_size, max_support)
    arrays["advantages"] = np.array(_advantages(samples) if advantages is None else advantages, np.float32)
    batch: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    batch["old_per_token_logps"] = batch["sampling_per_token_logps"]
    batch["num_items_in_batch"] = batch["tool_mask"].sum()
    return {**batch, **_media(samples, arrays["prompt_ids"].shape[1], torch)} if has_images else batch


def annotation(samples: Sequence[Sample], batch: Mapping[str, Any]) -> Annotation:
    """Arguments of `client.annotate` from a batch with one row per sample in their order, as `training_batch` makes it.

    Streams from [B, C]: `logprobs` (`per_token_logps`, else `old_per_token_logps` unless these are the sampler's own),
    `ref_logprobs` (`ref_per_token_logps`), `importance_weight` (`importance_sampling_ratio`), `entropy` (`entropies`).
    Raises InvalidRequest without any of these.
    """
    found = dict(batch)
    old = found.pop("old_per_token_logps", None)
    if old is not None and old is not batch.get("sampling_per_token_logps"):
        found.setdefault("per_token_logps", old)
    names = {
        "per_token_logps": "logprobs",
        "ref_per_token_logps": "ref_logprobs",
        "importance_sampling_ratio": "importance_weight",
        "entropies": "entropy",
    }
    return parts.annotation(samples, found, names, "response")


def _experts(samples: Sequence[Sample], prompt: int, completion: int) -> Array:
    found = [replay.recorded_experts(sample) for sample in samples]
    if not found or any(each is None for each in found):
        raise InvalidRequest(
            "the samples have no routed experts: record them with replay=['experts']", param="replayed"
        )
    rows = [each for each in found if each is not None]
    dtype = max((np.int16 if each.dtype == np.uint8 else np.int32 for each in rows), key=lambda one: one().itemsize)
    batch = np.full((len(rows), prompt + completion, *rows[0].shape[1:]), -1, dtype)
    for line, of, sample in zip(batch, rows, samples, strict=True):
        start = prompt - prompt_length(sample)
        present = ~replay.missing_rows(of)
        line[start : start + len(of)][present] = of[present]
    return batch


def _kept(samples: Sequence[Sample], completion: int, vocab_size: int | None, max_support: int) -> Array:
    rows = []
    for sample in samples:
        start, sets = prompt_length(sample), replay.trained_sets(sample)
        assert sets is not None  # refused otherwise
        rows.append(replay.bounded_sets(sets[start:], sample.input_ids[start:], vocab_size, max_support))
    batch = np.full((len(rows), completion, max((each.shape[1] for each in rows), default=0)), -1, np.int32)
    for line, of in zip(batch, rows, strict=True):
        line[: of.shape[0], : of.shape[1]] = of
    return batch


def _padded(samples: Sequence[Sample], pad_token_id: int, *, is_kept: bool) -> dict[str, Array]:
    starts = [prompt_length(sample) for sample in samples]
    prompts = [sample.input_ids[:start] for sample, start in zip(samples, starts, strict=True)]
    completions = [sample.input_ids[start:] for sample, start in zip(samples, starts, strict=True)]
    of_samples = [replay.sampled_logprobs(sample) if is_kept else sample.logprobs for sample in samples]
    logprobs = [values[start:] for values, start in zip(of_samples, starts, strict=True)]
    masks = [sample.loss_mask[start:] for sample, start in zip(samples, starts, strict=True)]
    return {
        "prompt_ids": pad_left(prompts, np.int64, pad_token_id),
        "prompt_mask": pad_left([np.ones_like(row) for row in prompts], np.int64, 0),
        "completion_ids": pad_right(completions, np.int64, pad_token_id),
        "completion_mask": pad_right([np.ones_like(row) for row in completions], np.int64, 0),
        "tool_mask": pad_right(masks, np.int64, 0),
        "sampling_per_token_logps": pad_right(logprobs, np.float32, 0.0),
    }


def _media(samples: Sequence[Sample], width: int, torch: Any) -> dict[str, torch.Tensor | list[int]]:
    """The entries of images in the batch. `width`: the padded length of the prompts (P)."""
    starts = [prompt_length(sample) for sample in samples]
    types = [vision.token_types(sample) for sample in samples]
    before = pad_left([row[:start] for row, start in zip(types, starts, strict=True)], np.int64, 0, width)
    after = pad_right([row[start:] for row, start in zip(types, starts, strict=True)], np.int64, 0)
    counts = [len(sample.images) for sample in samples]
    both = torch.from_numpy(np.concatenate([before, after], axis=1))
    return {**vision.packed(samples), "mm_token_type_ids": both, "num_images": counts}


def _advantages(samples: Sequence[Sample]) -> list[float]:
    found = [sample.advantage for sample in samples]
    if None in found:
        raise InvalidRequest("give 'advantages', or export with advantages='grpo'", param="advantages")
    return [float(each or 0.0) for each in found]


def _row(sample: Sample, score: float) -> dict[str, Any]:
    start = prompt_length(sample)
    ids = sample.input_ids.tolist()
    values = (ids[:start], ids[start:], sample.logprobs[start:].tolist(), sample.loss_mask[start:].tolist())
    about = (score, sample.session_id, sample.interaction_id, sample.weight, sample.advantage)
    return dict(zip(_FIELDS, (*values, *about), strict=True))


def session_reward(*, session_reward: list[float], **_: Any) -> list[float]:
    """A reward function for GRPOTrainer that returns the scores of the agents' sessions."""
    return session_reward


@dataclass(frozen=True)
class RolloutFunction:
    """A function for `GRPOTrainer(rollout_func=...)`; pass `session_reward` as `reward_funcs`.

    It starts one session for each prompt, runs `agent` in threads for at most `at_once` sessions at a time, and exports
    the sessions. TRL repeats a prompt for each of its generations. Sessions of equal prompts of one call have the same
    group. A session that forked gives its sample with the most trained tokens; its other samples are not trained. An
    exception of an agent ends the call. The server must serve the trainer's weights: push them with
    `Client.update_weights` after each step.
    """

    agent: Agent
    url: str
    admin_key: str | None = None
    task_id: str = "trl"
    at_once: int = 16

    def __call__(self, prompts: Sequence[Json], trainer: object) -> dict[str, list[Any]]:
        """Return the fields of `completions`, one row per prompt. Raises InvalidRequest if a prompt has no sample."""
        urls = ImageUrls()
        prompts = [prompt if isinstance(prompt, str) else urls.messages(prompt) for prompt in prompts]
        groups, run = [as_json(prompt) for prompt in prompts], uuid.uuid4().hex
        first = {group: groups.index(group) for group in groups}
        with Client(self.url, self.admin_key) as client:

            def play(place: int) -> str:
                group = f"{self.task_id}-{run}-{first[groups[place]]}"
                with client.session(self.task_id, group_id=group) as session:
                    self.agent(prompts[place], session)
                return session.session_id

            with ThreadPoolExecutor(self.at_once) as threads:
                sessions = list(threads.map(play, range(len(prompts))))
            samples = client.export(session_ids=sessions, layout="concat").samples if sessions else []
        chosen = _most_trained(samples)
        missing = [name for name in sessions if name not in chosen]
        if missing:
            raise InvalidRequest(f"session {missing[0]!r} has no sampled token, so it gives no completion")
        return completions([chosen[name] for name in sessions])


def _most_trained(samples: Sequence[Sample]) -> Mapping[str, Sample]:
    """The sample with the most trained tokens of each session, by session id; of equal samples, the first."""
    chosen: dict[str, Sample] = {}
    for sample in samples:
        before = chosen.get(sample.session_id)
        if before is None or sample.loss_mask.sum() > before.loss_mask.sum():
            chosen[sample.session_id] = sample
    return chosen
