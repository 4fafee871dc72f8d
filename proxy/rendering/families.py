"""Which family a folder belongs to: said by `--family`, else by its `model_type`, else found by parity.

The folder's own chat template is the truth: a renderer of the library is used only where it writes the same ids. A
family is one line of the table; `library` is the renderer's name in the `renderers` package, None where the chat
template itself is used.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy.errors import ConfigurationError
from proxy.rendering.library import LibraryTemplate, agrees
from proxy.rendering.template import ChatTemplate, Template
from proxy.rendering.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Family:
    """`tool_format` and `reasoning` are names of tool_formats.py; None: found in the chat template, if it has any."""

    name: str
    model_types: tuple[str, ...] = ()
    library: str | None = None
    tool_format: str | None = None
    reasoning: str | None = None
    needs: tuple[str, ...] = ()


FAMILIES = (
    Family("qwen3", ("qwen3", "qwen3_moe"), "qwen3", "hermes", "think", ("<|im_start|>", "<tool_call>", "</think>")),
    Family("qwen2.5", ("qwen2", "qwen2_moe"), None, "hermes"),
    Family("glm-4.5", ("glm4_moe",), "glm-4.5", None, "think", ("<|observation|>", "<tool_call>", "</think>")),
    Family("minimax-m2", ("minimax_m2", "minimax"), "minimax-m2", None, "think", ("]~b]", "[e~[")),
    Family("generic"),
)


@dataclass(frozen=True, slots=True)
class Choice:
    """A family with the template that writes for it; `chat` is the folder's own, where it has one."""

    family: Family
    template: Template
    chat: ChatTemplate | None


def family_named(name: str) -> Family:
    """Raises ConfigurationError naming the known ones."""
    for family in FAMILIES:
        if family.name == name:
            return family
    raise ConfigurationError(f"--family {name} is not one of {', '.join(family.name for family in FAMILIES)}")


def choose(tokenizer: Tokenizer, folder: Path, named: str | None, retention: str) -> Choice:
    """Raises ConfigurationError for an unknown name, a family that the tokenizer does not fit, or no chat template."""
    given = None if named is None else family_named(named)
    chat = ChatTemplate(tokenizer) if tokenizer.hugging_face.chat_template else None
    if given is not None and given.library is not None:
        template = LibraryTemplate(given.library, tokenizer, retention)
        if chat is not None and not agrees(template, chat):
            log.warning("--family %s writes other ids than the chat template in %s", given.name, folder)
        return Choice(given, template, chat)
    if chat is None:
        raise ConfigurationError(f"no chat template in {folder} (chat_template.jinja or tokenizer_config.json)")
    if given is not None:
        return Choice(given, chat, chat)
    model_type = read_json(folder / "config.json").get("model_type")
    return _by_parity(tokenizer, chat, model_type, retention)


def read_json(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file, empty where there is none. Raises ConfigurationError on a broken file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    return value if isinstance(value, dict) else {}


def _by_parity(tokenizer: Tokenizer, chat: ChatTemplate, model_type: Any, retention: str) -> Choice:
    for family in _candidates(tokenizer, model_type):
        if family.library is None:
            return Choice(family, chat, chat)
        try:
            template = LibraryTemplate(family.library, tokenizer, retention)
        except ConfigurationError:
            continue
        if agrees(template, chat):
            template.twin = chat
            return Choice(family, template, chat)
    return Choice(family_named("generic"), chat, chat)


def _candidates(tokenizer: Tokenizer, model_type: Any) -> Iterator[Family]:
    """Those of the model type, then those whose markers the vocabulary has."""
    by_type = [family for family in FAMILIES if model_type in family.model_types]
    yield from (family for family in by_type if family.library is not None)
    for family in FAMILIES:
        fits = all(tokenizer.token_id(marker) is not None for marker in family.needs)
        if family not in by_type and family.library is not None and fits:
            yield family
    yield from (family for family in by_type if family.library is None)
