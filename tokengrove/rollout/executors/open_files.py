"""The limit of open files. Each episode has connections, and many systems allow 1,024 files by default."""

from __future__ import annotations

import logging
from contextlib import suppress

logger = logging.getLogger(__name__)
_BESIDE, _PER_EPISODE = 128, 4
"""Files of the program itself, and of an episode: its connection, its agent's connection, and two of a command."""


def allow_open_files(episodes: int = 0) -> None:
    """Raise the soft limit of this process to the hard limit; warn if that is too low for `episodes` episodes."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed = _BESIDE + _PER_EPISODE * episodes
    if hard != resource.RLIM_INFINITY and hard < needed:
        logger.warning(
            "%d episodes at once may need %d open files, and this machine allows %d: raise `ulimit -Hn`, or lower "
            "--concurrency",
            episodes,
            needed,
            hard,
        )
