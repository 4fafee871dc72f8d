"""Which experts a forward pass ran: hooks on the modules that are called with the chosen experts.

In transformers these modules are called as `experts(hidden_states, indices, weights)`, under one of a few names of the
second argument. Only the text model counts, in the order of its layers. A dense model gets no hooks.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

_INDICES = ("top_k_index", "router_indices", "selected_experts")
"""The names of the argument with the chosen experts, [tokens, k], the second of these modules' `forward`."""

_OF_EXPERTS = re.compile(r"(Experts?|Router|Mo[eE]|Moe(Block|Layer|Mlp|MLP))$")
"""Names of classes that only models with experts have."""


def expert_modules(model: Any) -> list[Any]:
    """The modules that are called with the chosen experts, in the order of layers; empty if there are none."""
    return [module for module in _text_model(model).modules() if _argument(module) is not None]


def unrecognised_experts(model: Any) -> str:
    """Why the experts of a model without `expert_modules` cannot be recorded; "" if it is dense."""
    kinds = {type(module).__name__ for module in _text_model(model).modules()}
    kind = min((kind for kind in kinds if _OF_EXPERTS.search(kind)), default=None)
    if kind is None:
        return ""
    return (
        f"its layers of the kind {kind} do not pass on which experts they choose in a way that the transformers engine "
        "knows; serve the model with SGLang or vLLM to record them"
    )


class ExpertHooks:
    """Hooks on the `expert_modules` of one model, at least one. Their passes must be on one thread."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self._chosen: list[torch.Tensor | None] = [None] * len(modules)
        numbers = [getattr(module, "num_experts", None) for module in modules]
        few = all(number is not None and int(number) <= np.iinfo(np.uint8).max for number in numbers)
        self.dtype: np.dtype[Any] = np.dtype(np.uint8 if few else np.uint16)
        """The smallest dtype whose largest value is no expert."""
        for layer, module in enumerate(modules):
            self._register(layer, module)

    def take(self, tokens: int) -> NDArray[Any] | None:
        """The experts of the pass that has just run, [tokens, layers, k]; None unless all layers saw `tokens` tokens.

        A layer that chooses fewer experts than others has the largest value of the dtype for the rest.
        """
        import torch

        chosen = [each for each in self._chosen if each is not None and each.shape[0] == tokens]
        whole = len(chosen) == len(self._chosen)
        self._chosen = [None] * len(self._chosen)
        if not whole:
            return None
        most, blank = max(each.shape[1] for each in chosen), int(np.iinfo(self.dtype).max)
        wide = [torch.nn.functional.pad(each, (0, most - each.shape[1]), value=blank) for each in chosen]
        rows: NDArray[Any] = torch.stack(wide, dim=1).to(torch.int32).cpu().numpy().astype(self.dtype)
        return rows

    def _register(self, layer: int, module: Any) -> None:
        name = _argument(module) or ""

        def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._chosen[layer] = args[1] if len(args) > 1 else kwargs[name]

        module.register_forward_pre_hook(note, with_kwargs=True)


def _argument(module: Any) -> str | None:
    """The name of the argument with the chosen experts; None if `module` is not called with them."""
    names = [*inspect.signature(type(module).forward).parameters][2:3]
    return names[0] if names and names[0] in _INDICES else None


def _text_model(model: Any) -> Any:
    """The part of the model that takes in tokens, without its vision model."""
    return model.get_decoder() if hasattr(model, "get_decoder") else model
