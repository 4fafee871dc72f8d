"""LoRA adapters on simulated SGLang and vLLM servers: on all servers or on none, and never the base model instead."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from proxy.engine.chunks import TokenChunk, of_adapter
from proxy.engine.contract import complete
from proxy.engine.interface import AdapterEngine, AdapterSource, Capability, PauseMode
from proxy.engine.requests import GenerateRequest
from proxy.engine.servers.kinds import connect
from proxy.engine.servers.remote import AdapterLost
from proxy.engine.servers.sglang_server import SglangServer
from proxy.engine.servers.vllm_server import VllmServer
from proxy.engine.sglang.facts import adapterless_by, capabilities_by
from proxy.types import Logprobs, ids_of
from tests.engines.gates import AdminGate
from tests.engines.pools import OVER_BOTH, PROMPT, SELDOM_S, of_session, pool_of, states, wires
from tests.engines.scripts import VOCABULARY, following
from tests.engines.wire import LiveWire, adapter_taste, serving_wire
from tests.support import until
from tokengrove.errors import EngineFailed, EngineIncapable, EngineLost, EngineUnavailable, InvalidRequest
from tokengrove.reasons import FinishReason

Folders = Callable[[int], AdapterSource]


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    """Makes the folder of an adapter, with contents that are those of its number."""

    def of(number: int) -> AdapterSource:
        folder = tmp_path / f"adapter-{number}"
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
        (folder / "adapter_model.safetensors").write_bytes(b"weights %d" % number)
        return AdapterSource(str(folder))

    return of


def naming(version: int | None, session_id: str = "s", tokens: int = 12, *, stream: bool = True) -> GenerateRequest:
    return replace(of_session(session_id, tokens=tokens, stream=stream), adapter=version)


def changed(source: AdapterSource) -> AdapterSource:
    """The same folder with other weights."""
    Path(source.path, "adapter_model.safetensors").write_bytes(b"changed")
    return source


def tokens_of(source: AdapterSource, count: int = 12) -> list[int]:
    return following(PROMPT, count, adapter_taste(source.path))


def names_on(wire: LiveWire) -> list[str]:
    return sorted(wire.wire.adapters)


@OVER_BOTH
@pytest.mark.parametrize("stream", [True, False])
async def test_versions_serve_at_once_and_tokens_carry_the_version_of_their_adapter(
    kind: str, stream: bool, folders: Folders
) -> None:
    async with wires(2, kind=kind, delay_s=0.001) as live, pool_of(*(wire.url for wire in live)) as pool:
        assert isinstance(pool, AdapterEngine) and Capability.ADAPTERS in pool.info().capabilities
        await pool.update_weights("/weights/30", 30)
        for version in (3, 4, 9):
            await pool.load_adapter(version, folders(version))
        gate = AdminGate(pool)
        versions = [3, 4, 9, None] * 3
        replies = await asyncio.gather(
            *(gate.read(naming(version, f"s{n}", stream=stream)) for n, version in enumerate(versions))
        )
        for version, reply in zip(versions, replies, strict=True):
            assert reply.ids == (following(PROMPT, 12) if version is None else tokens_of(folders(version)))
            assert set(reply.versions) == {30 if version is None else version}


@OVER_BOTH
async def test_a_name_on_servers_has_the_version_and_the_contents_and_is_the_same_after_a_restart(
    kind: str, folders: Folders
) -> None:
    async with wires(1, kind=kind) as (wire,):
        async with pool_of(wire.url) as pool:
            await pool.load_adapter(7, folders(7))
        (name,) = names_on(wire)
        assert name.startswith("tokengrove-v7-") and len(name) == len("tokengrove-v7-") + 8
        async with pool_of(wire.url) as pool:
            await pool.load_adapter(7, folders(7))
            assert names_on(wire) == [name]
            await pool.load_adapter(8, folders(7))
        assert len(names_on(wire)) == 2
        async with pool_of(wire.url) as pool:
            await pool.load_adapter(7, folders(70))
            assert (await complete(pool, naming(7))).ids == tokens_of(folders(70))
        assert len(names_on(wire)) == 3


async def test_a_folder_that_only_the_server_sees_gets_a_name_of_its_own(folders: Folders, tmp_path: Path) -> None:
    async with wires(1, kind="vllm") as (wire,):
        wire.wire.load = _loads_anything(wire)
        names = []
        for _ in range(2):
            async with pool_of(wire.url) as pool:
                await pool.load_adapter(1, AdapterSource("/elsewhere/1"))
                await pool.load_adapter(1, AdapterSource("/elsewhere/1"))
            names.append(set(names_on(wire)))
        assert [len(each) for each in names] == [1, 2]


def _loads_anything(wire: LiveWire) -> Callable[[str, str], object]:
    async def load(name: str, path: str) -> str:
        wire.wire.adapters[name] = path
        return ""

    return load


async def test_a_version_that_is_loaded_takes_no_other_contents(folders: Folders) -> None:
    async with wires(1) as (wire,), pool_of(wire.url) as pool:
        await pool.load_adapter(1, folders(1))
        await pool.load_adapter(1, folders(1))
        with pytest.raises(InvalidRequest, match="another version"):
            await pool.load_adapter(1, folders(2))
        with pytest.raises(InvalidRequest, match="other contents"):
            await pool.load_adapter(1, changed(folders(1)))
        assert len(names_on(wire)) == 1


@OVER_BOTH
async def test_a_load_that_one_of_two_servers_refuses_publishes_nothing(kind: str, folders: Folders) -> None:
    async with wires(2, kind=kind) as live, pool_of(*(wire.url for wire in live)) as pool:
        live[1].wire.refuses_adapters = True
        with pytest.raises(InvalidRequest, match="rank 64 is larger") as refused:
            await pool.load_adapter(1, folders(1))
        assert refused.value.param == "path"
        assert [names_on(wire) for wire in live] == [[], []]
        with pytest.raises(EngineUnavailable, match="adapter version 1 is not loaded"):
            await complete(pool, naming(1))
        live[1].wire.refuses_adapters = False
        await pool.load_adapter(1, folders(1))
        assert (await complete(pool, naming(1))).ids == tokens_of(folders(1))


@OVER_BOTH
async def test_a_server_that_dies_during_a_load_gets_the_adapter_when_it_returns(kind: str, folders: Folders) -> None:
    async with wires(2, kind=kind) as live, pool_of(*(wire.url for wire in live)) as pool:
        live[1].wire.before_load.clear()
        loading = asyncio.create_task(pool.load_adapter(1, folders(1)))
        await until(lambda: live[1].wire.loading == 1)
        await live[1].kill()
        await loading
        assert names_on(live[0]) and (await complete(pool, naming(1))).ids == tokens_of(folders(1))
        await live[1].start()
        await until(lambda: states(pool)[live[1].url] == "alive")
        assert names_on(live[1]) == names_on(live[0])


@OVER_BOTH
async def test_a_server_that_joins_has_all_adapters_before_its_first_request(kind: str, folders: Folders) -> None:
    async with wires(2, kind=kind) as live, pool_of(live[0].url) as pool:
        for version in (1, 2):
            await pool.load_adapter(version, folders(version))
        live[1].wire.before_load.clear()
        joining = asyncio.create_task(pool.add(live[1].url))
        await until(lambda: live[1].wire.loading == 1)
        assert states(pool)[live[1].url] == "missing"
        await pool.load_adapter(3, folders(3))
        await pool.unload_adapter(1)
        live[1].wire.before_load.set()
        await joining
        assert states(pool)[live[1].url] == "alive"
        assert names_on(live[1]) == names_on(live[0]) and len(names_on(live[1])) == 2


@OVER_BOTH
async def test_a_load_that_a_server_joins_meanwhile_reaches_it_too(kind: str, folders: Folders) -> None:
    async with wires(2, kind=kind) as live, pool_of(live[0].url) as pool:
        live[0].wire.before_load.clear()
        loading = asyncio.create_task(pool.load_adapter(1, folders(1)))
        await until(lambda: live[0].wire.loading == 1)
        await pool.add(live[1].url)
        live[0].wire.before_load.set()
        await loading
        assert names_on(live[1]) == names_on(live[0]) != []


@OVER_BOTH
@pytest.mark.parametrize("stream", [True, False])
async def test_a_restarted_server_never_answers_with_the_base_model(kind: str, stream: bool, folders: Folders) -> None:
    async with wires(1, kind=kind) as (wire,), pool_of(wire.url, check_s=SELDOM_S) as pool:
        await pool.load_adapter(5, folders(5))
        gate = AdminGate(pool)
        await gate.read(naming(5))
        await wire.kill()
        await wire.start()
        assert not names_on(wire)
        reply = await gate.read(naming(5, stream=stream))
        assert reply.ids == tokens_of(folders(5)) and set(reply.versions) == {5}
        assert states(pool)[wire.url] == "alive" and len(names_on(wire)) == 1


@OVER_BOTH
async def test_a_server_that_lost_an_adapter_gets_it_again_without_a_request(kind: str, folders: Folders) -> None:
    async with wires(2, kind=kind) as live, pool_of(*(wire.url for wire in live)) as pool:
        await pool.load_adapter(5, folders(5))
        live[1].wire.adapters.clear()
        await until(lambda: names_on(live[1]) == names_on(live[0]))
        assert set(states(pool).values()) == {"alive"}


async def test_a_server_that_does_not_say_at_once_which_adapters_it_has_is_kept(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def busy() -> frozenset[str]:
        raise EngineLost("it does not answer within 5 s")

    async with wires(1) as (wire,), pool_of(wire.url, check_s=SELDOM_S) as pool:
        await pool.load_adapter(5, folders(5))
        monkeypatch.setattr(pool._members[0].engine, "adapters", busy)
        await pool._look_at(pool._members[0])
        assert states(pool)[wire.url] == "alive"


@OVER_BOTH
async def test_a_server_that_refuses_an_adapter_that_it_lost_is_ejected(kind: str, folders: Folders) -> None:
    async with wires(2, kind=kind) as live, pool_of(*(wire.url for wire in live), check_s=SELDOM_S) as pool:
        await pool.load_adapter(5, folders(5))
        (member,) = [each for each in pool._members if each.url == live[1].url]
        live[1].wire.adapters.clear()
        live[1].wire.refuses_adapters = True
        await pool._look_at(member)
        assert states(pool)[member.url] == "ejected"
        assert "does not load adapter version 5, which the others have: " in member.failure
        assert (await complete(pool, naming(5))).ids == tokens_of(folders(5))


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"enable_lora": True}, ""),
        ({"enable_lora": True, "dp_size": 1}, ""),
        ({"enable_lora": True, "dp_size": 2}, "dp_size 2"),
        ({"enable_lora": None}, "takes no LoRA adapters; with flags"),
        ({}, "takes no LoRA adapters; with flags"),
    ],
)
def test_what_sglang_says_of_itself_decides_whether_it_takes_adapters(facts: dict[str, object], why: str) -> None:
    told = adapterless_by(facts, "with flags")
    assert why in told and bool(told) == bool(why)
    assert (Capability.ADAPTERS in capabilities_by(facts)) == (not why)


@OVER_BOTH
async def test_a_restarted_server_gets_the_weights_before_its_adapters(kind: str, folders: Folders) -> None:
    async with wires(1, kind=kind) as (wire,), pool_of(wire.url) as pool:
        gate = AdminGate(pool)
        await gate.admin.update_weights("/weights/2", 2, PauseMode.IN_PLACE)
        await pool.load_adapter(5, folders(5))
        await wire.kill()
        await wire.start()
        assert set((await gate.read(naming(5))).versions) == {5}
        order = [call for call, _ in wire.wire.calls]
        loads = {"/update_weights_from_disk", "/collective_rpc"} & set(order)
        assert order.index(loads.pop()) < order.index("load") and wire.wire.version == "2"


@OVER_BOTH
async def test_a_server_that_returns_without_the_flag_stays_out_and_says_why(kind: str, folders: Folders) -> None:
    async with wires(2, kind=kind) as live, pool_of(*(wire.url for wire in live), check_s=SELDOM_S) as pool:
        await pool.load_adapter(5, folders(5))
        (member,) = [each for each in pool._members if each.url == live[1].url]
        await live[1].kill()
        await pool._look_at(member)
        await live[1].start()
        live[1].wire.lora = False
        await pool._look_at(member)
        assert states(pool)[member.url] == "ejected" and "--enable-lora" in member.failure
        assert (await complete(pool, naming(5))).ids == tokens_of(folders(5))


@OVER_BOTH
async def test_a_pool_with_a_server_that_takes_no_adapters_lacks_the_capability_and_names_the_flags(
    kind: str, folders: Folders
) -> None:
    async with wires(2, kind=kind) as live:
        live[1].wire.lora = False
        async with pool_of(*(wire.url for wire in live)) as pool:
            assert Capability.ADAPTERS not in pool.info().capabilities
            with pytest.raises(EngineIncapable, match=f"{live[1].url}.*--enable-lora"):
                await pool.load_adapter(1, folders(1))
            assert [names_on(wire) for wire in live] == [[], []]
            with pytest.raises(EngineUnavailable, match="adapter version 1 is not loaded"):
                await complete(pool, naming(1))


async def test_a_vllm_without_runtime_updating_names_the_variable(folders: Folders) -> None:
    async with serving_wire("vllm") as (url, wire):
        wire.runtime_lora = False
        engine = VllmServer(url, VOCABULARY)
        await engine.start()
        assert Capability.ADAPTERS not in engine.info().capabilities
        with pytest.raises(EngineIncapable, match=r"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 .*--enable-lora"):
            await engine.load_adapter("x", folders(1))
        await engine.close()


async def test_a_vllm_that_does_not_tell_its_flags_is_found_out_by_the_first_load(folders: Folders) -> None:
    async with serving_wire("vllm") as (url, wire):
        wire.lora = wire.controls = False
        engine = VllmServer(url, VOCABULARY)
        await engine.start()
        assert Capability.ADAPTERS in engine.info().capabilities
        with pytest.raises(EngineIncapable, match="--enable-lora"):
            await engine.load_adapter("x", folders(1))
        await engine.close()


async def test_a_folder_that_a_vllm_server_does_not_see_is_refused_with_the_reason() -> None:
    async with serving_wire("vllm") as (url, _):
        engine = VllmServer(url, VOCABULARY)
        await engine.start()
        with pytest.raises(InvalidRequest, match="a file system that it shares"):
            await engine.load_adapter("x", AdapterSource("/nowhere"))
        await engine.close()


async def test_an_sglang_with_as_many_adapters_as_it_may_have_takes_no_more(folders: Folders) -> None:
    async with wires(1) as (wire,):
        wire.wire.most_adapters = 2
        async with pool_of(wire.url) as pool:
            for version in (1, 2):
                await pool.load_adapter(version, folders(version))
            with pytest.raises(EngineUnavailable, match="--max-loaded-loras"):
                await pool.load_adapter(3, folders(3))
            await pool.unload_adapter(1)
            await pool.load_adapter(3, folders(3))


@OVER_BOTH
async def test_a_request_for_an_adapter_without_its_name_is_not_sent(kind: str) -> None:
    async with serving_wire(kind) as (url, wire):
        engine = await connect(VOCABULARY, None)(url)
        with pytest.raises(EngineFailed, match="without its name"):
            await engine.sample(naming(4), lambda chunk: None)
        assert not wire.asked
        await engine.close()


@OVER_BOTH
@pytest.mark.parametrize("stream", [True, False])
async def test_a_server_that_does_not_know_the_name_raises_adapter_lost(kind: str, stream: bool) -> None:
    async with serving_wire(kind) as (url, _):
        engine = await connect(VOCABULARY, None)(url)
        request = replace(naming(4, stream=stream), adapter_name="tokengrove-v4-00000000")
        with pytest.raises(AdapterLost, match="does not have adapter version 4"):
            await engine.sample(request, lambda chunk: None)
        await engine.close()


async def test_a_reply_of_another_model_than_the_adapter_fails(folders: Folders) -> None:
    async with wires(1, kind="vllm") as (wire,):
        wire.wire.scale_out = False
        async with pool_of(wire.url) as pool:
            await pool.load_adapter(4, folders(4))
            assert (await complete(pool, naming(4))).ids == tokens_of(folders(4))
            wire.wire.says_model = "wire"
            with pytest.raises(EngineFailed, match="answered as 'wire', but was asked as 'tokengrove-v4-"):
                await complete(pool, naming(4))


@OVER_BOTH
async def test_an_unloaded_adapter_is_gone_everywhere_and_its_requests_are_refused(kind: str, folders: Folders) -> None:
    async with wires(2, kind=kind) as live, pool_of(*(wire.url for wire in live), check_s=SELDOM_S) as pool:
        await pool.load_adapter(1, folders(1))
        await pool.unload_adapter(1)
        await pool.unload_adapter(1)
        assert [names_on(wire) for wire in live] == [[], []]
        with pytest.raises(EngineUnavailable, match="adapter version 1 is not loaded"):
            await complete(pool, naming(1))


@OVER_BOTH
async def test_a_server_that_did_not_answer_an_unload_unloads_when_it_answers(
    kind: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(name: str) -> None:
        raise EngineLost("it does not answer")

    async with wires(1, kind=kind) as (wire,), pool_of(wire.url) as pool:
        await pool.load_adapter(1, folders(1))
        with monkeypatch.context() as patched:
            patched.setattr(pool._members[0].engine, "unload_adapter", lost)
            await pool.unload_adapter(1)
            assert len(names_on(wire)) == 1
        await until(lambda: not names_on(wire))


async def test_sessions_of_an_adapter_stay_on_the_server_that_holds_their_prefix(folders: Folders) -> None:
    async with wires(2) as live, pool_of(*(wire.url for wire in live)) as pool:
        for version in (1, 2):
            await pool.load_adapter(version, folders(version))
        for _ in range(4):
            await complete(pool, naming(1, "one", 160))
            await complete(pool, naming(2, "two", 160))
        assert sorted(shown["served"] for shown in pool.servers()) == [4, 4]


async def test_versions_of_weights_do_not_reach_the_tokens_of_an_adapter() -> None:
    taken: list[TokenChunk] = []

    def take(chunk: TokenChunk) -> FinishReason | None:
        taken.append(chunk)
        return None

    of = of_adapter(take, 7)
    of(TokenChunk(ids_of([1]), Logprobs("f", [-1.0]), 3, corrected=((1, 2),), unsure=1))
    of(TokenChunk(ids_of(), Logprobs("f"), 4, corrected=((1, 4),), unsure=-1))
    of(TokenChunk(ids_of(), Logprobs("f"), 4, FinishReason.LENGTH))
    assert [(chunk.version, chunk.corrected, chunk.unsure) for chunk in taken] == [(7, (), 0)] * 2


async def test_a_name_that_sglang_has_already_counts_as_loaded(folders: Folders) -> None:
    async with serving_wire("sglang") as (url, wire):
        engine = SglangServer(url, VOCABULARY)
        await engine.start()
        for _ in range(2):
            await engine.load_adapter("a", folders(1))
        assert await engine.adapters() == {"wire", "a"} and wire.adapters == {"a": folders(1).path}
        await engine.unload_adapter("a")
        await engine.unload_adapter("b")
        assert await engine.adapters() == {"wire"}
        await engine.close()


async def test_a_folder_that_changed_since_its_publication_is_not_given_to_a_server(folders: Folders) -> None:
    async with wires(1) as (wire,), pool_of(wire.url) as pool:
        source = folders(1)
        await pool.load_adapter(1, source)
        name = names_on(wire)
        await asyncio.to_thread(Path(source.path, "adapter_config.json").write_text, "{}")
        wire.wire.adapters.clear()
        with pytest.raises(EngineUnavailable, match="has changed since the version was published"):
            await pool._adapters.give(pool._members[0].engine)
        assert name and not names_on(wire)


async def test_an_adapter_whose_undone_load_is_repeated_stays_on_every_server(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(name: str, source: AdapterSource) -> None:
        raise InvalidRequest("refused")

    async def lose(name: str) -> None:
        raise EngineLost("gone")

    async with wires(2) as (one, other), pool_of(one.url, other.url) as pool:
        first, second = (member.engine for member in pool._members)
        with monkeypatch.context() as patched:
            patched.setattr(first, "load_adapter", refuse)
            patched.setattr(second, "unload_adapter", lose)
            with pytest.raises(InvalidRequest, match="refused"):
                await pool.load_adapter(1, folders(1))
        await pool.load_adapter(1, folders(1))
        for engine in (first, second):
            await pool._adapters.give(engine)
        assert names_on(one) == names_on(other) != []
