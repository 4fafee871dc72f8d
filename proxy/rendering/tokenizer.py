"""The tokenizer. `encode` and `decode` give the results of Hugging Face's tokenizer, whichever package is used.

fastokens encodes four times faster than `tokenizers`. It is used only if both agree, in both directions, on varied text
at start-up. The other tokenizer is then dropped: each of them holds the whole vocabulary.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy.rendering.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from proxy.rendering.token_bound import LONG, TokenBound
from proxy.rendering.tokenizer_files import TokenizerFiles, UnknownTokenizer, processor_template, read_tokenizer
from proxy.types import Ids, ids_of
from tokengrove.errors import ConfigurationError, how_to_get

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

Encode = Callable[[str], Ids]

# The maximum memory of fastokens' cache of texts between special tokens, such as a system message with tools, and of
# their ids.
_SEGMENT_BYTES = 32 * 2**20

# Hugging Face raises these for a folder without a usable tokenizer: missing or broken files, unknown classes.
_LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError)


class Tokenizer:
    """Encodes and decodes text with the vocabulary of one folder. Thread-safe.

    `encoder`: the package in use, and why. `vocab_size`: the highest id in the vocabulary plus one. `special_tokens`:
    the texts of named special tokens (`eos_token` ...). `opening`: the ids that Hugging Face's tokenizer adds before a
    text that is not a chat (BOS). `chat_templates`: Jinja sources by name.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self.special_tokens: Mapping[str, str] = files.special_tokens
        self.chat_templates: Mapping[str, str] = files.chat_templates
        reference = files.backend
        # Files may contain limits from a training run. Prompts are never truncated or padded.
        reference.no_truncation()
        reference.no_padding()
        self._added = {number: str(token.content) for number, token in reference.get_added_tokens_decoder().items()}
        self._special = {number for number, token in reference.get_added_tokens_decoder().items() if token.special}
        self.vocab_size = max(reference.get_vocab_size(), max(self._added, default=-1) + 1)
        self.opening = _opening(reference)
        self._pieces = _Pieces(self._spell)
        self._backend, self._encode, self.encoder = _choose(files)
        self._normal_form = _normal_form(reference)
        decoder = reference.decoder
        self._byte_level = decoder is not None and b"ByteLevel" in decoder.__getstate__() and self._joins_bytes()

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load the tokenizer of `folder`. Raises ConfigurationError (one line) if it has no usable fast tokenizer."""
        if not folder.is_dir():
            raise ConfigurationError(f"no tokenizer: {folder} is not a folder; give one that holds tokenizer.json")
        try:
            return cls(read_tokenizer(folder))
        except UnknownTokenizer as error:
            return cls(_read_by_transformers(folder, str(error)))
        except ConfigurationError:
            raise
        except Exception as error:  # `tokenizers` raises nothing more specific
            raise _unreadable(folder, error) from error

    def encode(self, text: str) -> Ids:
        """Return the ids of `text`. Special tokens spelled in it are encoded as such; none are added around it.

        In a block of `token_bound.at_most`, raises TooManyTokens for a long text that certainly has more tokens.
        """
        if len(text) > LONG and self._bound is not None:
            self._bound.check(text)
        return self._encode(text)

    def forget_texts(self) -> None:
        """Free the memory of the latest texts, unless a text is being encoded now."""
        if forget := getattr(self._backend, "enable_segment_cache", None):
            with contextlib.suppress(RuntimeError):
                forget(_SEGMENT_BYTES)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens included."""
        return str(self._backend.decode(_as_list(ids), skip_special_tokens=False))

    def without_special(self, ids: Sequence[int]) -> list[int]:
        """Return `ids` without special tokens, like Hugging Face's tokenizer when it decodes without them."""
        return [number for number in ids if number not in self._special]

    def token_id(self, text: str) -> int | None:
        """Return the id of the token spelled `text`, or None if there is none."""
        found = self._backend.token_to_id(text)
        return None if found is None else int(found)

    def token(self, number: int) -> str | None:
        """Return the token with the id `number` in the vocabulary's spelling, or None if there is none."""
        found = self._backend.id_to_token(number)
        return None if found is None else str(found)

    def special_token_id(self, name: str) -> int | None:
        """Return the id of a named special token (`eos_token` ...), or None if the tokenizer has none."""
        text = self.special_tokens.get(name)
        return None if text is None else self.token_id(text)

    def is_marker(self, token: int) -> bool:
        """Return whether `token` is an added token (special or not): text is never merged across it."""
        return token in self._added

    def is_special(self, token: int) -> bool:
        """Return whether `token` is left out when text is decoded without special tokens."""
        return token in self._special

    def piece(self, token: int) -> bytes:
        """Return the UTF-8 bytes of one token; empty for ids outside the vocabulary."""
        return self._pieces[token]

    def detokenizer(self) -> Detokenizer:
        """Return a new incremental detokenizer for this vocabulary."""
        return ByteDetokenizer(self._pieces) if self._byte_level else WindowDetokenizer(self.decode)

    @cached_property
    def vocabulary(self) -> bytes:
        """A digest of the token of each id: equal if and only if all ids mean the same tokens."""
        digest = hashlib.sha256()
        for number in range(self.vocab_size):
            digest.update((self.token(number) or "").encode() + b"\0")
        return digest.digest()

    @cached_property
    def _bound(self) -> TokenBound | None:
        """Built for the first long text; None if the tokens of a text may spell other bytes than the text has."""
        if not self._byte_level or self._normal_form is None:
            return None
        return TokenBound(map(self._spell, range(self.vocab_size)), composed=self._normal_form == "NFC")

    def _joins_bytes(self) -> bool:
        """Return whether decoding only joins the bytes of tokens, on the sample texts: some decoders do more."""
        sample = self.encode("".join(sample_texts()))
        joined = b"".join(self._spell(token, byte_level=True) for token in sample)
        return joined.decode("utf-8", "replace") == self.decode(sample)

    def _spell(self, token: int, byte_level: bool | None = None) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        text = self.token(token)
        if text is None:
            return b""
        if self._byte_level if byte_level is None else byte_level:
            try:
                return bytes(map(_BYTE_OF_CHAR.__getitem__, text))
            except KeyError:  # text, not stand-ins for bytes
                return text.encode()
        if len(text) == 6 and text.startswith("<0x"):
            return bytes([int(text[3:5], 16)])
        return text.replace("\u2581", " ").encode()


