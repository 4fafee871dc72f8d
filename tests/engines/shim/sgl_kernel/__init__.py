"""Stands in for SGLang's CUDA kernels where there is no GPU: every name can be imported, none can be called."""

from typing import Any, NoReturn

__version__ = "0.0.0"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU")

    return missing
