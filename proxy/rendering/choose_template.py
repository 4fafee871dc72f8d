"""Chooses the family and the template of a model folder: by `--family`, else by `model_type` and chat template.

A renderer of the `renderers` package is used only if it writes the same ids as the folder's own chat template for every
probe conversation, or if there is no chat template and `--family` names the family. Nothing is downloaded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy.errors import ConfigurationError
from proxy.rendering.families import Family, candidates, family_named
from proxy.rendering.templates.chat_template import ChatTemplate, Template
from proxy.rendering.templates.library_template import LibraryTemplate, agrees
from proxy.rendering.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TemplateChoice:
    """The chosen family and template. `chat`: the folder's own chat template, if any. `why`: the reason, one line."""

    family: Family
    template: Template
    chat: ChatTemplate | None
    why: str


def choose_template(tokenizer: Tokenizer, folder: Path, named: str | None, retention: str) -> TemplateChoice:
    """Choose family and template. `named` is `--family`, `retention` is `--thinking-retention`.

    Raises ConfigurationError for an unknown family, one that the tokenizer does not fit, or a missing chat template.
    """
    given = None if named is None else family_named(named)
    chat = ChatTemplate(tokenizer) if tokenizer.hugging_face.chat_template else None
    if given is not None and given.library:
        return _named(given, tokenizer, chat, folder, retention)
    if chat is None:
        raise ConfigurationError(
            f"no chat template in {folder}: add chat_template.jinja, or chat_template in tokenizer_config.json"
        )
    if given is not None:
        return TemplateChoice(given, chat, chat, "--family; the folder's chat template")
    return _found(tokenizer, chat, _model_type(folder), retention)


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file, empty if there is no file. Raises ConfigurationError for a broken file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    return value if isinstance(value, dict) else {}


def _model_type(folder: Path) -> str | None:
    found = read_json(folder / "config.json").get("model_type")
    return found if isinstance(found, str) else None


def _named(
    family: Family, tokenizer: Tokenizer, chat: ChatTemplate | None, folder: Path, retention: str
) -> TemplateChoice:
    """Choose the renderer that agrees with the folder's chat template, else that template; without one, the first
    renderer that fits the tokenizer.

    Raises ConfigurationError if no renderer fits the tokenizer and there is no chat template of this family.
    """
    fitting, failure = [], ""
    for name in family.library:
        try:
            fitting.append(LibraryTemplate(name, tokenizer, retention))
        except ConfigurationError as error:
            failure = failure or str(error)
    if chat is None and fitting:
        return TemplateChoice(
            family, fitting[0], None, f"--family; renderer {fitting[0].name}, no chat template in the folder"
        )
    if chat is None or not (fitting or family.knows(chat.source)):
        raise ConfigurationError(failure)
    for template in fitting:
        if agrees(template, chat):
            template.twin = chat
            return TemplateChoice(
                family, template, chat, f"--family; renderer {template.name} writes the chat template's ids"
            )
    if not family.knows(chat.source):
        log.warning(
            "--family %s does not fit the chat template in %s; the template is used all the same", family.name, folder
        )
    return TemplateChoice(family, chat, chat, "--family; the folder's chat template, no renderer writes the same ids")


def _found(tokenizer: Tokenizer, chat: ChatTemplate, model_type: str | None, retention: str) -> TemplateChoice:
    fits = list(candidates(model_type, chat.source))
    for family in fits:
        for template in _libraries(family, tokenizer, retention):
            if agrees(template, chat):
                template.twin = chat
                why = f"model_type {model_type}; renderer {template.name} writes the chat template's ids"
                return TemplateChoice(family, template, chat, why)
    tried = any(family.library for family in fits)
    why = f"model_type {model_type}; the folder's chat template" + (", no renderer writes the same ids" * tried)
    return TemplateChoice(fits[0], chat, chat, why)


def _libraries(family: Family, tokenizer: Tokenizer, retention: str) -> Iterator[LibraryTemplate]:
    for name in family.library:
        try:
            yield LibraryTemplate(name, tokenizer, retention)
        except ConfigurationError as error:
            log.debug("%s", error)
