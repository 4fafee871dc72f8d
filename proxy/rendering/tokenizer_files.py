"""Reads the tokenizer of a folder without transformers, where the result is known to equal AutoTokenizer's.

transformers loads `tokenizer.json` unchanged for its generic class. For other classes, it rebuilds the tokenizer from
the vocabulary in the file and from parts of the class. The file is therefore read directly only if it contains exactly
the parts that the class would build, and if the configuration neither adds nor changes tokens. All other cases raise
UnknownTokenizer, and transformers must then load the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy.rendering.json_files import read_json
from proxy.vision.model_config import is_vision_model
from tokengrove.errors import ConfigurationError

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend


class UnknownTokenizer(Exception):
    """A folder is not known to give the same tokenizer without transformers; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The data that AutoTokenizer would load for one folder.

    `backend`: the tokenizer of the `tokenizers` package. `file`: the tokenizer.json that equals it; None if there is
    none. `special_tokens`: the texts of named special tokens (`eos_token` ...), as templates see them.
    `chat_templates`: the Jinja sources by name ("default", "tool_use" ...), empty if there are none.
    """

    backend: Backend
    file: Path | None
    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str]


GENERIC_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""The classes for which transformers loads tokenizer.json unchanged."""

LLAMA_CLASS = "LlamaTokenizer"
"""Like the generic classes if tokenizer.json is byte-level; else transformers builds it from SentencePiece parts."""

SPLITS = {
    "Qwen2Tokenizer": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "Qwen3_5Tokenizer": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
"""The classes that transformers rebuilds and whose parts are known here, with the pattern that splits text."""

# transformers uses these classes for these model types, whatever class the configuration names.
_CLASS_OF_TYPE = {
    "qwen2": "Qwen2Tokenizer",
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp"), "Qwen3_5Tokenizer"),
}
# transformers has other tokenizers for these types, or chooses by the installed packages.
_OTHER_TYPES = ("mistral", "ministral", "mixtral", "pixtral", "voxtral", "siglip2", "hyperclovax")

_BUILT_DEFAULTS = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
_CHANGING = ("auto_map", "fast_tokenizer_files", "split_special_tokens", "fix_mistral_regex", "init_inputs")


_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab*", "merges.txt", "tekken.json", "*.model", "*.tiktoken")


def require_vocabulary(folder: Path) -> None:
    """Raise ConfigurationError for a folder without any file from which tokenizers are built."""
    if not any(any(folder.glob(pattern)) for pattern in _VOCABULARIES):
        raise ConfigurationError(
            f"no tokenizer in {folder}: it has no tokenizer.json, nor any other vocabulary; give a folder that has one"
        )


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Read the tokenizer in `folder`. Raises UnknownTokenizer, ConfigurationError for a broken configuration file, and
    Exception (from `tokenizers`, which has no class of its own) for a broken tokenizer.json."""
    from tokenizers import Tokenizer as Backend

    config, file = read_json(folder / "tokenizer_config.json"), folder / "tokenizer.json"
    if not file.is_file():
        raise UnknownTokenizer("it has no tokenizer.json")
    kind = tokenizer_class(config, read_json(folder / "config.json").get("model_type"))
    for key in _CHANGING:
        if config.get(key):
            raise UnknownTokenizer(f"tokenizer_config.json sets {key}")
    backend = Backend.from_file(str(file))
    named, extra = _special_tokens(folder, config, _BUILT_DEFAULTS if kind in SPLITS else {})
    added = backend.get_added_tokens_decoder()
    _require_unchanged(folder, config, added)
    if missing := {*named.values(), *extra} - {token.content for token in added.values()}:
        raise UnknownTokenizer(f"tokenizer.json lacks the special token {min(missing)}")
    if kind == LLAMA_CLASS and '"ByteLevel"' not in file.read_text(encoding="utf-8"):
        raise UnknownTokenizer(f"its tokenizer_class is {LLAMA_CLASS}, and tokenizer.json is not byte-level")
    if kind in SPLITS:
        _require_built(kind, backend, config, {*named.values(), *extra})
    return TokenizerFiles(backend, file, named, chat_templates(folder, config))


def tokenizer_class(config: Mapping[str, Any], model_type: object) -> str:
    """Return the class that AutoTokenizer uses, without "Fast" in a known name. Raises UnknownTokenizer."""
    named, of_model = str(config.get("tokenizer_class")), str(model_type or "")
    if of_model.startswith(_OTHER_TYPES):
        raise UnknownTokenizer(f"its model_type is {of_model}")
    bare = named.removesuffix("Fast")
    if named not in GENERIC_CLASSES and bare not in (LLAMA_CLASS, *SPLITS):
        raise UnknownTokenizer(f"its tokenizer_class is {named}")
    if of_model in _CLASS_OF_TYPE:
        return _CLASS_OF_TYPE[of_model]
    if bare in SPLITS and not of_model.startswith("qwen"):
        raise UnknownTokenizer(f"its tokenizer_class is {named} and its model_type {of_model or 'unknown'}")
    return named if named in GENERIC_CLASSES else bare


def chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name: from separate files, else from tokenizer_config.json.

    A vision model may have a template for its processor, which takes precedence, as in transformers' processors.
    """
    if own := processor_template(folder):
        return {"default": own}
    named = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    found = {path.name.removesuffix(".jinja"): path.read_text(encoding="utf-8") for path in named}
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        found["default"] = alone.read_text(encoding="utf-8")
    given = config.get("chat_template")
    if found or not given:
        return found
    return {"default": given} if isinstance(given, str) else {one["name"]: one["template"] for one in given}


def processor_template(folder: Path) -> str | None:
    """Return the chat template of a processor in the form of older files; None if there is none."""
    if not is_vision_model(folder):
        return None
    for name in ("processor_config.json", "chat_template.json"):
        if isinstance(own := read_json(folder / name).get("chat_template"), str):
            return own
    return None


def _special_tokens(
    folder: Path, config: Mapping[str, Any], defaults: Mapping[str, str]
) -> tuple[dict[str, str], set[str]]:
    """Return the named special tokens, and the texts of the other special tokens."""
    settings = {**defaults, **config}
    if "added_tokens_decoder" not in config:
        settings |= read_json(folder / "special_tokens_map.json")
    texts = {key: _text(value) for key, value in settings.items() if key.endswith("_token")}
    named = {key: text for key, text in texts.items() if text is not None}
    extra: set[str] = set()
    for key in ("extra_special_tokens", "additional_special_tokens"):
        given = settings.get(key) or []
        if isinstance(given, dict):
            named |= {name: text for name, value in given.items() if (text := _text(value)) is not None}
        else:
            extra.update(text for value in given if (text := _text(value)) is not None)
    return named, extra


def _text(token: object) -> str | None:
    """Return the text of a token in a configuration file: a string, or an object with its `content`."""
    if isinstance(token, dict):
        return str(token.get("content"))
    return token if isinstance(token, str) else None


def _require_unchanged(folder: Path, config: Mapping[str, Any], added: Mapping[int, AddedToken]) -> None:
    """Raise UnknownTokenizer unless every token that the configuration adds is in tokenizer.json, with the same id."""
    for key, token in (config.get("added_tokens_decoder") or {}).items():
        known = added.get(int(key))
        if known is None or _flags(known) != {**_PLAIN, "normalized": not token.get("special"), **token}:
            raise UnknownTokenizer(f"tokenizer_config.json changes the added token {token.get('content')}")
    if "added_tokens_decoder" in config:
        return
    for text, number in read_json(folder / "added_tokens.json").items():
        if number not in added or added[number].content != text:
            raise UnknownTokenizer(f"added_tokens.json adds {text}")


_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "special": False}


