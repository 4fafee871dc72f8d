"""Run a mixture-of-experts model of transformers with given experts, as routing replay (R3) does.

In each layer the router's choice is replaced by the recorded experts of each token. Their weights are computed again
from the router's own logits, so that gradients reach the router. It works for routers that weight what they choose by
its softmax or sigmoid: Qwen2-MoE, Qwen3-MoE, OLMoE, Mixtral, DeepSeek-V2 and V3, GLM-MoE, gpt-oss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any

import torch
from torch import nn

_ROUNDING = 0.02
"""How far the weights of a router in bfloat16 may be from those computed in float32, relative to the largest."""


@contextmanager
def replayed_experts(model: nn.Module, rows: torch.Tensor, missing: int | None = None) -> Iterator[None]:
    """While the block runs, forward passes of `model` run the experts in `rows`.

    `rows`: expert ids, [tokens, layers, k], in the order of the tokens of a whole batch: for `input_ids` [B, L] it has
    B x L tokens. The layers are those with experts. A token whose ids are all `missing` keeps the router's choice.
    Raises ValueError for rows of another shape, and in the forward pass for a router that computes its weights in an
    unknown way.
    """
    routers = routers_of(model)
    if rows.ndim != 3 or rows.shape[1] != len(routers):
        raise ValueError(f"rows must be [tokens, {len(routers)} layers, k], not {list(rows.shape)}")
    with ExitStack() as hooks:
        for layer, router in enumerate(routers):
            hook = _Replay(router, rows[:, layer].long(), missing)
            hooks.callback(router.register_forward_hook(hook).remove)
        yield


def routers_of(model: nn.Module) -> Sequence[nn.Module]:
    """The routers of `model` in the order of layers: the module `gate` or `router` beside each `experts`."""
    found = []
    for block in model.modules():
        if hasattr(block, "experts"):
            found += [child for name, child in block.named_children() if name in ("gate", "router")]
    return found


class _Replay:
    """A forward hook of one router, whose output is (logits, weights, ids)."""

    def __init__(self, router: nn.Module, rows: torch.Tensor, missing: int | None) -> None:
        self._scale = float(getattr(router, "routed_scaling_factor", 1.0))
        self._rows, self._missing = rows, missing

    def __call__(self, router: nn.Module, inputs: Any, output: Any) -> Any:
        logits, weights, chosen = output
        if len(self._rows) != len(chosen):
            raise ValueError(f"the pass has {len(chosen)} tokens, but there are rows for {len(self._rows)}")
        rows = self._rows.to(chosen.device)
        if self._missing is not None:
            rows = torch.where((rows == self._missing).all(-1, keepdim=True), chosen, rows)
        sigmoid, normalised = self._rule(logits, weights, chosen)
        return logits, self._weights(logits, rows, sigmoid, normalised).to(weights.dtype), rows

    def _rule(self, logits: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> tuple[bool, bool]:
        """How the router computes weights: the rule that gives its own for its own choice."""
        own, rules = weights.detach(), [*product((False, True), repeat=2)]
        with torch.no_grad():
            again = [self._weights(logits, chosen, *rule) for rule in rules]
            errors = [float((each - own).abs().max()) for each in again]
        best = min(range(len(rules)), key=errors.__getitem__)
        if errors[best] > _ROUNDING * max(float(own.abs().max()), 1e-6):
            raise ValueError("the router computes the weights of its experts in an unknown way")
        return rules[best]

    def _weights(self, logits: torch.Tensor, ids: torch.Tensor, sigmoid: bool, normalised: bool) -> torch.Tensor:
        """The weights of the experts `ids` [tokens, k], float32."""
        scores = logits.float().sigmoid() if sigmoid else logits.float().softmax(-1)
        found = scores.gather(-1, ids)
        return (found / found.sum(-1, keepdim=True) if normalised else found) * self._scale
