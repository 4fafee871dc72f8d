"""Working folders from a git repository.

The repository changes only by the entry of a worktree, which is removed at the end, and by an agent's commands in a
worktree. A worktree shares branches, stashes and settings with the repository and its other worktrees. A clone has its
own, and only reads the repository's objects.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tokengrove.errors import InvalidRequest
from tokengrove.rollout.sandboxes.cleaning import WORKTREE

_OF_THE_CALLER = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX")
"""Variables that a git hook sets for its own repository, removed here in case a hook runs this program."""


def add_worktree(repository: str, commit: str, work: Path) -> None:
    """Make the empty folder `work` a detached worktree, and write a file next to it for `cleaning`.

    Raises InvalidRequest with git's error message.
    """
    found = _commit_id(repository, commit)
    _git(repository, "worktree", "add", "--quiet", "--force", "--no-checkout", "--detach", str(work), found)
    (work.parent / WORKTREE).write_text(_git(str(work), "rev-parse", "--absolute-git-dir"))
    _git(str(work), "reset", "--quiet", "--hard")


def add_clone(repository: str, commit: str, work: Path, whole: bool = False) -> None:
    """Make the empty folder `work` a separate repository with a branch `main` at `commit`.

    `whole`: it has its own copy of the branch's objects, so that it can be moved to another machine. Raises
    InvalidRequest with git's error message.
    """
    found = _commit_id(repository, commit)
    objects = _git(repository, "rev-parse", "--path-format=absolute", "--git-path", "objects")
    shallow = Path(_git(repository, "rev-parse", "--path-format=absolute", "--git-path", "shallow"))
    kind = _git(repository, "rev-parse", "--show-object-format")
    _git(str(work), "init", "--quiet", f"--object-format={kind}")
    (alternates := work / ".git" / "objects" / "info" / "alternates").write_text(f"{objects}\n")
    if shallow.exists():
        (work / ".git" / "shallow").write_bytes(shallow.read_bytes())
    _git(str(work), "checkout", "--quiet", "-B", "main", found)
    if whole:
        _git(str(work), "repack", "-a", "-d", "--quiet")
        alternates.unlink()


def _commit_id(repository: str, commit: str) -> str:
    _git(repository, "rev-parse", "--git-dir")  # a folder that is not a repository has its own error
    try:
        return _git(repository, "rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}")
    except InvalidRequest:
        raise InvalidRequest(f"{repository} has no commit {commit!r}", param="commit") from None


def _git(folder: str, *words: str) -> str:
    """The output of a git command. The repository's hooks do not run: they may be slow and are not part of the task."""
    variables = {name: value for name, value in os.environ.items() if name not in _OF_THE_CALLER}
    command = ["git", "-C", folder, "-c", "core.hooksPath=/dev/null", *words]
    try:
        done = subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except FileNotFoundError:
        raise InvalidRequest("git is not installed, which --worktree and --clone need") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise InvalidRequest(f"git {words[0]} failed in {folder}: {said}")
    return done.stdout.decode(errors="surrogateescape").strip()
