"""The tokenizer of the built-in models: byte-level BPE, trained at build time, identical on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.engine.tiny.template import MARKER_TOKENS, SPECIAL_TOKENS, TRAINING_TEXT
from tokengrove.errors import ConfigurationError

VOCAB_SIZE = 640
"""256 bytes, 375 merges and 9 added tokens. The embedding has no spare row, so every sampled id decodes."""

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(more_special: Sequence[str] = ()) -> Any:
    """Return the tokenizer, with `more_special` tokens after its VOCAB_SIZE. Raises ConfigurationError."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    added = len(SPECIAL_TOKENS) + len(MARKER_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - added, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKER_TOKENS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ConfigurationError(f"the training text gave {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in more_special])
    return tokenizer


def tokenizer_config(chat_template: str, context_length: int) -> dict[str, Any]:
    """Return the content of tokenizer_config.json."""
    return {
        "chat_template": chat_template,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": context_length,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
