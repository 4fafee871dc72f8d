"""Lets torchvision be imported beside a torch without CUDA: two operators that it expects are declared first.

Python imports this module at its start when its folder is on PYTHONPATH, in the engine's child processes too.
"""

import importlib.abc
import sys
from collections.abc import Sequence
from typing import Any

_OPERATORS = ("nms", "qnms")


class _Declarations(importlib.abc.MetaPathFinder):
    """Finds nothing; declares the operators when torchvision begins to look for their implementations."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        if fullname != "torchvision._meta_registrations":
            return
        sys.meta_path.remove(self)
        import torch

        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in _OPERATORS:
            try:
                torch._C._dispatch_has_kernel_for_dispatch_key(f"torchvision::{name}", "Meta")
            except RuntimeError:
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        torch._kept_for_torchvision = library  # a library that is collected takes its operators with it


sys.meta_path.insert(0, _Declarations())
