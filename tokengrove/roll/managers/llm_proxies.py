"""The sources of a direct manager's answers: `llm_proxy.proxy_type` of its environment manager."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from tokengrove.client.options import GenerateOptions
from tokengrove.errors import InvalidRequest
from tokengrove.roll.config import sampling_of
from tokengrove.roll.managers.token_batch import images_of_input, token_ids_of
from tokengrove.roll.values import DataProto

_POLICY = "policy"


class BaseLLMProxy(ABC):
    """Answers one prompt. `generate_scheduler` has the methods of a session: the session of the running episode."""

    def __init__(self, generate_scheduler: Any, llm_proxy_config: Any, tokenizer: Any, env: Any) -> None:
        self.generate_scheduler, self.llm_proxy_config = generate_scheduler, llm_proxy_config
        self.tokenizer, self.env = tokenizer, env

    @abstractmethod
    def generate(
        self, messages: Sequence[Mapping[str, Any]], lm_input: DataProto, generation_config: Mapping[str, Any]
    ) -> DataProto | None:
        """Answer `lm_input`, whose `batch["input_ids"]` [1, L] is the prompt; `messages` are the conversation.

        `batch["responses"]` [1, R] of the result has the answer's ids, `batch["infer_logprobs"]` [1, R] their
        logprobs, and `meta_info["interaction_id"]` the turn, if the answer was sampled as one. Answers without a turn
        are never trained. None: nothing was sampled, and the manager asks again.
        """


_Kind = TypeVar("_Kind", bound=type[BaseLLMProxy])
LLM_PROXY_REGISTRY: dict[str, type[BaseLLMProxy]] = {}


def register_llm_proxy(name: str) -> Callable[[_Kind], _Kind]:
    """Register the decorated class for `llm_proxy.proxy_type: name`."""

    def register(kind: _Kind) -> _Kind:
        LLM_PROXY_REGISTRY[name] = kind
        return kind

    return register


def create_llm_proxy(generate_scheduler: Any, llm_proxy_config: Any, tokenizer: Any, env: Any) -> BaseLLMProxy:
    """The proxy for `llm_proxy_config.proxy_type` (default `policy`).

    Raises InvalidRequest for an unknown type, and for `openai` unless it is registered: it cannot be trained.
    """
    named = llm_proxy_config or {}
    name = named.get("proxy_type") if isinstance(named, Mapping) else getattr(named, "proxy_type", None)
    name = name or _POLICY
    if name == "openai" and name not in LLM_PROXY_REGISTRY:
        raise InvalidRequest(
            "llm_proxy.proxy_type 'openai' has answers of another model, whose tokens and logprobs are unknown; run "
            "`tokengrove serve --engine mailbox`, to which any model can deliver answers, or register your own proxy "
            "with register_llm_proxy('openai')",
            param="proxy_type",
        )
    if name not in LLM_PROXY_REGISTRY:
        known = ", ".join(sorted(LLM_PROXY_REGISTRY))
        raise InvalidRequest(f"llm_proxy.proxy_type must be one of {known}, not {name!r}", param="proxy_type")
    return LLM_PROXY_REGISTRY[name](generate_scheduler, llm_proxy_config, tokenizer, env)


@register_llm_proxy(_POLICY)
class PolicyProxy(BaseLLMProxy):
    """Samples from the model that is trained: every answer is a turn of the episode's session.

    `meta_info["state_hash"]` and `meta_info["agent"]` of the prompt are stored with the turn. The images of the prompt
    are the `image` of `multi_modal_data`, as in VLTrajEnvManager.
    """

    def generate(
        self, messages: Sequence[Mapping[str, Any]], lm_input: DataProto, generation_config: Mapping[str, Any]
    ) -> DataProto | None:
        marks: GenerateOptions = {}
        if lm_input.meta_info.get("state_hash"):
            marks["state_hash"] = str(lm_input.meta_info["state_hash"])
        if lm_input.meta_info.get("agent"):
            marks["agent"] = str(lm_input.meta_info["agent"])
        if images := images_of_input(lm_input):
            marks["image_data"] = images
        prompt_ids = token_ids_of(lm_input.batch["input_ids"], "input_ids")
        made = self.generate_scheduler.generate(prompt_ids, sampling_params=sampling_of(generation_config), **marks)
        batch = {
            "prompts": np.array([prompt_ids], np.int64),
            "responses": np.array([made.output_ids], np.int64),
            "input_ids": np.array([[*prompt_ids, *made.output_ids]], np.int64),
        }
        if made.logprobs is not None:
            batch["infer_logprobs"] = np.array([made.logprobs], np.float32)
        told = {"interaction_id": made.id, "finish_reason": made.finish_reason, "versions": made.versions}
        return DataProto(batch, dict(lm_input.non_tensor_batch), {**lm_input.meta_info, **told})


@register_llm_proxy("random")
class RandomProxy(BaseLLMProxy):
    """Answers with `env.sample_random_action()`, to try an environment without a model. It is never trained."""

    def generate(
        self, messages: Sequence[Mapping[str, Any]], lm_input: DataProto, generation_config: Mapping[str, Any]
    ) -> DataProto | None:
        text = str(self.env.sample_random_action())
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        texts = {**lm_input.non_tensor_batch, "response_text": np.array([text], dtype=object)}
        return DataProto({"responses": np.array([ids], np.int64)}, texts, dict(lm_input.meta_info))
