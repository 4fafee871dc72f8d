"""Chooses the family and the template of a model folder: by `--family`, else by `model_type` and chat template.

The folder's own chat template is used if there is one. A folder without one needs `--family`; the family's renderer in
the `renderers` package is then used instead. Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path

from proxy.rendering.families import Family, candidates, family_named
from proxy.rendering.image_tokens import ImageTokens
from proxy.rendering.json_files import read_json
from proxy.rendering.templates.chat_template import ChatTemplate, Template
from proxy.rendering.templates.library_template import LibraryTemplate
from proxy.rendering.tokenizer import Tokenizer
from tokengrove.errors import ConfigurationError, how_to_get

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TemplateChoice:
    """The chosen family and template. `chat`: the folder's own chat template, if any. `why`: the reason, one line."""

    family: Family
    template: Template
    chat: ChatTemplate | None
    why: str


def choose_template(
    tokenizer: Tokenizer, folder: Path, named: str | None, retention: str, images: ImageTokens | None = None
) -> TemplateChoice:
    """Choose family and template. `named` is `--family`, `retention` is `--thinking-retention`. `images`: how images
    become tokens, for a vision model.

    Raises ConfigurationError for an unknown family, a family that does not fit the tokenizer, or a missing template.
    """
    given = None if named is None else family_named(named)
    if not tokenizer.chat_templates:
        return _without_template(given, tokenizer, folder, retention)
    chat = ChatTemplate(tokenizer, images)
    if given is None:
        model_type = read_json(folder / "config.json").get("model_type")
        found = next(candidates(model_type if isinstance(model_type, str) else None, chat.source))
        return TemplateChoice(found, chat, chat, f"model_type {model_type}; the folder's chat template")
    if given.holds and not given.knows(chat.source):
        if not any(map(tokenizer.is_marker, tokenizer.encode(given.holds[0]))):
            raise ConfigurationError(f"the tokenizer does not fit family {given.name}: it has no {given.holds[0]}")
        log.warning(
            "--family %s does not fit the chat template in %s; the template is used all the same", given.name, folder
        )
    return TemplateChoice(given, chat, chat, "--family; the folder's chat template")


def require_library(family: Family | None, folder: Path) -> Family:
    """Return the family if its renderers can replace a chat template. Raises ConfigurationError otherwise."""
    if family is None or not family.library:
        raise ConfigurationError(
            f"no chat template in {folder}: add chat_template.jinja, or chat_template in tokenizer_config.json"
        )
    if importlib.util.find_spec("renderers") is None:
        raise ConfigurationError(
            f"--family {family.name} without a chat template in {folder} needs the package renderers: "
            f"{how_to_get('tokengrove[renderers]')}"
        )
    return family


def _without_template(family: Family | None, tokenizer: Tokenizer, folder: Path, retention: str) -> TemplateChoice:
    """Choose the first renderer of `family` that fits the tokenizer. Raises ConfigurationError if none fits."""
    family, failure = require_library(family, folder), None
    for name in family.library:
        try:
            template = LibraryTemplate(name, tokenizer, retention)
        except ConfigurationError as error:
            failure = failure or error
        else:
            why = f"--family; renderer {name}, no chat template in the folder"
            return TemplateChoice(family, template, None, why)
    assert failure is not None  # `library` is not empty
    raise failure
