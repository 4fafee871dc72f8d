"""As the package: names without kernels behind them."""

from sgl_kernel import __getattr__  # noqa: F401
