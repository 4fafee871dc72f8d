"""Models by name: `--model ORG/NAME[@REVISION]`, and likewise `--tokenizer`, are fetched from the Hugging Face hub.

The hub's own client fetches files into its own cache, so its variables apply: HF_HOME, HF_ENDPOINT, HF_TOKEN,
HF_HUB_OFFLINE. A name is pinned to a commit before anything is loaded, and all files are loaded from this commit. The
client is imported only for a name; a server with a local folder does not need it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from proxy.progress import doing
from proxy.settings import Settings
from tokengrove.errors import ConfigurationError

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
# All files that may belong to a tokenizer, a chat template or the description of a model.
_DESCRIPTION = (
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab*", "merges.txt", "tekken.json", "*.model", "*.tiktoken", "*.py"),
    *("chat_template*", "additional_chat_templates/*"),
)
WEIGHTS = ("*.safetensors", "*.bin")
"""The kinds of weight files. The first kind that a model has is loaded."""
# Copies of the weights in other layouts.
_COPIES = ("*/*", "consolidated*")


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the hub. `revision`: a branch, tag or commit; None: the main branch."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def parse_name(source: str) -> HubName | None:
    """Parse ORG/NAME[@REVISION]. Returns None for an existing folder, and for a text of another form."""
    found = _NAME.fullmatch(source)
    if found is None or Path(source).is_dir():
        return None
    return HubName(found["repo"], found["revision"])


def pinned(settings: Settings) -> Settings:
    """The same settings with each name pinned to a commit.

    The tokenizer, chat template and configuration of each name are then in the cache. Raises ConfigurationError if
    `--model` or `--tokenizer` is neither a folder nor a model that can be fetched.
    """
    commits: dict[str, str] = {}
    for flag in ("model", "tokenizer"):
        source = getattr(settings, flag)
        name = None if source is None else parse_name(source)
        if name is not None:
            with doing(f"fetching the tokenizer of {name} from the Hugging Face hub"):
                commits[flag] = str(HubName(name.repo, _snapshot(flag, name, _DESCRIPTION).name))
        elif source is not None:
            folder_of(flag, source)
    return replace(settings, **commits)  # type: ignore[arg-type]


def folder_of(flag: str, source: str) -> Path:
    """The folder of `--FLAG SOURCE`: a local folder, or the folder of a pinned name in the hub's cache.

    It may lack weights. Raises ConfigurationError if the folder does not exist.
    """
    name = parse_name(source)
    if name is not None:
        return _snapshot(flag, name, _DESCRIPTION, cached=True)
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise ConfigurationError(
            f"--{flag} {source}: there is no folder {source}; a name like ORG/NAME or ORG/NAME@REVISION is fetched "
            "from the Hugging Face hub, and without --model the built-in model is served"
        )
    return folder


def check_weights(source: str | None) -> None:
    """Raise ConfigurationError if `--model SOURCE` is a local folder without weights."""
    if source is None or parse_name(source) is not None:
        return
    folder = folder_of("model", source)
    if not any(any(folder.glob(kind)) for kind in WEIGHTS):
        raise ConfigurationError(f"--model {source} has no weights ({', '.join(WEIGHTS)})")


def fetch_weights(source: str | None) -> None:
    """Fetch the weights of `--model SOURCE` if it is a name. Raises ConfigurationError if the model has no weights."""
    name = None if source is None else parse_name(source)
    if name is None:
        return
    with doing(f"fetching the weights of {name} from the Hugging Face hub", _fetched(name)):
        for kind in WEIGHTS:
            folder = _snapshot("model", name, (kind, f"{kind}.index.json"), _COPIES)
            if any(folder.glob(kind)):
                return
    raise ConfigurationError(
        f"--model {name} has no weights ({', '.join(WEIGHTS)}) in {folder}; without "
        "HF_HUB_OFFLINE they are fetched from the Hugging Face hub, if it has them"
    )


def _fetched(name: HubName) -> Callable[[], str] | None:
    """A function that returns how much of a model is in the cache; None on a terminal, where the client shows bars."""
    if sys.stderr.isatty():
        return None
    from huggingface_hub import constants, file_download

    blobs = (
        Path(constants.HF_HUB_CACHE) / file_download.repo_folder_name(repo_id=name.repo, repo_type="model") / "blobs"
    )

    def so_far() -> str:
        sizes = 0
        for blob in blobs.glob("*"):
            with suppress(OSError):  # the file has just been renamed
                sizes += blob.stat().st_size
        return f"{sizes / 1e6:,.0f} MB are here"

    return so_far


def local(settings: Settings) -> Settings:
    """The same settings with names replaced by folders that include weights. Raises ConfigurationError."""
    fetch_weights(settings.model)
    given = {flag: getattr(settings, flag) for flag in ("model", "tokenizer")}
    folders = {flag: str(folder_of(flag, source)) for flag, source in given.items() if source is not None}
    return replace(settings, **folders)  # type: ignore[arg-type]


def short_name(source: str) -> str:
    """The short name of a model: its name on the hub without the revision, or the name of its folder."""
    name = parse_name(source)
    return Path(source).expanduser().resolve().name if name is None else name.repo


def revision_of(settings: Settings) -> str | None:
    """The commit of the model in pinned settings, or of the tokenizer without a model; None for a local folder."""
    source = settings.model or settings.tokenizer
    name = None if source is None else parse_name(source)
    return None if name is None else name.revision


def _snapshot(
    flag: str, name: HubName, patterns: Sequence[str], ignored: Sequence[str] = (), *, cached: bool = False
) -> Path:
    """Fetch the files that match `patterns`; return their folder, which is named after the commit.

    `cached`: the files are in the cache, and nothing is fetched.
    """
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(
            snapshot_download(
                name.repo,
                revision=name.revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(ignored),
                local_files_only=cached,
            )
        )
    except errors.RevisionNotFoundError:
        why = f"the Hugging Face hub has no revision {name.revision!r} of {name.repo}"
    except errors.RepositoryNotFoundError as error:  # also for private and gated models
        why = f"there is no folder {name}, and the Hugging Face hub does not give such a model to this user"
        why += f" (HF_TOKEN says who asks): {_first_line(error)}"
    except Exception as error:  # the client's HTTP library, which depends on its version, has its own errors
        why = f"there is no folder {name}, and it cannot be fetched from the Hugging Face hub: {_first_line(error)}"
    raise ConfigurationError(f"--{flag} {name}: {why}")


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
