"""A tokenizer that is read without transformers is AutoTokenizer's; one that is not known to be is left to it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendering_folders import ASSETS, ROOT
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from proxy.rendering import tokenizer as tokenizers
from proxy.rendering.families import FAMILIES
from proxy.rendering.templates.chat_template import ChatTemplate
from proxy.rendering.tokenizer import Tokenizer, sample_texts
from proxy.rendering.tokenizer_files import SPLITS, UnknownTokenizer, read_tokenizer, tokenizer_class
from tests.wide import CROSSED, WIDE, few, first
from tokengrove.errors import ConfigurationError

CLASSES = (
    *("TokenizersBackend", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast", "Qwen3_5Tokenizer"),
    *("LlamaTokenizer", "LlamaTokenizerFast"),
)
Edit = Callable[[dict[str, Any]], object]


def corpus() -> list[str]:
    """Return texts of every kind: the self-check's, this project's documents and code, and edges of normalisation."""
    files = [ROOT / "docs" / "concepts.md", ROOT / "proxy" / "rendering" / "bridge.py"]
    edges = [
        "e\u0301 é \u1e9b\u0323 ﬁ Å",
        "  a",
        "a  ",
        "<s>hi</s>",
        "<|endoftext|>\n\n<|im_end|> <think>x</think>",
        "\u0939\u093f",
    ]
    return [*sample_texts(), *edges, *(file.read_text(encoding="utf-8") for file in files)]


def assert_equal(ours: Tokenizer, theirs: Any, texts: Sequence[str]) -> None:
    """Compare ids, text, added tokens, special tokens and what stands at the ends of a text."""
    for text in texts:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert list(ours.encode(text)) == ids, text[:80]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
        assert ours.decode(ids[1::2]) == theirs.decode(ids[1::2], skip_special_tokens=False)
        assert [*ours.opening, *ids] == theirs(text)["input_ids"]
    added = theirs.added_tokens_decoder
    assert {number: token.content for number, token in added.items()} == ours._added
    assert ours.vocab_size == max(len(theirs), max(added, default=-1) + 1)
    assert dict(ours.special_tokens) == theirs.special_tokens_map
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert ours.special_token_id(name) == getattr(theirs, f"{name}_id")
    given = theirs.chat_template or {}
    assert dict(ours.chat_templates) == ({"default": given} if isinstance(given, str) else given)
    for number in (*added, 0, 1, 255, 256, ours.vocab_size - 1):
        assert ours.token(number) == theirs.convert_ids_to_tokens(number)
        assert ours.token_id(theirs.convert_ids_to_tokens(number)) == number


def folder_like(
    base: Path, target: Path, *, model_type: str = "qwen3", edit: Edit | None = None, **config: Any
) -> Path:
    """Write a copy of the folder `base` with other entries in its configuration; None removes one."""
    shutil.copytree(base, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    if edit is not None:
        spelled = json.loads((base / "tokenizer.json").read_text(encoding="utf-8"))
        edit(spelled)
        (target / "tokenizer.json").unlink()
        (target / "tokenizer.json").write_text(json.dumps(spelled), encoding="utf-8")
    given = json.loads((base / "tokenizer_config.json").read_text(encoding="utf-8")) | config
    for name, value in (
        ("tokenizer_config.json", {key: value for key, value in given.items() if value is not None}),
        ("config.json", {"model_type": model_type}),
    ):
        (target / name).unlink(missing_ok=True)
        (target / name).write_text(json.dumps(value), encoding="utf-8")
    return target


@pytest.fixture(params=sorted(path.name for path in (ASSETS / "tokenizers").glob("*/")) or ["none"])
def real(request: pytest.FixtureRequest) -> Path:
    folder = ASSETS / "tokenizers" / str(request.param)
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"no real tokenizers at {ASSETS / 'tokenizers'}")
    return folder


@pytest.mark.wide
def test_a_real_folder_is_read_as_autotokenizer_reads_it(real: Path) -> None:
    assert_equal(Tokenizer(read_tokenizer(real)), AutoTokenizer.from_pretrained(real), corpus())


@pytest.mark.parametrize("name", first(["Qwen2Tokenizer", "PreTrainedTokenizerFast"]))
@pytest.mark.wide
def test_a_real_vocabulary_is_read_alike_under_a_class_that_transformers_builds(
    real: Path, tmp_path: Path, name: str
) -> None:
    folder = folder_like(real, tmp_path, model_type="qwen2", tokenizer_class=name, extra_special_tokens=None)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert type(theirs).__name__ == "Qwen2Tokenizer"
    assert_equal(Tokenizer(read_tokenizer(folder)), theirs, corpus())


def split_of(name: str) -> Edit:
    def edit(spelled: dict[str, Any]) -> None:
        spelled["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = SPLITS[name]

    return edit


@pytest.mark.parametrize(
    ("name", "model_type", "edit"),
    [
        *((name, "qwen3", None) for name in CLASSES if "3_5" not in name),
        *((name, "llama", None) for name in ("LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast")),
        *(pytest.param(name, "qwen2", None, marks=WIDE) for name in CLASSES),
        *(pytest.param(name, "qwen3_5", split_of("Qwen3_5Tokenizer"), marks=WIDE) for name in CLASSES),
        ("Qwen3_5Tokenizer", "qwen_unheard_of", split_of("Qwen3_5Tokenizer")),
    ],
)
def test_each_allowed_class_is_read_as_autotokenizer_reads_it(
    tiny_folder: Path, tmp_path: Path, name: str, model_type: str, edit: Edit | None
) -> None:
    folder = folder_like(tiny_folder, tmp_path, model_type=model_type, edit=edit, tokenizer_class=name)
    assert_equal(Tokenizer(read_tokenizer(folder)), AutoTokenizer.from_pretrained(folder), corpus())


TYPES = sorted({one for family in FAMILIES for one in family.model_types} | {"qwen4_exp", "made_up"})


@pytest.mark.parametrize("model_type", few(TYPES, ("qwen2", "qwen3_5", "llama", "made_up")))
def test_the_class_is_the_one_that_autotokenizer_takes(tiny_folder: Path, tmp_path: Path, model_type: str) -> None:
    """Whatever the type of the model: a class that is built anew is the same for both, and a generic one generic."""
    for name in CLASSES:
        try:
            ours = tokenizer_class({"tokenizer_class": name}, model_type)
        except UnknownTokenizer:
            continue
        folder = folder_like(tiny_folder, tmp_path, model_type=model_type, tokenizer_class=name)
        theirs = type(AutoTokenizer.from_pretrained(folder)).__name__
        assert theirs == (ours if ours in SPLITS else "TokenizersBackend"), (name, model_type)


FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


@CROSSED
@pytest.mark.parametrize(
    "config",
    [
        {"bos_token": {"__type": "AddedToken", "content": "<|endoftext|>", **FLAGS}},
        {"image_token": "<think>"},
        {"additional_special_tokens": ["<think>", "</think>"]},
        {"extra_special_tokens": {"thought_token": "<think>"}},
        {"added_tokens_decoder": {"631": {"content": "<|endoftext|>", **FLAGS}}},
        {"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]},
        {"chat_template": None},
        {"add_bos_token": True, "clean_up_tokenization_spaces": True, "padding_side": "left"},
        {"eos_token": None},
    ],
    ids=lambda config: " ".join(config),
)
@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "Qwen2Tokenizer"])
def test_a_configuration_is_read_as_autotokenizer_reads_it_or_left_to_it(
    tiny_folder: Path, tmp_path: Path, name: str, config: dict[str, Any]
) -> None:
    folder = folder_like(tiny_folder, tmp_path, tokenizer_class=name, **config)
    assert_equal(Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder), sample_texts())


@pytest.mark.parametrize(
    ("edit", "config"),
    [
        (lambda spelled: spelled.update(normalizer=None), {}),
        (lambda spelled: spelled["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r"\s+"), {}),
        (lambda spelled: spelled["model"].update(ignore_merges=True), {}),
        (lambda spelled: spelled["added_tokens"][0].update(lstrip=True), {}),
        (None, {"added_tokens_decoder": {"631": {"content": "<|endoftext|>", **FLAGS}}}),
        (None, {"add_prefix_space": True}),
    ],
)
def test_a_file_without_the_parts_that_the_class_builds_is_left_to_transformers(
    tiny_folder: Path, tmp_path: Path, edit: Edit | None, config: dict[str, Any]
) -> None:
    folder = folder_like(tiny_folder, tmp_path, edit=edit, tokenizer_class="Qwen2Tokenizer", **config)
    with pytest.raises(UnknownTokenizer, match="differs from what Qwen2Tokenizer builds"):
        read_tokenizer(folder)
    assert_equal(Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder), sample_texts())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"tokenizer_class": "GPT2Tokenizer"}, "tokenizer_class is GPT2Tokenizer"),
        ({"tokenizer_class": None}, "tokenizer_class is None"),
        ({"split_special_tokens": True}, "sets split_special_tokens"),
        ({"eos_token": "<|new|>"}, r"lacks the special token <\|new\|>"),
        ({"extra_special_tokens": ["<|new|>"]}, r"lacks the special token <\|new\|>"),
        ({"added_tokens_decoder": {"700": {"content": "<|new|>", **FLAGS}}}, "changes the added token"),
        ({"added_tokens_decoder": {"634": {"content": "<tool_call>", **FLAGS}}}, "changes the added token"),
    ],
)
def test_what_is_not_known_to_load_alike_is_left_to_transformers(
    tiny_folder: Path, tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    folder = folder_like(tiny_folder, tmp_path, **config)
    with pytest.raises(UnknownTokenizer, match=reason):
        read_tokenizer(folder)
    assert_equal(Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder), sample_texts())


def test_tokens_of_older_files_are_read_or_left_to_transformers(tiny_folder: Path, tmp_path: Path) -> None:
    folder = folder_like(tiny_folder, tmp_path)
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|endoftext|>", **FLAGS}, "bos_token": "<|im_start|>"}), encoding="utf-8"
    )
    (folder / "added_tokens.json").write_text(json.dumps({"<tool_call>": 634}), encoding="utf-8")
    ours = Tokenizer(read_tokenizer(folder))
    assert ours.special_tokens["eos_token"] == "<|endoftext|>"
    assert_equal(ours, AutoTokenizer.from_pretrained(folder), sample_texts())
    (folder / "added_tokens.json").write_text(json.dumps({"<tool_call>": 634, "<|new|>": 700}), encoding="utf-8")
    with pytest.raises(UnknownTokenizer, match="added_tokens"):
        read_tokenizer(folder)


def test_templates_in_files_come_before_those_in_the_configuration(tiny_folder: Path, tmp_path: Path) -> None:
    folder = folder_like(tiny_folder, tmp_path)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools", encoding="utf-8")
    (folder / "chat_template.jinja").write_text("plain", encoding="utf-8")
    ours = Tokenizer.load(folder)
    assert dict(ours.chat_templates) == {"default": "plain", "tool_use": "tools"}
    assert_equal(ours, AutoTokenizer.from_pretrained(folder), ["x"])


def test_limits_of_a_training_run_never_cut_or_pad_a_prompt(tiny_folder: Path, tmp_path: Path) -> None:
    limits = {
        "truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            **{"strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0},
            **{"pad_type_id": 0, "pad_token": "<|endoftext|>"},
        },
    }
    folder = folder_like(tiny_folder, tmp_path, edit=lambda spelled: spelled.update(limits))
    text = "A text of more than eight tokens, and of fewer than sixty-four."
    assert Tokenizer.load(folder).encode(text) == Tokenizer.load(tiny_folder).encode(text)


def test_without_transformers_an_unknown_class_is_refused_with_the_way_out(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_like(tiny_folder, tmp_path, tokenizer_class="GPT2Tokenizer")
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"GPT2Tokenizer.*pip install 'tokengrove\[cpu\]'"):
        Tokenizer.load(folder)


@pytest.fixture(scope="session")
def qwen2(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    folder = folder_like(tiny_folder, tmp_path_factory.mktemp("qwen2"), tokenizer_class="Qwen2Tokenizer")
    return Tokenizer(read_tokenizer(folder)), AutoTokenizer.from_pretrained(folder)


@settings(max_examples=200)
@given(text=st.text(max_size=40))
def test_any_text_has_the_ids_of_a_built_class(qwen2: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = qwen2
    text = text.encode("utf-8", "ignore").decode()
    assert list(ours.encode(text)) == theirs(text, add_special_tokens=False)["input_ids"]


def test_a_text_opens_with_the_tokens_that_the_file_puts_before_it(tiny_folder: Path, tmp_path: Path) -> None:
    """As in Llama's files, whose post-processor puts BOS before a text."""

    def edit(spelled: dict[str, Any]) -> None:
        single = [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        spelled["post_processor"] = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": single,
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [7], "tokens": ["<bos>"]}},
        }

    ours = Tokenizer.load(folder_like(tiny_folder, tmp_path, edit=edit))
    assert list(ours.opening) == [7]
    assert list(ours.encode("text")) == list(Tokenizer.load(tiny_folder).encode("text"))


def test_special_tokens_that_transformers_4_names_in_a_list_are_left_out(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled templates are kept by the texts of named tokens, and transformers 5 names no others."""
    named = AutoTokenizer.from_pretrained(tiny_folder).special_tokens_map
    of_version_4 = property(lambda _: {**named, "additional_special_tokens": ["<a>"]})
    monkeypatch.setattr(PreTrainedTokenizerBase, "special_tokens_map", of_version_4)
    tokenizer = Tokenizer(tokenizers._read_by_transformers(tiny_folder, "a test"))
    assert dict(tokenizer.special_tokens) == named
    assert ChatTemplate(tokenizer).engine
