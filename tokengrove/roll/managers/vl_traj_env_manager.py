"""The direct loop with environments whose observations are images: ROLL's `VLTrajEnvManager`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from tokengrove.client.image_urls import ImageUrls
from tokengrove.errors import InvalidRequest, UnsupportedParameter
from tokengrove.roll.managers.rollout_cache import RolloutCache
from tokengrove.roll.managers.token_batch import lm_input_of, token_ids_of
from tokengrove.roll.managers.traj_env_manager import TrajEnvManager
from tokengrove.roll.values import DataProto, compute_object_hash, rendered

Part = dict[str, Any]
_TOKEN = "<|vision_start|><|image_pad|><|vision_end|>"
"""The text by which ROLL's environments may place an image, in addition to their `image_placeholder`."""


class VLTrajEnvManager(TrajEnvManager):
    """`TrajEnvManager` for observations with images and a vision model; the server rejects images for other models.

    The arguments are ROLL's. `processor` follows `tokenizer` and has no effect, since the server's own processor
    determines the tokens of an image. An observation is a text, an array uint8 [height, width, 3], or a mapping with
    `prompt` (a text, parts of a message, or messages) and `image` (one or several, in the order of the prompt). The
    prompt places images by parts of type `image`, or by the environment's `image_placeholder`.

    Instead of `agent_template` the custom environment has `pre_step_template`, before an observation (field:
    `turn_idx`), and `next_step_template`, after it (`actions_left`, `max_response_length`). The history's `messages`
    have parts `{"type": "image"}`, and its `images` are the URLs of their pictures. The batch has `multi_modal_inputs`
    and `position_ids` [B, 3, L], in the format of `tokengrove.client.adapters.roll`.
    """

    def __init__(
        self,
        worker_config: Any,
        pipeline_config: Any,
        env_config: Any,
        tokenizer: Any = None,
        processor: Any = None,
        generate_scheduler: Any = None,
        output_queue: Any = None,
        thread_lock: AbstractContextManager[Any] | None = None,
        mode: str = "train",
        extra_data_provider: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.processor, self.extra_data_provider = processor, extra_data_provider
        self._urls = ImageUrls()
        super().__init__(
            *(worker_config, pipeline_config, env_config, tokenizer, generate_scheduler, output_queue, thread_lock),
            *(mode, *args),
            **kwargs,
        )
        self.pre_step_template = self._step_template("pre_step_template")
        self.next_step_template = self._step_template("next_step_template")

    def format_messages(self, history: RolloutCache) -> DataProto:
        """Like `TrajEnvManager.format_messages`; `non_tensor_batch["multi_modal_data"]` has the images so far."""
        prompt = super().format_messages(history)
        images = [url for entry in history.history for url in entry.get("images", ())]
        return lm_input_of(token_ids_of(prompt.batch["input_ids"], "input_ids"), images)

    def _step_template(self, name: str) -> str:
        template = self.cfg_template.get(name)
        if template is None:
            raise InvalidRequest(
                f"custom_envs.{self.env_config['tag']}.{name} is missing: it is shown beside observations", param=name
            )
        return str(template)

    def _observed(self, observation: Any) -> Any:
        return observation

    def _sent(self, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
        return self._urls.messages(entry["messages"], entry.get("images", ()))

    def _state_hash(self, entry: Mapping[str, Any]) -> str:
        digests = [hashlib.sha256(url.encode()).hexdigest() for url in entry.get("images", ())]
        return compute_object_hash([entry["messages"][-1]["content"], digests])

    def _messages_of(self, rollout_cache: RolloutCache) -> list[dict[str, Any]]:
        """The messages of this step. Sets the entry's `images` to the URLs of their images."""
        content = rollout_cache.history[-1]
        system, shown, images = self._shown(content["observation"])
        content["images"] = self._urls.urls(images)
        is_first = len(rollout_cache.history) == 1
        limit = self.env_config.get("max_tokens_per_step")
        before = rendered(self.pre_step_template, {"turn_idx": rollout_cache.step + 1}, "pre_step_template")
        fields = {"actions_left": content["actions_left"], "max_response_length": limit}
        after = rendered(self.next_step_template, fields, "next_step_template")
        before = str(content.get("env_instruction", "")) + before if is_first else before
        said = before + shown + after if isinstance(shown, str) else [_text(before), *shown, _text(after)]
        first = self.agent_system_template if system is None else system
        begin = [{"role": "system", "content": first}] if is_first and first else []
        return [*begin, {"role": "user", "content": said}]

    def _shown(self, observation: Any) -> tuple[Any, str | list[Part], list[Any]]:
        """An observation's own system message (or None), its text or parts, and its images."""
        if isinstance(observation, str):
            return None, observation, []
        if isinstance(observation, np.ndarray):
            return None, [{"type": "image"}], [observation]
        if not isinstance(observation, Mapping):
            message = f"an observation must be a text, an array or a mapping, not {type(observation).__name__!r}"
            raise InvalidRequest(message, param="observation")
        if others := sorted(set(observation) - {"prompt", "image"}):
            raise UnsupportedParameter(
                f"observations with {others[0]!r} are not supported; only images are", param=others[0]
            )
        given = observation.get("image")
        images = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
        system, prompt = _of_prompt(observation.get("prompt", ""))
        parts = [part for each in prompt for part in self._parts(each)] if images else list(prompt)
        places = sum(part["type"] == "image" for part in parts)
        if places != len(images):
            raise InvalidRequest(
                f"an observation has {len(images)} images, but its prompt places {places}: write the environment's "
                "image_placeholder for each",
                param="observation",
            )
        return system, parts, images

    def _parts(self, part: Part) -> Iterator[Part]:
        """A part of a message, split where its text has images."""
        if part["type"] != "text":
            yield {"type": "image"} if part["type"] == "image" else part
            return
        text: str = part["text"].replace(getattr(self.env, "image_placeholder", None) or _TOKEN, _TOKEN)
        for at, piece in enumerate(text.split(_TOKEN)):
            if at:
                yield {"type": "image"}
            if piece:
                yield _text(piece)


def _of_prompt(prompt: Any) -> tuple[Any, list[Part]]:
    """The system message (or None) and the parts of a prompt that is a text, parts, or messages."""
    if isinstance(prompt, str):
        return None, [_text(prompt)]
    system = None
    if prompt and "role" in prompt[0]:
        system = prompt[0]["content"] if prompt[0]["role"] == "system" else None
        content = prompt[0 if system is None else 1]["content"]
        prompt = [_text(content)] if isinstance(content, str) else content
    return system, [dict(part) for part in prompt]


def _text(text: str) -> Part:
    return {"type": "text", "text": text}
