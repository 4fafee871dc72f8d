"""Renderers for tests: with the built-in vocabulary, the real Qwen3 one, and any published chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rendering_folders import ASSETS, ENDS, MARKERS, write_folder, write_spelled_folder, write_spelled_tokenizer

from proxy.engine.tiny.model import build_tiny_model
from proxy.rendering import Renderer, load_renderer
from proxy.settings import Settings


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Renderer:
    return load_renderer(Settings(), tiny_folder)


@pytest.fixture(scope="session")
def qwen3_folder() -> Path:
    folder = ASSETS / "tokenizers" / "qwen3"
    if not folder.is_dir():
        pytest.skip(f"no real Qwen3 tokenizer at {folder}")
    return folder


@pytest.fixture(scope="session")
def qwen3(qwen3_folder: Path) -> Renderer:
    return load_renderer(Settings(), qwen3_folder)


@pytest.fixture(scope="session")
def published(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """Folders with the built-in vocabulary, a published chat template and the template's markers."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        source = ASSETS / "chat_templates" / f"{name}.jinja"
        if not source.is_file():
            pytest.skip(f"no chat template at {source}")
        if name not in made:
            model_type, ends = ENDS[name]
            text = source.read_text(encoding="utf-8")
            markers = [*dict.fromkeys([*MARKERS.findall(text), *ends, "<|begin_of_text|>"])]
            made[name] = write_folder(tmp_path_factory.mktemp(name), tiny_folder, text, markers, ends, model_type)
        return made[name]

    yield make


@pytest.fixture(scope="session")
def spelled(qwen3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Renderer]:
    """Renderers of published templates with the most frequent Qwen3 tokens and every family's markers."""
    if not all((ASSETS / "chat_templates" / f"{name}.jinja").is_file() for name in ENDS):
        pytest.skip(f"no chat templates at {ASSETS / 'chat_templates'}")
    tokenizer = tmp_path_factory.mktemp("spelled") / "tokenizer.json"
    ids = write_spelled_tokenizer(qwen3_folder, tokenizer)
    loaded: dict[str, Renderer] = {}

    def load(name: str) -> Renderer:
        if name not in loaded:
            folder = write_spelled_folder(tmp_path_factory.mktemp(name), tokenizer, name, ids)
            loaded[name] = load_renderer(Settings(), folder)
        return loaded[name]

    return load
