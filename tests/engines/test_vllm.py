"""Real vLLM servers in both logprobs modes: the contract, logprobs by forward passes, pauses, weights and deaths."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from proxy.engine.contract import CHECKS, ContractCheck, check_grammars_are_followed, request_for
from proxy.engine.grammar import Grammar, GrammarPart
from proxy.engine.interface import PauseMode
from proxy.engine.pauses import Pauses
from proxy.engine.requests import GenerateRequest
from proxy.engine.servers.kinds import connect
from proxy.engine.servers.same_model import OtherModel, own_model
from proxy.rendering import load_renderer
from proxy.settings import Settings
from proxy.types import SamplingParams, ids_of
from tests.engines.engine_process import pool_of
from tests.engines.forward import check_logprobs, logprobs_by, logprobs_over_old_keys
from tests.engines.gates import AdminGate
from tests.engines.pools import Notes
from tests.engines.vllm_fields import CASES, FIELDS
from tests.engines.vllm_process import FULL, SHIM, VARIABLE, VllmProcess, build_wide_model
from tests.support import until
from tokengrove.errors import InvalidRequest

pytestmark = [
    pytest.mark.engines,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
]

PROMPT = ids_of(range(40, 60))
MODES = ("processed_logprobs", "raw_logprobs")
LONG = 3000
"""Tokens of a reply that an update of weights overtakes."""

END = 633
"""The end token of the tiny model."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} does not name the Python of an environment with vLLM")
    built = {version: tmp_path_factory.mktemp(f"wide-{version}") for version in range(3)}
    for version, folder in built.items():
        build_wide_model(folder, seed=version)
    return built


@pytest.fixture(scope="module")
def servers(folders: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, VllmProcess]]:
    logs = tmp_path_factory.mktemp("logs")
    started = {mode: VllmProcess(folders[0], logs / mode, "--logprobs-mode", mode, *FULL) for mode in MODES}
    for server in started.values():
        server.wait_ready()
    yield started
    for server in started.values():
        server.kill()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_contract(servers: dict[str, VllmProcess], mode: str, check: ContractCheck) -> None:
    async with pool_of(servers[mode].url) as pool:
        await check(pool, PROMPT)


async def test_the_server_of_another_model_is_found(servers: dict[str, VllmProcess], folders: dict[int, Path]) -> None:
    url, encode = servers[MODES[0]].url, load_renderer(Settings(), folders[0]).encode
    engine = await connect(640, None, own=own_model("--model it", encode, folders[0]))(url)
    assert engine.compared
    await engine.close()
    backwards = own_model("--model other", lambda text: encode(text[::-1]), None)
    with pytest.raises(OtherModel, match=re.escape(f"it serves another model ({folders[0]})")):
        await connect(640, None, own=backwards)(url)
    larger = replace(own_model("--model other", encode, folders[0]), sizes={"num_hidden_layers": 99})
    with pytest.raises(OtherModel, match=f"num_hidden_layers [0-9]+ in {folders[0]}, --model other 99: "):
        await connect(640, None, own=larger)(url)


LETTERS = Grammar(((GrammarPart("a"),), (GrammarPart("b"),)), repeat=True)


def asked(case: tuple[str, ...], number: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=12, seed=number)
    for name in case:
        sampling = sampling._replace(**FIELDS[name].sampling)
    grammar = LETTERS if any(FIELDS[name].grammar for name in case) else None
    whole = not any(FIELDS[name].stream for name in case)
    return GenerateRequest(
        f"{number}", request_for(PROMPT, 1).prompt, sampling, stop_token_ids=(END,), grammar=grammar, whole=whole
    )


