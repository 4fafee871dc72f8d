"""Interactions and model responses as users make them themselves, and as AReaL's tests print their tensors."""

from __future__ import annotations

import builtins
import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import assistant, user
from tokengrove.areal import (
    ApiType,
    InteractionWithTokenLogpReward,
    ModelResponse,
    concat_padded_tensors,
    results,
)


def response(start: list[int], output: list[int], version: int = 0, **more: Any) -> ModelResponse:
    logprobs = [-0.5] * len(output)
    return ModelResponse(start, output, logprobs, [version] * len(output), **more)


def columns(interaction: InteractionWithTokenLogpReward) -> dict[str, list[Any]]:
    return {name: tensor.tolist() for name, tensor in interaction.to_tensor_dict().items()}


def test_a_turn_trains_its_output() -> None:
    interaction = InteractionWithTokenLogpReward(model_response=response([1, 2, 3], [4, 5], 7), reward=1.5)
    assert columns(interaction) == {
        "input_ids": [[1, 2, 3, 4, 5]],
        "loss_mask": [[0, 0, 0, 1, 1]],
        "logprobs": [[0.0, 0.0, 0.0, -0.5, -0.5]],
        "versions": [[-1, -1, -1, 7, 7]],
        "attention_mask": [[True] * 5],
        "rewards": [1.5],
    }
    interaction.reward = None
    assert columns(interaction)["rewards"] == [0.0]


def test_with_template_concat_a_turn_trains_those_above_it_too() -> None:
    """The values are those that AReaL's class makes of the same fields."""
    root = InteractionWithTokenLogpReward(response([1, 2, 3], [4, 5], 0))
    above = InteractionWithTokenLogpReward(response([1, 2, 3, 4, 5, 6], [7], 1), None, root, "concat")
    leaf = InteractionWithTokenLogpReward(response([1, 2, 3, 4, 5, 6, 7, 8], [9, 10], 2), 1.0, above, "concat")
    found = columns(leaf)
    assert found["input_ids"] == [list(range(1, 11))]
    assert found["loss_mask"] == [[0, 0, 0, 1, 1, 0, 1, 0, 1, 1]]
    assert found["versions"] == [[-1, -1, -1, 0, 0, -1, 1, -1, 2, 2]]


def test_a_parent_whose_tokens_are_not_the_beginning_stays_context(caplog: pytest.LogCaptureFixture) -> None:
    """AReaL compares the lengths only, and so trains other tokens than were sampled."""
    parent = InteractionWithTokenLogpReward(response([1, 2], [3, 4]))
    child = InteractionWithTokenLogpReward(response([1, 2, 3, 99, 5], [6]), 1.0, parent, "concat")
    assert columns(child)["loss_mask"] == [[0, 0, 0, 0, 0, 1]]
    assert "does not begin with the tokens of its parent" in caplog.text


def test_without_tokens_there_are_no_tensors() -> None:
    interaction = InteractionWithTokenLogpReward(messages=[user("q")])
    assert not interaction.has_tensor_data
    with pytest.raises(ValueError, match="model_response"):
        interaction.to_tensor_dict()


def test_tensors_that_were_given_are_returned_with_the_reward() -> None:
    torch = pytest.importorskip("torch")
    interaction = InteractionWithTokenLogpReward(reward=2.0, _cache={"input_ids": torch.tensor([[1, 2]])})
    assert interaction.has_tensor_data
    assert columns(interaction) == {"input_ids": [[1, 2]], "rewards": [2.0]}


def test_a_batch_is_padded_on_the_right() -> None:
    turns = [
        InteractionWithTokenLogpReward(response([1, 2], [3]), 1.0),
        InteractionWithTokenLogpReward(response([4], [5])),
    ]
    batch = concat_padded_tensors([turn.to_tensor_dict() for turn in turns], pad_value=9.0)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 5, 9]]
    assert batch["attention_mask"].tolist() == [[True, True, True], [True, True, False]]
    assert batch["rewards"].tolist() == [1.0, 0.0]
    assert concat_padded_tensors([]) == {}
    with pytest.raises(ValueError, match="different columns"):
        concat_padded_tensors([turns[0].to_tensor_dict(), {}])


def test_ids_times_and_data_are_those_of_the_reply() -> None:
    chat = results.chat_completion({"id": "chatcmpl-1", "created": 12, "choices": []})
    parent = InteractionWithTokenLogpReward(messages=[user("q")], output_message_list=[assistant("a")], completion=chat)
    child = InteractionWithTokenLogpReward(parent=parent, messages=[user("q"), assistant("a"), user("r")])
    assert (parent.interaction_id, parent.created_at, parent.api_type) == ("chatcmpl-1", 12.0, ApiType.COMPLETION)
    assert (child.interaction_id, child.created_at, child.api_type) == (None, None, ApiType.NONE)
    assert (child.remaining_messages, child.parent_data) == ([user("r")], [user("q")])
    child.interaction_id = "mine"
    assert child.interaction_id == "mine"


def test_output_tokens_without_stop_need_to_know_the_stop_tokens() -> None:
    tokenizer = SimpleNamespace(eos_token_id=9, pad_token_id=0)
    ended = response([1], [5, 6, 9, 0], tokenizer=tokenizer)
    assert (ended.input_len, ended.output_len, ended.end_with_stop) == (1, 4, True)
    assert ended.output_tokens_without_stop == [5, 6]
    for cut in ("length", "abort"):
        assert response([1], [5, 9], tokenizer=tokenizer, stop_reason=cut).output_tokens_without_stop == [5, 9]
    assert not response([1], [5], tokenizer=tokenizer).end_with_stop
    with pytest.raises(ValueError, match="tokenizer"):
        _ = response([1], [5]).end_with_stop


@pytest.mark.parametrize("make", [results.chat_completion, results.response])
def test_a_reply_has_the_same_shape_without_openai(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"id": "r", "object": "o", "choices": [{"index": 0, "message": assistant("a")}], "usage": None}
    imports = builtins.__import__

    def without(name: str, *arguments: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "openai":
            raise ModuleNotFoundError(name)
        return imports(name, *arguments, **named)

    assert make(body).id == "r"
    monkeypatch.setattr(builtins, "__import__", without)
    reply = make(body)
    assert type(reply) is results.Reply
    assert reply.choices[0].message.content == "a"
    assert json.loads(json.dumps(reply.model_dump())) == body