def _flags(token: AddedToken) -> dict[str, object]:
    return {name: getattr(token, name) for name in ("content", "normalized", *_PLAIN)}


def _require_built(kind: str, backend: Backend, config: Mapping[str, Any], special: set[str]) -> None:
    """Raise UnknownTokenizer unless `backend` has the parts that the class `kind` would build."""
    added, size = backend.get_added_tokens_decoder(), backend.get_vocab_size(with_added_tokens=False)
    expected = {**_PLAIN, "normalized": False, "special": True}
    alike = (
        _same_parts(kind, backend)
        and len(config.get("added_tokens_decoder") or added) == len(added)
        and not config.get("add_prefix_space")
        # The class adds these tokens again, in the order of their ids and with these properties.
        and sorted(added) == [*range(size, size + len(added))]
        and all(_flags(token) == {**expected, "content": token.content} for token in _among(added, special))
    )
    if not alike:
        raise UnknownTokenizer(f"tokenizer.json differs from what {kind} builds")


def _among(added: Mapping[int, AddedToken], special: set[str]) -> Iterator[AddedToken]:
    return (token for token in added.values() if token.content in special)


def _same_parts(kind: str, backend: Backend) -> bool:
    model: Any = backend.model
    split = {"type": "Split", "pattern": {"Regex": SPLITS[kind]}, "behavior": "Isolated", "invert": False}
    # `trim_offsets` moves offsets only, and the decoder's options have no effect.
    levels = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    found = _state(backend.pre_tokenizer)
    parts = [{key: one[key] for key in one if key != "trim_offsets"} for one in found.get("pretokenizers", ())]
    return (
        type(model).__name__ == "BPE"
        and not (model.dropout or model.unk_token or model.continuing_subword_prefix or model.end_of_word_suffix)
        and not (model.fuse_unk or model.byte_fallback or model.ignore_merges)
        and _state(backend.normalizer) == {"type": "NFC"}
        and parts == [split, levels]
        and _state(backend.decoder).get("type") == "ByteLevel"
    )


def _state(part: Any) -> dict[str, Any]:
    return {} if part is None else dict(json.loads(part.__getstate__()))