def letters(folder: Path) -> set[int]:
    """The tokens that the grammar LETTERS allows at every place."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return {token for token in range(640) if re.fullmatch("[ab]+", tokenizer.decode([token]))}


@pytest.mark.parametrize("mode", MODES)
async def test_logprobs_are_what_they_are_said_to_be_for_all_fields_and_pairs_in_one_batch(
    servers: dict[str, VllmProcess], folders: dict[int, Path], mode: str
) -> None:
    allowed = letters(folders[0])
    async with pool_of(servers[mode].url) as pool:
        await AdminGate(pool).admin.update_weights(str(folders[0]), None, PauseMode.ABORT)

        async def check(case: tuple[str, ...], number: int) -> None:
            request, chunks = asked(case, number), []
            await pool.sample(request, chunks.append)
            ids = [token for chunk in chunks for token in chunk.ids]
            told = [value for chunk in chunks for value in chunk.logprobs]
            (of,) = {chunk.logprobs_of for chunk in chunks}
            masks = [allowed, *[allowed | {END}] * 11] if request.grammar else []
            expected = logprobs_by(folders[0], PROMPT, ids, request.sampling, of, masks)
            assert told == pytest.approx(expected, abs=2e-4), f"{case}: {of}"
            rule = logprobs_by(folders[0], PROMPT, ids, request.sampling, "rule", masks)
            if of != "rule" and len(case) == 1:
                assert told != pytest.approx(rule, abs=1e-3), f"{case} equals the rule, but says {of}"

        await asyncio.gather(*(check(case, number) for number, case in enumerate(CASES)))


async def test_grammars_give_json(servers: dict[str, VllmProcess], folders: dict[int, Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    async with pool_of(servers[MODES[0]].url) as pool:
        await check_grammars_are_followed(pool, PROMPT, tokenizer.decode, [END])


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT, PauseMode.ABORT])
async def test_weights_change_under_running_requests_and_each_token_has_its_version(
    servers: dict[str, VllmProcess], folders: dict[int, Path], mode: PauseMode
) -> None:
    async with pool_of(servers[MODES[0]].url) as pool:
        gate = AdminGate(pool)
        for _ in range(5):  # where the update waits long for a core, a reply ends before it
            first = await gate.admin.update_weights(str(folders[1]), None, PauseMode.ABORT)
            begun = asyncio.Event()
            running = asyncio.create_task(gate.read(request_for(PROMPT, LONG), begun))
            await begun.wait()
            second = await gate.admin.update_weights(str(folders[2]), None, mode)
            reply = await running
            if second in reply.versions:
                break
        assert set(reply.versions) == {first, second} and len(reply.ids) == LONG
        change = reply.versions.index(second)
        if mode is PauseMode.IN_PLACE:
            expected = logprobs_over_old_keys(folders[1], folders[2], PROMPT, reply.ids, change)
            assert list(reply.logprobs) == pytest.approx(expected, abs=1e-3)
        else:
            of = {first: folders[1], second: folders[2]}
            check_logprobs(of, PROMPT, reply.ids, reply.logprobs, reply.versions, tolerance=1e-3)
        after = await gate.read(request_for(PROMPT, 40))  # no prefix of older weights is used
        check_logprobs({second: folders[2]}, PROMPT, after.ids, after.logprobs, after.versions, tolerance=1e-3)


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.IN_PLACE, PauseMode.RETRACT])
async def test_a_server_that_a_crash_left_paused_is_continued_by_the_next_pool(
    servers: dict[str, VllmProcess], mode: PauseMode
) -> None:
    notes, url = Notes(), servers[MODES[0]].url
    async with pool_of(url, notes=notes) as pool:
        await pool.pause(mode)
        assert [note.url for note in await notes.noted()] == [url]
        for member in pool._members:  # closing it would continue it
            member.paused = False
        pool.pauses = Pauses()
    async with pool_of(url, notes=notes) as pool:
        assert not await notes.noted() and [shown["state"] for shown in pool.servers()] == ["alive"]
        assert len((await AdminGate(pool).read(request_for(PROMPT, 8))).ids) == 8


async def test_a_folder_without_weights_is_refused_and_the_server_goes_on(
    servers: dict[str, VllmProcess], tmp_path: Path
) -> None:
    async with pool_of(servers[MODES[0]].url) as pool:
        gate, before = AdminGate(pool), pool.info().weight_version
        for folder in (tmp_path / "nowhere", tmp_path):
            with pytest.raises(InvalidRequest, match="no weights"):
                await gate.admin.update_weights(str(folder), None, PauseMode.ABORT)
        assert pool.info().weight_version == before
        assert len((await gate.read(request_for(PROMPT, 8))).ids) == 8


async def test_each_field_of_vllms_sampling_parameters_is_sent_or_listed_with_a_reason(
    folders: dict[int, Path],
) -> None:
    code = "from vllm.sampling_params import SamplingParams; print(*SamplingParams.__struct_fields__)"
    command = [os.environ[VARIABLE], "-c", code]
    variables = {**os.environ, "PYTHONPATH": str(SHIM)}
    told = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=True, cwd="/", env=variables
    )
    fields = {name for name in told.stdout.splitlines()[-1].split() if not name.startswith("_")}
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text(encoding="utf-8")
    tables = page.split("### Served", 1)[1].split("\n## ", 1)[0]
    assert fields and fields == set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| ([^|]*)\|", tables, re.M))))


async def test_streams_of_a_killed_server_continue_at_the_next(folders: dict[int, Path], tmp_path: Path) -> None:
    first, second = (VllmProcess(folders[0], tmp_path / name, *FULL) for name in ("first", "second"))
    try:
        first.wait_ready()
        second.wait_ready()
        async with pool_of(first.url, second.url) as pool:
            gate = AdminGate(pool)
            begun = [asyncio.Event() for _ in range(8)]
            requests = [replace(request_for(PROMPT, 1500), session_id=f"s{number}") for number in range(8)]
            running = [asyncio.create_task(gate.read(*pair)) for pair in zip(requests, begun, strict=True)]
            await asyncio.gather(*(event.wait() for event in begun))
            first.kill()
            for reply in await asyncio.gather(*running):
                check_logprobs({0: folders[0]}, PROMPT, reply.ids, reply.logprobs, reply.versions, tolerance=1e-3)
                assert len(reply.ids) == 1500
            assert {shown["url"]: shown["state"] for shown in pool.servers()}[first.url] == "ejected"
            first = VllmProcess(folders[0], tmp_path / "again", *FULL, port=first.port)
            first.wait_ready()
            await until(lambda: all(shown["state"] == "alive" for shown in pool.servers()))
    finally:
        first.kill()
        second.kill()
