"""Teaches a small model a few answers, so that it samples them by itself when it is served.

Only the last layer is fitted, to hidden states of prompts that the model's own chat template renders. So a served model
meets the tokens of its lessons, and whatever it answers is sampled from its own distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MOST_PASSES = 60
"""Passes of L-BFGS over all lessons: under a second on one core."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A conversation in OpenAI's form with `tools`, and the answers to it, which shall be equally likely.

    An answer is the text that the model shall sample, without the end token: a tool call with its tags.
    """

    messages: tuple[dict[str, Any], ...]
    answers: tuple[str, ...]
    tools: tuple[dict[str, Any], ...] = ()


def teach(folder: Path, lessons: Sequence[Lesson]) -> float:
    """Fit the last layer of the Hugging Face model in `folder` to the lessons, and save it there.

    Returns the mean loss of a token in nats. It stays above 0 where a lesson has several answers.
    """
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", local_files_only=True)
    pairs = [_states(model, tokenizer, lesson, answer) for lesson in lessons for answer in lesson.answers]
    torch.set_num_threads(1)  # on matrices this small, threads wait for each other longer than they compute
    states, targets = torch.cat([hidden for hidden, _ in pairs]), torch.cat([ids for _, ids in pairs])
    head = model.get_output_embeddings()
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=_MOST_PASSES, line_search_fn="strong_wolfe")

    def loss_of_head() -> torch.Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(head(states), targets)
        loss.backward()
        return loss.detach()

    optimizer.step(loss_of_head)
    model.save_pretrained(folder)
    return float(loss_of_head())


def _states(model: Any, tokenizer: Any, lesson: Lesson, answer: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states [n, width] from which the n tokens of the answer and its end are predicted, and their ids."""
    import torch

    tools = list(lesson.tools) or None
    prompt = tokenizer.apply_chat_template(
        list(lesson.messages), tools=tools, add_generation_prompt=True, tokenize=False
    )
    text = prompt + answer + tokenizer.eos_token
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    start = len(tokenizer.encode(prompt, add_special_tokens=False))
    with torch.no_grad():
        hidden = model.get_decoder()(input_ids=ids).last_hidden_state
    return hidden[0, start - 1 : -1], ids[0, start:]
