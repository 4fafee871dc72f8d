"""`tokengrove doctor --engine` tells what answers at each URL, what it can do, and why it cannot be used."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import Result
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from typer.testing import CliRunner

from proxy.engine.interface import PauseMode
from proxy.engine.tiny.model import build_tiny_model
from proxy.rendering import load_renderer
from proxy.settings import Settings
from tests.engines.wire import LiveWire, serving_wire
from tokengrove import commands


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny_model(folder)
    return folder


async def doctor(*flags: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, commands.app, ["doctor", *flags])


def facts(output: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in output.splitlines():
        found.setdefault(line[:12].strip(), []).append(line[12:])
    return found


async def test_a_vllm_server_is_described() -> None:
    async with serving_wire("vllm") as (url, wire):
        wire.mode = "raw_logprobs"
        done = await doctor("--engine", url)
    told = facts(done.stdout)
    assert (done.exit_code, told["server"], told["usable"]) == (0, [url], ["yes"])
    assert (told["engine"], told["model"], told["weights"]) == (["vLLM 0.0"], ["wire"], ["version 0"])
    assert {"forced tools, JSON schemas and other formats", "weight updates"} <= set(told["can"])
    assert told["cannot"] == ["nothing"]
    assert told["logprobs"][0].startswith("raw_logprobs: of temperature 1") and "logprobs_of: model" in done.stdout
    assert [sentence.split()[1] for sentence in told["missing"]] == ["--logprobs-mode"]
    assert told["paused"][0].startswith("no") and told["samples"][0].startswith("a token in ")


async def test_flags_that_a_server_lacks_are_told_with_their_cost() -> None:
    async with serving_wire("vllm") as (url, wire):
        wire.scale_out = wire.controls = False
        told = facts((await doctor("--engine", url)).stdout)
    flags = ["--enable-scale-out", "VLLM_SERVER_DEV_MODE=1", "--lora-target-modules"]
    assert [sentence.split()[1] for sentence in told["missing"]] == flags
    assert {"forced tools, JSON schemas and other formats", "weight updates"} <= set(told["cannot"])
    assert told["logprobs"][0].startswith("processed_logprobs: ")


async def test_an_sglang_server_is_described() -> None:
    async with serving_wire("sglang") as (url, _):
        done = await doctor("--engine", url)
    told = facts(done.stdout)
    assert (done.exit_code, told["engine"], told["missing"][0][:24]) == (0, ["SGLang 0.0"], "with --grammar-backend n")


async def test_a_paused_server_is_not_sampled() -> None:
    async with serving_wire("vllm") as (url, wire):
        await wire.engine.pause(PauseMode.IN_PLACE)
        done = await doctor("--engine", url)
    told = facts(done.stdout)
    assert (done.exit_code, told["paused"][0][:3], "samples" in told) == (0, "yes", False)


async def test_a_url_without_a_server_and_a_page_are_told_and_end_with_1() -> None:
    live = LiveWire()
    await live.start()
    live.page = True
    done = await doctor("--engine", f"http://127.0.0.1:1,{live.url}")
    await live.kill()
    nothing, page = facts(done.stdout)["usable"]
    assert done.exit_code == 1
    assert "does not answer" in nothing and "neither an SGLang nor a vLLM server" in page


async def test_a_server_that_needs_a_key_is_used_with_it() -> None:
    live = LiveWire(key="secret")
    await live.start()
    without = await doctor("--engine", live.url)
    given = await doctor("--engine", live.url, "--engine-arg", "api_key=secret")
    await live.kill()
    assert (without.exit_code, given.exit_code) == (1, 0)
    assert "needs a key: give --engine-arg api_key=KEY" in without.stdout
    assert "secret" not in given.stdout


async def test_a_server_that_cannot_sample_is_not_usable() -> None:
    async with serving_wire("sglang") as (url, wire):
        wire.fails = lambda prompt: True
        done = await doctor("--engine", url)
    assert done.exit_code == 1 and "an illegal memory access" in facts(done.stdout)["usable"][0]


@pytest.mark.parametrize(
    ("path", "listed"),
    [("/workers", {"workers": [{"url": "http://w:1"}]}), ("/list_workers", {"urls": ["http://w:1"]})],
)
async def test_a_router_is_not_usable_and_its_servers_are_named(path: str, listed: dict[str, object]) -> None:
    async def workers(request: Request) -> Response:
        return JSONResponse(listed)

    live = LiveWire()
    await live.start()
    live._app.router.routes.append(Route(path, workers))
    done = await doctor("--engine", live.url)
    await live.kill()
    usable = facts(done.stdout)["usable"][0]
    assert done.exit_code == 1 and "is a router" in usable and usable.endswith("--engine http://w:1")


async def test_a_server_is_compared_with_the_model_that_is_named(tiny_folder: Path) -> None:
    named = ("--tokenizer", str(tiny_folder))
    async with serving_wire("vllm") as (url, wire):
        unnamed = facts((await doctor("--engine", url)).stdout)
        unable = facts((await doctor("--engine", url, *named)).stdout)
        wire.spells = load_renderer(Settings(), tiny_folder).encode
        same = await doctor("--engine", url, *named)
        wire.spells = lambda text: [7]
        other = await doctor("--engine", url, *named)
        unchecked = facts((await doctor("--engine", url, *named, "--engine-arg", "check_model=false")).stdout)
    assert unnamed["tokenizer"] == ["not compared: give --model or --tokenizer"]
    assert unable["tokenizer"] == ["not compared: it has no /tokenize that encodes texts"]
    assert unchecked["tokenizer"] == ["not compared: check_model=false"]
    assert f"encodes texts as --tokenizer {tiny_folder} does" in same.stdout and "verdict" in same.stdout
    assert (same.exit_code, other.exit_code) == (0, 1)
    assert "it serves another model (wire)" in facts(other.stdout)["usable"][0]


async def test_json_has_a_line_for_each_server_and_one_for_the_model(tiny_folder: Path) -> None:
    async with serving_wire("vllm") as (url, _):
        done = await doctor("--engine", f"{url},http://127.0.0.1:1", "--tokenizer", str(tiny_folder), "--json")
    alive, dead, model = map(json.loads, done.stdout.splitlines())
    assert (alive["url"], alive["usable"], alive["facts"]["missing"]) == (url, True, [])
    assert (dead["usable"], dead["facts"]) == (False, {}) and "does not answer" in dead["problem"]
    assert {check["verdict"] for check in model["checks"]} == {"holds"}


async def test_other_engines_are_not_examined() -> None:
    done = await doctor("--engine", "scripted")
    assert done.exit_code == 1 and "doctor examines engine servers" in str(done.exception)
