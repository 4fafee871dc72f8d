import ast
import json
import os
import random
import re
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from proxy.engine.tiny import model
from proxy.engine.tiny.model import CONTEXT_LENGTH, VOCAB_SIZE, build_tiny_model, builtin_model_folder
from proxy.engine.tiny.template import MARKER_TOKENS, SPECIAL_TOKENS
from tokengrove.errors import ConfigurationError

transformers = pytest.importorskip("transformers")

ASSETS = Path(os.environ.get("TOKENGROVE_TEST_ASSETS", Path(__file__).parents[4].parent / "shared"))
TOOL = {"type": "function", "function": {"name": "f", "description": "é", "parameters": {"type": "object"}}}
CONTENTS = ["hi", "\nhey\n", "", "<think>\nabc\n</think>\n\nans", "<tool_response>x</tool_response>", "a</think>b"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return builtin_model_folder(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_two_builds_are_identical_and_another_seed_changes_only_the_weights(folder, tmp_path):
    build_tiny_model(tmp_path / "again")
    build_tiny_model(tmp_path / "seeded", seed=1)
    ours, again, seeded = contents(folder), contents(tmp_path / "again"), contents(tmp_path / "seeded")
    assert ours == again
    assert [name for name in ours if ours[name] != seeded[name]] == ["model.safetensors"]


def test_the_folder_is_built_once_even_by_concurrent_builders(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: builtin_model_folder(tmp_path / "cache"), range(8)))
    assert list((tmp_path / "cache").iterdir()) == [*folders]
    before = (folder := folders.pop()).stat().st_mtime_ns
    assert builtin_model_folder(tmp_path / "cache") == folder and folder.stat().st_mtime_ns == before


def test_the_default_folder_is_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert builtin_model_folder().parent == tmp_path / "tokengrove"


def test_without_a_home_the_folder_is_in_the_temporary_one(tmp_path, monkeypatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert builtin_model_folder().parent.parent == tmp_path


def test_a_cache_that_cannot_be_written_is_a_configuration_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        builtin_model_folder(tmp_path / "file")


def test_every_id_decodes_and_text_survives(tokenizer):
    assert len(tokenizer) == VOCAB_SIZE
    for text in ("def f(x):\n    return x\n\n\n", "Zürich 東京 🙂 \x00\t", "a<b>  c"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert all(tokenizer.decode([token]) for token in range(VOCAB_SIZE))


def test_added_tokens_are_single_ids_and_only_markers_survive_skipping(tokenizer):
    for token in (*SPECIAL_TOKENS, *MARKER_TOKENS):
        ids = tokenizer.encode(token)
        assert len(ids) == 1
        assert bool(tokenizer.decode(ids, skip_special_tokens=True)) == (token in MARKER_TOKENS)
    assert tokenizer.eos_token == "<|im_end|>"


def test_transformers_loads_all_of_it(folder):
    torch = pytest.importorskip("torch")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert (model.config.model_type, model.config.max_position_embeddings) == ("qwen3", CONTEXT_LENGTH)
    with torch.no_grad():
        spread = model(torch.arange(50)[None]).logits.std()
    assert 0.5 < spread < 3.0


def conversation(choose: random.Random) -> list[dict]:
    messages = [{"role": "system", "content": choose.choice(CONTENTS)}] if choose.random() < 0.5 else []
    for _ in range(choose.randint(1, 6)):
        message = {"role": choose.choice(["user", "assistant", "tool"]), "content": choose.choice(CONTENTS)}
        if message["role"] == "assistant" and choose.random() < 0.4:
            message["reasoning_content"] = choose.choice(["hm", "", "\nso\n"])
        if message["role"] == "assistant" and choose.random() < 0.5:
            call = {"function": {"name": "f", "arguments": choose.choice(['{"a":1}', {"a": [1, "é"]}])}}
            message["tool_calls"] = [call] * choose.randint(1, 2)
        messages.append(message)
    return messages


def options(choose: random.Random) -> dict:
    thinking = {"enable_thinking": choose.random() < 0.5} if choose.random() < 0.5 else {}
    return {"tools": choose.choice([None, [TOOL]]), "add_generation_prompt": choose.random() < 0.5, **thinking}


def test_the_template_renders_like_qwen3s(tokenizer):
    original = ASSETS / "chat_templates" / "qwen3.jinja"
    if not original.is_file():
        pytest.skip(f"{original} is not there (TOKENGROVE_TEST_ASSETS)")
    template, choose = original.read_text(), random.Random(0)
    for _ in range(300):
        messages, kwargs = conversation(choose), options(choose)
        ours = tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
        assert ours == tokenizer.apply_chat_template(messages, tokenize=False, chat_template=template, **kwargs)


def test_qwen3s_renderer_gives_the_tokens_of_the_template(tokenizer):
    renderers = pytest.importorskip("renderers.qwen3")
    renderer = renderers.Qwen3Renderer(tokenizer)
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello\n\nthere"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": json.dumps({"ok": True})},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "thanks"},
    ]
    for count in (2, 5, 7):
        rendered = renderer.render(messages[:count], tools=[TOOL], add_generation_prompt=True)
        expected = tokenizer.apply_chat_template(
            messages[:count], tools=[TOOL], add_generation_prompt=True, return_dict=False
        )
        assert list(rendered.token_ids) == list(expected)


def test_the_built_in_model_is_built_without_the_extras() -> None:
    """A server with the scripted engine or the mailbox starts after `pip install .`."""
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    plain = {re.split(r"[<>=\[;]", line)[0] for line in project["dependencies"]}
    source = ast.parse(Path(model.__file__).read_text())
    imported = {node.module.split(".")[0] for node in ast.walk(source) if isinstance(node, ast.ImportFrom)}
    assert imported - sys.stdlib_module_names - {"proxy", "tokengrove"} <= plain