def _normal_form(backend: Backend) -> str | None:
    """Return the Unicode form that texts get before encoding: "" for no change, None for any other change.

    Added tokens that absorb the white space next to them also change a text.
    """
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    if backend.normalizer is None:
        return ""
    kind = json.loads(backend.normalizer.__getstate__())
    return "NFC" if kind["type"] == "NFC" else "" if kind == {"type": "Sequence", "normalizers": []} else None


def _opening(backend: Backend) -> Ids:
    text = "a"
    plain = backend.encode(text, add_special_tokens=False).ids
    whole = backend.encode(text, add_special_tokens=True).ids
    ahead = (at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
    return ids_of(whole[: next(ahead, 0)])


def _read_by_transformers(folder: Path, reason: str) -> TokenizerFiles:
    """Read a tokenizer that only transformers can build, because of `reason`. Raises ConfigurationError."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigurationError(
            f"the tokenizer in {folder} needs the package transformers ({reason}): {how_to_get('tokengrove[cpu]')}"
        )
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except _LOAD_ERRORS as error:
        raise _unreadable(folder, error) from error
    if not getattr(loaded, "is_fast", False):
        raise ConfigurationError(
            f"the tokenizer in {folder} is a slow one; this server needs a fast one (tokenizer.json)"
        )
    given = loaded.chat_template or {}
    templates = {"default": given} if isinstance(given, str) else dict(given)
    if own := processor_template(folder):
        templates = {"default": own}
    named = {name: text for name, text in loaded.special_tokens_map.items() if isinstance(text, str)}
    return TokenizerFiles(loaded.backend_tokenizer, None, named, templates)  # transformers 4 also names a list


def _unreadable(folder: Path, error: Exception) -> ConfigurationError:
    return ConfigurationError(f"no tokenizer in {folder}: {str(error).strip().splitlines()[0]}")


def _choose(files: TokenizerFiles) -> tuple[Any, Encode, str]:
    """Return the tokenizer to use, its `encode`, and the reason."""
    reference = files.backend

    def encode_by_reference(text: str) -> Ids:
        return ids_of(reference.encode(text, add_special_tokens=False).ids)

    try:
        fast = _load_fast(files)
    except (ImportError, ValueError, RuntimeError, NotImplementedError) as error:
        return reference, encode_by_reference, f"tokenizers (fastokens: {str(error).strip().splitlines()[0]})"

    encode_flat = fast.encode_batch_flat

    def encode(text: str) -> Ids:
        ids = ids_of()
        ids.frombytes(encode_flat([text])[0])  # 32-bit ids without Python integers take half the time of a list
        return ids

    for text in sample_texts():
        ids = encode_by_reference(text).tolist()
        if encode(text).tolist() != ids or not _decode_alike(reference, fast, ids):
            return reference, encode_by_reference, "tokenizers (fastokens gave other ids or text in the self-check)"
    return fast, encode, "fastokens (same ids and text as tokenizers in the self-check)"


def _load_fast(files: TokenizerFiles) -> Any:
    from fastokens import Tokenizer as FastTokenizer

    if files.file is None:
        fast = FastTokenizer.from_json_str(files.backend.to_str())
    else:
        fast = FastTokenizer.from_file(str(files.file))
    fast.no_truncation()
    fast.no_padding()
    fast.enable_segment_cache(_SEGMENT_BYTES)
    return fast


def _decode_alike(reference: Backend, fast: Any, ids: list[int]) -> bool:
    """Compare whole sequences, their halves (which may divide a character), and an id outside the vocabulary."""
    middle, beyond = len(ids) // 2, reference.get_vocab_size() + 1000
    parts = (ids, ids[:middle], ids[middle:], [*ids[:3], beyond])
    return all(
        fast.decode(part, skip_special_tokens=False) == reference.decode(part, skip_special_tokens=False)
        for part in parts
    )


class _Pieces(dict[int, bytes]):
    """The bytes of tokens, computed on first use."""

    def __init__(self, spell: Callable[[int], bytes]) -> None:
        super().__init__()
        self._spell = spell

    def __missing__(self, token: int) -> bytes:
        piece = self[token] = self._spell(token)
        return piece


def sample_texts() -> list[str]:
    """Return the texts of the self-check: prose, code, white space, many scripts, emoji, markers, random characters."""
    texts = [
        "The quick brown fox doesn't jump; it's 12,345.678 km away -- or isn't it?  \n\n Yes!\t\tNo.",
        "def f(x: int) -> str:\n    return f'{x!r:>10}' # \\n\n\n\tif x == 0x1F and not (y >= 3.0e-7):\n        pass\n",
        ' \n  \r\n\t \u00a0\u3000 a  b   c    \n\n\n\n{"a": [1, 2.5, null, "\\u00e9"], "b": {}}',
        "naïve café, Zu\u0308rich, \u212b, \ufb01, Ελληνικά, русский, עברית, العربية, हिन्दी, 中文字符, 日本語, 한국어",
        "🙂👩‍👩‍👧‍👦🏳️‍🌈 e\u0301\u0323 \u200d\u200b\ufeff\x00\x1b\x7f",
        "<|im_start|>user\nhi<|im_end|>\n<think>\n\n</think>\n\n<tool_call>{}</tool_call> <|endoftext|><s></s>[INST]",
        "<tool_call ><|im_start|<|im_end|>|> <|im_end|> \n<|im_start|>x",
    ]
    noise = random.Random(0)
    ranges = ((0x20, 0x7F), (0xA0, 0x250), (0x370, 0x600), (0x4E00, 0x5000), (0x1F300, 0x1F700), (0x9, 0xE))
    for length in (3, 17, 80, 400, 1500):
        low_high = [noise.choice(ranges) for _ in range(length)]
        texts.append("".join(chr(noise.randrange(low, high)) for low, high in low_high))
    return texts


def _as_list(ids: Sequence[int]) -> list[int]:
    return ids.tolist() if isinstance(ids, array) else list(ids)


def _byte_of_char() -> dict[str, int]:
    """Return the byte for each printable stand-in that byte-level vocabularies use (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + offset): byte for offset, byte in enumerate(others)})
    return table


_BYTE_OF_CHAR = _byte_of_char()
