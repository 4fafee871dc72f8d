"""Lets torchvision and SGLang's vision models be imported beside a torch without CUDA.

They look for operators whose kernels are not here. These are declared before, and none can be called. Python imports
this module at its start when its folder is on PYTHONPATH, in the engine's child processes too.
"""

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

_BOXES = ("nms", "qnms")
_KERNELS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)


class _Declarations(importlib.abc.MetaPathFinder):
    """Finds nothing; declares operators when the module that looks for them is about to be imported."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        declare = _DECLARATIONS.pop(fullname, None)
        if declare is not None:
            declare()


def _declare_boxes() -> None:
    """Declare operators of torchvision, for which it registers implementations."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _BOXES:
        try:
            torch._C._dispatch_has_kernel_for_dispatch_key(f"torchvision::{name}", "Meta")
        except RuntimeError:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch._kept_for_torchvision = library  # a library that is collected takes its operators with it


def _declare_kernels() -> None:
    """Name kernels of SGLang that models of other kinds call, which are imported together with those of the tests."""
    import torch

    def missing(*arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError("this kernel of SGLang is not here")

    for name in _KERNELS:
        if not hasattr(torch.ops.sgl_kernel, name):
            setattr(torch.ops.sgl_kernel, name, missing)


def _leave_unpinned() -> None:
    """Let SGLang keep experts in memory that is not pinned: it would register it with CUDA also on a CPU."""
    from sglang.srt.mem_cache.pool_host import common

    common._cuda_host_register = lambda *arguments, **options: None


def _pin_nothing() -> None:
    """Let SGLang make the tensors of adapters without pinned memory, which torch lacks on a CPU."""
    import torch

    if torch.cuda.is_available():
        return
    # `with torch.device(...)` knows factory functions by identity, and collects them at its first use. Collected after
    # they are replaced, it does not know those that the replacements call, and makes tensors on the CPU.
    torch.utils._device._device_constructors()
    for name in ("tensor", "zeros", "empty", "ones", "empty_like"):
        make = getattr(torch, name)

        def unpinned(
            *arguments: Any, _make: Callable[..., Any] = make, pin_memory: bool = False, **options: Any
        ) -> Any:
            return _make(*arguments, **options)

        setattr(torch, name, unpinned)
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign, assignment]


_DECLARATIONS = {
    "sglang.srt.lora.lora_manager": _pin_nothing,
    "torchvision._meta_registrations": _declare_boxes,
    "sglang.srt.models.qwen3_5": _declare_kernels,
    "sglang.srt.state_capturer.base": _leave_unpinned,
}
sys.meta_path.insert(0, _Declarations())
