"""Samples one token for each row of a batch. Every request has its own parameters, generator and grammar.

Logprob rule: the natural log, in float32, of the token's probability after penalties, bias, temperature and grammar
mask, before top-k, top-p and min-p, and before banned tokens (placeholders of images) are excluded. Temperature 0 takes
the likeliest token and reports its logprob at temperature 1. A row that cannot be sampled fails without affecting the
other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from proxy.types import Ids, SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


class TokenMask(Protocol):
    """The sampler's interface to a grammar, which masks the next token and accepts the sampled token."""

    def allowed(self, remaining: int) -> Any:
        """Bool array [vocabulary] of the allowed tokens. `remaining`: tokens left. Raises ValueError on failure."""

    def accept(self, token: int) -> None:
        """Advance by a sampled token. Raises ValueError if it is not allowed."""


@dataclass(slots=True, eq=False)
class SamplingRow:
    """Sampling parameters and state of one request. `drawn`: the number of tokens so far; `counts`: how often per id.

    `keeps_unmasked`: also report the logprob without the grammar's mask. `keeps_sets`: also report the kept set.
    `ends`: the end tokens, which are forbidden until `min_tokens` are drawn. `banned`: tokens that are never drawn, but
    keep their share of the distribution.
    """

    params: SamplingParams
    prompt_ids: Ids
    generator: torch.Generator
    top_logprobs: int = 0
    grammar: TokenMask | None = None
    keeps_unmasked: bool = False
    ends: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    keeps_sets: bool = False
    drawn: int = 0
    counts: dict[int, int] = field(default_factory=dict)

    @property
    def remaining(self) -> int:
        """The remaining tokens of `max_tokens`."""
        return (self.params.max_tokens or 0) - self.drawn


@dataclass(frozen=True, slots=True)
class Drawn:
    """A sampled token, its logprob and the top alternatives, highest first. `failure`: the reason if sampling failed.

    `unmasked`: its logprob by the same rule but without the grammar mask, if the row keeps it and has a grammar.
    `kept`: the tokens that it was drawn from, bool [vocabulary], if the row keeps sets. `kept_logprob`: its logprob
    among them.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    failure: str | None = None
    unmasked: float | None = None
    kept: NDArray[np.bool_] | None = None
    kept_logprob: float = 0.0


def new_row(
    params: SamplingParams,
    prompt_ids: Ids,
    top_logprobs: int = 0,
    grammar: TokenMask | None = None,
    *,
    keeps_unmasked: bool = False,
    ends: tuple[int, ...] = (),
    banned: tuple[int, ...] = (),
    keeps_sets: bool = False,
) -> SamplingRow:
    """The row of a new request. Without a seed in `params`, the operating system seeds the generator."""
    import torch

    generator = torch.Generator()
    if params.seed is None:
        generator.seed()
    else:
        generator.manual_seed(params.seed % 2**63)
    return SamplingRow(params, prompt_ids, generator, top_logprobs, grammar, keeps_unmasked, ends, banned, keeps_sets)


def draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Drawn]:
    """Sample the next token of each row from float32 `logits` [rows, vocabulary]; update the rows."""
    scores = logits.float().to(drawing_device(logits.device)).clone()
    for index, row in enumerate(rows):
        _shape_scores(scores[index], row)
    unmasked = {index: scores[index].log_softmax(-1) for index, row in enumerate(rows) if _keeps_unmasked(row)}
    failures = [_mask(scores[index], row) for index, row in enumerate(rows)]
    logprobs = scores.log_softmax(dim=-1)
    tokens = _choose(logprobs, rows)
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
    drawn = []
    for index, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
        failure = failures[index] or _note(row, token, chosen[index])
        top = _best(logprobs[index], row.top_logprobs) if row.top_logprobs and failure is None else ()
        free = unmasked[index][token].item() if index in unmasked else None
        kept = _kept(logprobs[index], row) if row.keeps_sets and failure is None else None
        beyond = 0.0 if kept is None else logprobs[index].double()[kept].logsumexp(-1).item()
        mask = None if kept is None else kept.cpu().numpy()
        drawn.append(Drawn(token, chosen[index], top, failure, free, mask, min(chosen[index] - beyond, 0.0)))
    return drawn


def _kept(logprobs: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """The tokens that one row may draw from its `logprobs` [vocabulary], bool [vocabulary].

    At temperature 0 these are all tokens that a grammar allows: the logprob is that of temperature 1.
    """
    probs = logprobs.double().exp()
    if row.banned:
        probs[list(row.banned)] = 0.0
        probs /= probs.sum().clamp(min=1e-300)
    if row.params.temperature > 0.0:
        _truncate(probs, row.params)
    return probs > 0.0


def drawing_device(device: torch.device) -> torch.device:
    """The device to sample on: the device of the logits, or the CPU for MPS, which has no float64."""
    import torch

    return torch.device("cpu") if device.type == "mps" else device


def _keeps_unmasked(row: SamplingRow) -> bool:
    return row.keeps_unmasked and row.grammar is not None


def _shape_scores(scores: torch.Tensor, row: SamplingRow) -> None:
    """Apply penalties, bias, the minimum length and temperature to one row [vocabulary] in place."""
    params = row.params
    if params.repetition_penalty != 1.0:
        _penalize_repetition(scores, row)
    if row.counts and (params.presence_penalty or params.frequency_penalty):
        _penalize_counts(scores, row)
    for token, bias in params.logit_bias:
        scores[token] += bias
    if row.drawn < params.min_tokens and row.ends:
        scores[list(row.ends)] = float("-inf")
    if params.temperature > 0.0:
        scores /= params.temperature


def _penalize_repetition(scores: torch.Tensor, row: SamplingRow) -> None:
    """Apply the repetition penalty (arXiv 1909.05858): divide positive and multiply negative scores of seen tokens."""
    import torch

    seen = torch.tensor(sorted({*row.prompt_ids, *row.counts}), dtype=torch.long, device=scores.device)
    values = scores[seen]
    penalty = row.params.repetition_penalty
    scores[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _penalize_counts(scores: torch.Tensor, row: SamplingRow) -> None:
    """Apply presence and frequency penalties as OpenAI's API defines them: they count only the output."""
    import torch

    tokens = torch.tensor(list(row.counts), dtype=torch.long, device=scores.device)
    counts = torch.tensor(list(row.counts.values()), dtype=scores.dtype, device=scores.device)
    scores[tokens] -= counts * row.params.frequency_penalty + row.params.presence_penalty


