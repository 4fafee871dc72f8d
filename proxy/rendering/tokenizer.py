"""The tokenizer. `encode` returns the same ids as Hugging Face's tokenizer, whichever encoder does the work.

The fast encoder (fastokens) is used only if it agrees with Hugging Face's on varied text at start-up. Encoders are not
thread-safe, so each call takes one from a pool: no two threads use the same encoder at once.
"""

from __future__ import annotations

import json
import random
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from proxy.errors import ConfigurationError
from proxy.rendering.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer

Encode = Callable[[str], list[int]]

# Hugging Face raises these for a folder without a usable tokenizer: missing or broken files, unknown classes.
_LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError)


class Tokenizer:
    """Encodes and decodes text with the vocabulary of one folder. Thread-safe."""

    def __init__(self, hugging_face: Any) -> None:
        self.hugging_face = hugging_face
        self._backend = hugging_face.backend_tokenizer
        self._json: str = self._backend.to_str()
        self._added = {int(key): str(token) for key, token in hugging_face.added_tokens_decoder.items()}
        self._pieces = _Pieces(self._spell)
        self._idle: deque[Encode] = deque()
        # Loading the fast encoder takes a second; Hugging Face's encodes until it is ready.
        with_it = ThreadPoolExecutor(1, "encoder")
        self._chosen: Future[tuple[Callable[[], Encode], str]] = with_it.submit(self._choose_encoder)
        with_it.shutdown(wait=False)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load the tokenizer of `folder`. Raises ConfigurationError (one line) if it has no usable fast tokenizer."""
        from transformers import AutoTokenizer

        if not folder.is_dir():
            raise ConfigurationError(f"no tokenizer: {folder} is not a folder; give one that holds tokenizer.json")
        try:
            loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except _LOAD_ERRORS as error:
            raise ConfigurationError(f"no tokenizer in {folder}: {str(error).strip().splitlines()[0]}") from error
        if not getattr(loaded, "is_fast", False):
            raise ConfigurationError(
                f"the tokenizer in {folder} is a slow one; this server needs a fast one (tokenizer.json)"
            )
        return cls(loaded)

    @property
    def encoder(self) -> str:
        """The encoder in use and why it was chosen. Waits for the choice, which start-up makes in the background."""
        return self._chosen.result()[1]

    @property
    def vocab_size(self) -> int:
        """One more than the highest id in the vocabulary."""
        return max(len(self.hugging_face), max(self._added, default=-1) + 1)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. Special tokens spelled in it are encoded as such; none are added around it."""
        if not text:
            return []
        if not self._chosen.done():
            return self._encode_by_reference(text)
        try:
            encode = self._idle.pop()
        except IndexError:
            encode = self._chosen.result()[0]()
        try:
            return encode(text)
        finally:
            self._idle.append(encode)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens included."""
        return str(self._backend.decode(_as_list(ids), skip_special_tokens=False))

    def token_id(self, text: str) -> int | None:
        """Return the id of the token spelled `text`, or None if there is none."""
        found = self._backend.token_to_id(text)
        return None if found is None else int(found)

    def is_marker(self, token: int) -> bool:
        """Return whether `token` is an added token (special or not): the tokenizer never merges text across it."""
        return token in self._added

    def piece(self, token: int) -> bytes:
        """Return the UTF-8 bytes of one token; empty for ids outside the vocabulary."""
        return self._pieces[token]

    def detokenizer(self) -> Detokenizer:
        """Return a new incremental detokenizer for this vocabulary."""
        return ByteDetokenizer(self._pieces) if self._byte_level else WindowDetokenizer(self.decode)

    @cached_property
    def _byte_level(self) -> bool:
        """True if every token stands for bytes. Checked on the sample texts: a decoder may do more than join bytes."""
        if '"ByteLevel"' not in json.dumps(json.loads(self._json).get("decoder")):
            return False
        sample = self.encode("".join(sample_texts()))
        joined = b"".join(self._spell(token, byte_level=True) for token in sample)
        return joined.decode("utf-8", "replace") == self.decode(sample)

    def _spell(self, token: int, byte_level: bool | None = None) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        text = self._backend.id_to_token(token)
        if text is None:
            return b""
        if self._byte_level if byte_level is None else byte_level:
            if all(char in _BYTE_OF_CHAR for char in text):
                return bytes(_BYTE_OF_CHAR[char] for char in text)
            return str(text).encode()
        if len(text) == 6 and text.startswith("<0x"):
            return bytes([int(text[3:5], 16)])
        return str(text).replace("\u2581", " ").encode()

    def _choose_encoder(self) -> tuple[Callable[[], Encode], str]:
        """Return a factory of encoders and the reason for it. The first fast encoder goes into the pool."""
        try:
            fast = self._make_fast()
        except (ImportError, ValueError, RuntimeError, NotImplementedError) as error:
            return self._make_reference, f"tokenizers (fastokens: {str(error).strip().splitlines()[0]})"
        if any(fast(text) != self._encode_by_reference(text) for text in sample_texts()):
            return self._make_reference, "tokenizers (fastokens gave other ids in the self-check)"
        self._idle.append(fast)
        return self._make_fast, "fastokens (same ids as tokenizers in the self-check)"

    def _encode_by_reference(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def _make_fast(self) -> Encode:
        from fastokens import Tokenizer as FastTokenizer

        encode = FastTokenizer.from_json_str(self._json).encode
        return lambda text: list(encode(text, False).ids)

    def _make_reference(self) -> Encode:
        from tokenizers import Tokenizer as ReferenceTokenizer

        encode = ReferenceTokenizer.from_str(self._json).encode
        return lambda text: list(encode(text, add_special_tokens=False).ids)


class _Pieces(dict[int, bytes]):
    """The bytes of tokens, each spelled when it is first asked for."""

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
