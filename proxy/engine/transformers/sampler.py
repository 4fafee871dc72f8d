"""Drawing one token for each row of a batch: every request has its own parameters, generator and grammar.

The logprob of a token is a natural log in float32 of the distribution after penalties, bias, temperature and grammar
mask, before top-k, top-p and min-p cut it; temperature 0 takes the best token and reports its logprob at temperature 1.
A row that cannot be drawn from fails alone: the others are drawn as if it were not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from proxy.types import Ids, SamplingParams

if TYPE_CHECKING:
    import torch


class TokenMask(Protocol):
    """What a grammar is to the sampler: which tokens may come next, and what was taken."""

    def allowed(self, remaining: int) -> Any:
        """Bool array [vocabulary] when `remaining` tokens may still be drawn. Raises ValueError when it is broken."""

    def accept(self, token: int) -> None:
        """Move on by a token that was allowed. Raises ValueError otherwise."""


@dataclass(slots=True, eq=False)
class SamplingRow:
    """How one request is drawn, and what was drawn for it so far. `max_tokens` of `params` is set."""

    params: SamplingParams
    prompt_ids: Ids
    generator: torch.Generator
    top_logprobs: int = 0
    grammar: TokenMask | None = None
    drawn: int = 0
    counts: dict[int, int] = field(default_factory=dict)

    @property
    def remaining(self) -> int:
        """How many tokens may still be drawn."""
        return (self.params.max_tokens or 0) - self.drawn


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token with its logprob and the best alternatives (highest first), or why there is none."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    failure: str | None = None


def new_row(
    params: SamplingParams, prompt_ids: Ids, top_logprobs: int = 0, grammar: TokenMask | None = None
) -> SamplingRow:
    """A row at its first token. Without a seed in `params` the generator is seeded by the operating system."""
    import torch

    generator = torch.Generator()
    if params.seed is None:
        generator.seed()
    else:
        generator.manual_seed(params.seed % 2**63)
    return SamplingRow(params, prompt_ids, generator, top_logprobs, grammar)


def draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Drawn]:
    """Draw the next token of each row from float32 `logits` [rows, vocabulary], and note it in the rows."""
    scores = logits.float().to(drawing_device(logits.device)).clone()
    failures = [_shape_scores(scores[index], row) for index, row in enumerate(rows)]
    logprobs = scores.log_softmax(dim=-1)
    tokens = _choose(logprobs, rows)
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
    drawn = []
    for index, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
        failure = failures[index] or _note(row, token, chosen[index])
        top = _best(logprobs[index], row.top_logprobs) if row.top_logprobs and failure is None else ()
        drawn.append(Drawn(token, chosen[index], top, failure))
    return drawn


def drawing_device(device: torch.device) -> torch.device:
    """Where tokens are drawn: beside their logits, but for MPS on the CPU, since MPS knows no float64."""
    import torch

    return torch.device("cpu") if device.type == "mps" else device


def _shape_scores(scores: torch.Tensor, row: SamplingRow) -> str | None:
    """Penalties, bias, temperature and grammar on one row [vocabulary], in place; returns why it cannot be drawn."""
    params = row.params
    if params.repetition_penalty != 1.0:
        _penalize_repetition(scores, row)
    if row.counts and (params.presence_penalty or params.frequency_penalty):
        _penalize_counts(scores, row)
    for token, bias in params.logit_bias:
        scores[token] += bias
    if params.temperature > 0.0:
        scores /= params.temperature
    if row.grammar is None:
        return None
    return _mask(scores, row.grammar, row.remaining)


def _penalize_repetition(scores: torch.Tensor, row: SamplingRow) -> None:
    """Divide positive and multiply negative scores of what the prompt or the output holds (arXiv 1909.05858)."""
    import torch

    seen = torch.tensor(sorted({*row.prompt_ids, *row.counts}), dtype=torch.long, device=scores.device)
    values = scores[seen]
    penalty = row.params.repetition_penalty
    scores[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _penalize_counts(scores: torch.Tensor, row: SamplingRow) -> None:
    """Presence and frequency penalties over the output alone, as OpenAI's API defines them."""
    import torch

    tokens = torch.tensor(list(row.counts), dtype=torch.long, device=scores.device)
    counts = torch.tensor(list(row.counts.values()), dtype=scores.dtype, device=scores.device)
    scores[tokens] -= counts * row.params.frequency_penalty + row.params.presence_penalty


def _mask(scores: torch.Tensor, grammar: TokenMask, remaining: int) -> str | None:
    import torch

    try:
        allowed = torch.from_numpy(grammar.allowed(remaining)).to(scores.device)
    except ValueError as error:
        return str(error)
    if not bool(allowed.any()):
        return "the grammar allows no token here"
    scores.masked_fill_(~allowed, float("-inf"))
    return None


def _choose(logprobs: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Token of each row [rows]: the best one where the temperature is 0, else by inverting the cut distribution."""
    import torch

    best = logprobs.argmax(dim=-1)
    sampled = [index for index, row in enumerate(rows) if row.params.temperature > 0.0]
    if not sampled:
        return best
    probs = logprobs[sampled].double().exp()
    for place, index in enumerate(sampled):
        _truncate(probs[place], rows[index].params)
    # One uniform number a token from the request's own generator: what is drawn does not depend on its neighbours.
    uniforms = [torch.rand(1, generator=rows[index].generator, dtype=torch.float64) for index in sampled]
    cumulative = probs.cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = torch.cat(uniforms).to(probs.device).unsqueeze(1) * total
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    best[sampled] = found.clamp(max=logprobs.shape[1] - 1)
    return best


def _truncate(probs: torch.Tensor, params: SamplingParams) -> None:
    """Zero what top-k, top-p or min-p leave out in one row [vocabulary]; each looks at the whole distribution."""
    cut = None
    if params.min_p > 0.0:
        cut = probs < probs.max() * params.min_p
    if 0 < params.top_k < probs.shape[0] or params.top_p < 1.0:
        rank_cut = _below_best(probs, params)
        cut = rank_cut if cut is None else cut | rank_cut
    if cut is not None:
        probs[cut] = 0.0


def _below_best(probs: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Bool [vocabulary]: what is behind the `top_k` best, or outside the smallest set of best with a sum of `top_p`."""
    import torch

    values, order = probs.sort(descending=True, stable=True)
    cut = values.cumsum(dim=0) - values >= params.top_p
    if params.top_k > 0:
        cut[params.top_k :] = True
    cut[0] = False
    return torch.zeros_like(cut).index_copy_(0, order, cut)


def _note(row: SamplingRow, token: int, logprob: float) -> str | None:
    """Count the token and tell the grammar; returns why it cannot stand."""
    if not float("-inf") < logprob <= 0.0:
        return "the model gave logits that are not numbers"
    row.drawn += 1
    row.counts[token] = row.counts.get(token, 0) + 1
    if row.grammar is not None:
        try:
            row.grammar.accept(token)
        except ValueError as error:
            return str(error)
    return None


def _best(logprobs: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    values, tokens = logprobs.topk(min(count, logprobs.shape[0]))
    pairs = zip(tokens.tolist(), values.tolist(), strict=True)
    return tuple((token, value) for token, value in pairs if value > float("-inf"))
