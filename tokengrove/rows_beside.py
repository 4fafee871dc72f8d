"""How rows beside tokens are written in exports: the missing value of each dtype, and sets of ids.

Readers of exports and the server share this. It needs numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def missing_value(dtype: np.dtype[Any]) -> Any:
    """The value that a missing row has in every entry: NaN, the largest unsigned integer, or -1."""
    import numpy as np

    if dtype.kind == "f":
        return np.nan
    return np.iinfo(dtype).max if dtype.kind == "u" else -1


def set_sizes(counts: NDArray[np.int32]) -> NDArray[np.int64]:
    """The number of ids that each set lists, int64 [R]. A count n lists n ids, a count -(n + 1) lists n ids."""
    import numpy as np

    wide = counts.astype(np.int64)
    return np.where(wide < 0, -wide - 1, wide)


def is_missing(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Which fixed rows [R, ...] are missing, bool [R]."""
    import numpy as np

    blank = np.isnan(values) if values.dtype.kind == "f" else values == missing_value(values.dtype)
    return np.asarray(blank.all(axis=tuple(range(1, values.ndim))))


def runs_of(mask: NDArray[np.bool_]) -> list[list[int]]:
    """The runs [start, end) of true values."""
    import numpy as np

    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    found: list[list[int]] = edges.reshape(-1, 2).tolist()
    return found
