"""The names of SGLang's server arguments, read from its source, since importing SGLang takes ten seconds.

They are the annotated fields of the classes in `server_args.py` and `arg_groups`. Names that SGLang does not accept do
no harm, since SGLang rejects them itself. Missing names would, so a source that lacks the arguments that every release
has is not used.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

_ALWAYS = {"model_path", "tokenizer_path", "context_length", "log_level", "weight_version"}


def option_names() -> frozenset[str] | None:
    """The names, or None if the source of the installed SGLang cannot be used."""
    found = importlib.util.find_spec("sglang")
    places = (found and found.submodule_search_locations) or []
    names = frozenset(name for place in places for name in _fields_below(Path(place) / "srt"))
    return names if names >= _ALWAYS else None


def _fields_below(folder: Path) -> Iterator[str]:
    for path in (folder / "server_args.py", *folder.glob("arg_groups/**/*.py")):
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield from (
                    part.target.id
                    for part in node.body
                    if isinstance(part, ast.AnnAssign)
                    and isinstance(part.target, ast.Name)
                    and not part.target.id.startswith("_")
                )