def _mask(scores: torch.Tensor, row: SamplingRow) -> str | None:
    """Mask one row [vocabulary] in place by its grammar, if it has one. Return the reason if that fails."""
    import torch

    if row.grammar is None:
        return None
    try:
        allowed = torch.from_numpy(row.grammar.allowed(row.remaining)).to(scores.device)
    except ValueError as error:
        return str(error)
    if row.banned:
        allowed = allowed.clone()
        allowed[list(row.banned)] = False
    if not bool(allowed.any()):
        return "the grammar allows no token here"
    scores.masked_fill_(~allowed, float("-inf"))
    return None


def _choose(logprobs: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """The token of each row: the likeliest at temperature 0, else inverse transform sampling after truncation."""
    import torch

    best = _without_banned(logprobs, rows).argmax(dim=-1)
    sampled = [index for index, row in enumerate(rows) if row.params.temperature > 0.0]
    if not sampled:
        return best
    probs = logprobs[sampled].double().exp()
    for place, index in enumerate(sampled):
        if rows[index].banned:
            probs[place, list(rows[index].banned)] = 0.0
            probs[place] /= probs[place].sum().clamp(min=1e-300)  # top-p is a share of the tokens that may be drawn
        _truncate(probs[place], rows[index].params)
    # One uniform number per token from the row's own generator, so that the sample does not depend on other rows.
    uniforms = [torch.rand(1, generator=rows[index].generator, dtype=torch.float64) for index in sampled]
    cumulative = probs.cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = torch.cat(uniforms).to(probs.device).unsqueeze(1) * total
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    best[sampled] = found.clamp(max=logprobs.shape[1] - 1)
    return best


def _without_banned(logprobs: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """The logprobs with banned tokens set to -inf; the same tensor if there are none."""
    if not any(row.banned for row in rows):
        return logprobs
    free = logprobs.clone()
    for index, row in enumerate(rows):
        free[index, list(row.banned)] = float("-inf")
    return free


def _truncate(probs: torch.Tensor, params: SamplingParams) -> None:
    """Zero the tokens of one row [vocabulary] that top-k, top-p or min-p exclude, each from the whole distribution."""
    cut = None
    if params.min_p > 0.0:
        cut = probs < probs.max() * params.min_p
    if 0 < params.top_k < probs.shape[0] or params.top_p < 1.0:
        rank_cut = _below_best(probs, params)
        cut = rank_cut if cut is None else cut | rank_cut
    if cut is not None:
        probs[cut] = 0.0


def _below_best(probs: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Bool [vocabulary]: tokens below the `top_k` likeliest, or outside the smallest set that sums to `top_p`."""
    import torch

    values, order = probs.sort(descending=True, stable=True)
    cut = values.cumsum(dim=0) - values >= params.top_p
    if params.top_k > 0:
        cut[params.top_k :] = True
    cut[0] = False
    return torch.zeros_like(cut).index_copy_(0, order, cut)


def _note(row: SamplingRow, token: int, logprob: float) -> str | None:
    """Count the token and advance the grammar. Return the reason if the token is invalid."""
    if not float("-inf") < logprob <= 0.0:
        return "the model's logits are not finite numbers"
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
