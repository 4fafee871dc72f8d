"""One turn of a session with its tokens and reward, with the names of AReaL's `InteractionWithTokenLogpReward`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from tokengrove.areal.model_response import ModelResponse
from tokengrove.client.libraries import library
from tokengrove.client.tensors import Array

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_MEDIA = "multi_modal_input"


class ApiType(StrEnum):
    """Which of the attributes `completion` and `response` an interaction has."""

    COMPLETION = "completion"
    RESPONSE = "response"
    NONE = "none"


@dataclass(eq=False)
class InteractionWithTokenLogpReward:
    """One complete turn.

    `reward` is the reward to train with: the return of the turn, or in style concat the sum of the rewards of its path.
    `original_reward` is the reward that was set for this turn; None if none was set. `parent` is the turn that this one
    continues. `messages` are the messages of the whole request and `output_message_list` contains the answer, in the
    format of chat completions. `completion` is the reply as OpenAI's `ChatCompletion`; a turn of `/v1/responses` has
    `response`, a `Response`, instead. Without the package openai they are objects with the same attributes.
    `reply` is the body that the client received, in the format of its own API.

    `multi_modal_input` contains the tensors of the images of the prompt, and `image_spans` their tokens as pairs
    (start, length). Both are None unless the model is a vision model.

    `output_mask` is 1 for each sampled token that is trained; None: all are trained. With `chat_template_type`
    "concat", `to_tensor_dict` also trains the turns above if this turn's tokens begin with theirs; for results of
    `export_interactions` the style has decided this already.
    """

    model_response: ModelResponse | None = None
    reward: float | None = None
    parent: InteractionWithTokenLogpReward | None = field(default=None, repr=False)
    chat_template_type: str = "hf"
    _cache: dict[str, Any] | None = field(default=None, repr=False)
    messages: list[dict[str, Any]] = field(default_factory=list)
    output_message_list: list[dict[str, Any]] | None = None
    completion: Any = None
    response: Any = None
    input_data: Any = ""
    _interaction_id: str | None = None
    original_reward: float | None = None
    session_id: str | None = None
    reply: Mapping[str, Any] | None = field(default=None, repr=False)
    output_mask: list[int] | None = field(default=None, repr=False)
    multi_modal_input: Mapping[str, Array] | None = field(default=None, repr=False)
    image_spans: Sequence[tuple[int, int]] | None = field(default=None, repr=False)

    @property
    def has_tensor_data(self) -> bool:
        """Whether `to_tensor_dict` has tokens to return."""
        return self.model_response is not None or self._cache is not None

    @property
    def is_completion(self) -> bool:
        return self.completion is not None

    @property
    def is_response(self) -> bool:
        return self.response is not None

    @property
    def api_type(self) -> ApiType:
        """Whether this is a chat completion or a response; turns of other APIs appear as chat completions."""
        if self.is_completion:
            return ApiType.COMPLETION
        return ApiType.RESPONSE if self.is_response else ApiType.NONE

    @property
    def interaction_id(self) -> str | None:
        """The id of the reply; for one of several choices, the id of the choice."""
        if self._interaction_id is None:
            shown = self.completion or self.response
            return None if shown is None else str(shown.id)
        return self._interaction_id

    @interaction_id.setter
    def interaction_id(self, value: str) -> None:
        self._interaction_id = value

    @property
    def created_at(self) -> float | None:
        """The time of creation that the reply contains, in Unix seconds."""
        if self.is_completion:
            return float(self.completion.created)
        return float(self.response.created_at) if self.is_response else None

    @property
    def current_data(self) -> Any:
        """The input: `messages`, or for a response `input_data` if it is set."""
        return (self.input_data or self.messages) if self.is_response else self.messages

    @property
    def parent_data(self) -> Any:
        """The input of the parent; None without a parent."""
        return None if self.parent is None else self.parent.current_data

    @property
    def remaining_messages(self) -> list[dict[str, Any]]:
        """The messages that this turn adds to those of its parent and the parent's answer."""
        if self.parent is None:
            return self.messages
        return self.messages[len(self.parent.messages) + len(self.parent.output_message_list or ()) :]

    def to_tensor_dict(self) -> dict[str, torch.Tensor]:
        """AReaL's tensors, for L tokens of prompt and answer.

        `input_ids`, `loss_mask` and `versions` (-1 for tokens that are not trained) are int64 [1, L], `logprobs` (0 for
        them) float32 [1, L], `attention_mask` bool [1, L], and `rewards` float32 [1]: `reward`, or 0 if it is None.
        These are the dtypes of AReaL 1.0.4; its documentation prints int32. Turns of a vision model also have
        `mm_token_type_ids`, int64 [1, L], 1 for the tokens of images, and `multi_modal_input`, a list of one dict, as
        in AReaL's vision workflow. Raises ValueError without tokens, and InvalidRequest if torch is not installed.
        """
        torch = library("torch")
        rewards = np.array([self.reward or 0.0], np.float32)
        columns: dict[str, Any] = {**self._columns(), "rewards": rewards}
        media = columns.pop(_MEDIA, None)
        made = {name: torch.as_tensor(values) for name, values in columns.items()}
        if media is not None:
            made[_MEDIA] = [{name: torch.as_tensor(values) for name, values in each.items()} for each in media]
        return made

    def _columns(self) -> Mapping[str, Any]:
        return self._sampled_columns() if self._cache is None else self._cache

    def _sampled_columns(self) -> dict[str, Any]:
        response = self.model_response
        if response is None:
            raise ValueError(f"interaction {self.interaction_id!r} has no tokens: its 'model_response' is None")
        tokens = [*response.input_tokens, *response.output_tokens]
        shape, start = (1, len(tokens)), response.input_len
        columns: dict[str, Any] = {
            "input_ids": np.array(tokens, np.int64).reshape(shape),
            "loss_mask": np.zeros(shape, np.int64),
            "logprobs": np.zeros(shape, np.float32),
            "versions": np.full(shape, -1, np.int64),
            "attention_mask": np.ones(shape, np.bool_),
        }
        if self.chat_template_type == "concat" and self.parent is not None:
            self._add_parent(columns, start)
        mask = np.ones(response.output_len, np.int64) if self.output_mask is None else np.array(self.output_mask)
        columns["loss_mask"][0, start:] = mask
        columns["logprobs"][0, start:] = np.where(mask, np.array(response.output_logprobs, np.float32), 0.0)
        columns["versions"][0, start:] = np.where(mask, np.array(response.output_versions, np.int64), -1)
        if self.multi_modal_input is None:
            return columns
        return {**columns, "mm_token_type_ids": self._token_types(shape), _MEDIA: [self.multi_modal_input]}

    def _token_types(self, shape: tuple[int, int]) -> Array:
        types = np.zeros(shape, np.int64)
        for start, length in self.image_spans or ():
            types[0, start : start + length] = 1
        return types

    def _add_parent(self, columns: dict[str, Array], start: int) -> None:
        """Also train what the parent trains, if this prompt of `start` tokens begins with the parent's tokens."""
        assert self.parent is not None
        told = self.parent._columns()
        above = {name: np.asarray(told[name]) for name in ("input_ids", "loss_mask", "logprobs", "versions")}
        length = above["input_ids"].shape[1]
        if length > start or not np.array_equal(above["input_ids"], columns["input_ids"][:, :length]):
            logger.warning(
                "interaction %s does not begin with the tokens of its parent %s, which are not trained",
                self.interaction_id,
                self.parent.interaction_id,
            )
            return
        for name in ("loss_mask", "logprobs", "versions"):
            columns[name][:, :length] = above[name]
