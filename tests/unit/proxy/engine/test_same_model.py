"""A server that serves another model than the proxy's is found by the ids of texts, or by its config, and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.engine.create import create_engine
from proxy.engine.scripted.acting import Speech
from proxy.engine.servers.connection import Keys
from proxy.engine.servers.kinds import connect
from proxy.engine.servers.pool import Pool
from proxy.engine.servers.remote import started
from proxy.engine.servers.same_model import OtherModel, OwnModel, own_model
from proxy.engine.tiny.model import build_tiny_model
from proxy.rendering import load_renderer
from proxy.settings import Settings
from proxy.types import Ids, ids_of
from tests.engines.scripts import VOCABULARY
from tests.engines.wire import LiveWire, serving_wire
from tokengrove.errors import ConfigurationError, InvalidRequest

KINDS = pytest.mark.parametrize("kind", ["sglang", "vllm"])


def ours(text: str) -> Ids:
    return ids_of(list(text.encode()))


def theirs(text: str) -> list[int]:
    return [byte + 1 if byte > 127 else byte for byte in text.encode()]


def own(folder: Path | None = None) -> OwnModel:
    return own_model("--model ours", ours, folder)


def written(folder: Path, **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@KINDS
async def test_a_server_with_the_same_tokenizer_is_compared_and_joins(kind: str) -> None:
    async with serving_wire(kind) as (url, wire):
        wire.spells = ours
        engine = await connect(VOCABULARY, None, own=own())(url)
        assert engine.compared
        await engine.close()


@KINDS
async def test_a_server_with_another_tokenizer_is_refused_by_the_first_difference(kind: str) -> None:
    async with serving_wire(kind) as (url, wire):
        wire.spells = theirs
        with pytest.raises(OtherModel) as refused:
            await connect(VOCABULARY, None, own=own())(url)
    message = refused.value.message
    assert message.startswith(f"the server {url} encodes 'Grüße, Ελλάδα, мир' as [71, 114, 196, 189, ")
    assert ", ...], --model ours as [71, 114, 195, 188, " in message
    assert "it serves another model (wire); give --model that model" in message


@KINDS
@pytest.mark.parametrize("spells", [None, lambda text: ["The"], lambda text: 1 / 0], ids=["none", "words", "fails"])
async def test_a_server_that_encodes_no_texts_joins_without_being_compared(
    kind: str, spells: Callable[[str], list[int]] | None
) -> None:
    async with serving_wire(kind) as (url, wire):
        wire.spells = spells
        engine = await connect(VOCABULARY, None, own=own())(url)
        assert not engine.compared
        await engine.close()


async def test_a_key_of_the_server_is_sent_with_the_texts() -> None:
    live = LiveWire(key="secret")
    await live.start()
    live.wire.spells = ours
    engine = await connect(VOCABULARY, None, keys=Keys("secret", "of-the-admin"), own=own())(live.url)
    assert engine.compared
    await engine.close()
    await live.kill()


@KINDS
async def test_a_model_of_other_sizes_in_a_folder_that_exists_here_is_refused(kind: str, tmp_path: Path) -> None:
    small = written(tmp_path / "small", hidden_size=64, num_hidden_layers=2)
    large = written(tmp_path / "large", text_config={"hidden_size": 64, "num_hidden_layers": 4}, vocab_size=700)
    async with serving_wire(kind) as (url, wire):
        wire.path = str(large)
        engine = await connect(VOCABULARY, None, own=own(large))(url)
        await engine.close()
        with pytest.raises(OtherModel) as refused:
            await connect(VOCABULARY, None, own=own(small))(url)
    assert f"the server {url} has num_hidden_layers 4 in {large}, --model ours 2: it serves" in refused.value.message


@pytest.mark.parametrize("path", ["config.json", "", "/nowhere"])
async def test_a_folder_that_is_not_here_says_nothing(path: str, tmp_path: Path) -> None:
    async with serving_wire("vllm") as (url, wire):
        wire.path = path
        engine = await connect(VOCABULARY, None, own=own(written(tmp_path / "small", hidden_size=64)))(url)
        await engine.close()


async def test_a_pool_whose_servers_all_serve_another_model_does_not_wait_for_them() -> None:
    async with serving_wire("vllm") as (url, wire):
        wire.spells = theirs
        pool = Pool([url], connect(VOCABULARY, None, own=own()), start_timeout_s=60.0)
        with pytest.raises(ConfigurationError, match=rf"^--engine: the server {url} encodes"):
            await pool.start()


async def test_a_server_with_another_model_is_left_out_of_a_pool_that_works() -> None:
    async with serving_wire("vllm") as (good, _), serving_wire("sglang") as (other, wire):
        wire.spells = theirs
        pool = Pool([good, other], connect(VOCABULARY, None, own=own()), start_timeout_s=60.0)
        await pool.start()
        shown = {server["url"]: server for server in await pool.show()}
        assert (shown[good]["state"], shown[other]["state"]) == ("alive", "missing")
        assert "it serves another model (wire)" in str(shown[other]["failure"])
        await pool.remove(other)
        with pytest.raises(InvalidRequest, match=r"cannot join the pool: the server .* serves another model"):
            await pool.add(other)
        await pool.close()


@KINDS
async def test_a_server_that_returns_with_another_model_is_refused(kind: str) -> None:
    async with serving_wire(kind) as (url, wire):
        wire.spells = ours
        engine = await connect(VOCABULARY, None, own=own())(url)
        wire.spells = theirs
        with pytest.raises(OtherModel):
            await started(engine)
        await engine.close()


async def test_servers_are_compared_with_the_tokenizer_of_the_proxy(tmp_path: Path) -> None:
    build_tiny_model(tmp_path)
    speech: Speech = load_renderer(Settings(), tmp_path)
    async with serving_wire("vllm") as (url, wire):
        wire.spells = theirs
        pool = create_engine(Settings(engine=url), VOCABULARY, speech)
        with pytest.raises(ConfigurationError, match=r"the built-in model tokengrove-tiny as \["):
            await pool.start()
        wire.spells = speech.encode
        pool = create_engine(Settings(engine=url), VOCABULARY, speech)
        await pool.start()
        await pool.close()
        wire.spells = theirs
        pool = create_engine(Settings(engine=url, engine_arg=("check_model=false",)), VOCABULARY, speech)
        await pool.start()
        await pool.close()


def test_check_model_is_true_or_false() -> None:
    with pytest.raises(ConfigurationError, match=r"^--engine-arg check_model=no must be true or false$"):
        create_engine(Settings(engine="http://h:1", engine_arg=("check_model=no",)), VOCABULARY)
