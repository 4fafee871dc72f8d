"""A simulated SGLang or vLLM server that samples by a script.

Run `python -m tests.engines.wire sglang 8123 0.02` (kind, port, seconds per token). The same tests against the real
SGLang and the real vLLM verify its form.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import io
import struct
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from proxy.engine.contract import CollectedReply
from proxy.engine.interface import PauseMode
from proxy.engine.requests import GenerateRequest
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.prompt_ids import PromptIds
from proxy.types import SamplingParams, ids_of
from tests import impatience  # noqa: F401 (servers stop at once)
from tests.engines.scripts import VOCABULARY, model_like
from tokengrove.errors import InvalidRequest
from tokengrove.reasons import FinishReason

CONTEXT = 8192
IMAGE = 600
"""The placeholder of images, unless a test says otherwise; an image has one for each 28 x 28 pixels."""


class Wire:
    """Common to both kinds: a scripted engine, and the parsing of requests.

    `fails`: whether SGLang's answer to a prompt is 500. `breaks_after`: the number of tokens after which its streams
    report an error, or with `stops_short` end without a finish reason. `asked`: the prompts of its requests.
    `headers`: the headers of each request to generate. `sees`: whether its model does; None: it does not say.
    `pictures`: the bytes of the images that it got. `bodies`: its requests that had some. `encodes`: what it makes of
    the ids of a prompt with images. `lora`: it was started with --enable-lora. `adapters`: the folders of its adapters
    by name. `refuses_adapters`: it fails to load any. `before_load`: loads wait for it.
    """

    def __init__(self, delay_s: float, incremental: bool = False) -> None:
        self.engine = ScriptedEngine(model_like(delay_s), vocab_size=VOCABULARY, context_length=CONTEXT)
        self.incremental = incremental
        self.version = "default"
        self.lie: str | None = None
        """The version that answers name, in their spans too, in place of the true one."""
        self.tells_spans = True
        self.before_update = asyncio.Event()
        self.before_update.set()
        self.updating = False
        self.flushes, self.lingers = True, False
        self.fails: Callable[[Sequence[int]], bool] = lambda prompt: False
        self.breaks_after: int | None = None
        self.stops_short = False
        self.asked: list[list[int]] = []
        self.headers: list[Mapping[str, str]] = []
        self.calls: list[tuple[str, Any]] = []
        self.sees: bool | None = False
        self.path = "wire"
        """The folder of its model."""
        self.placeholder = IMAGE
        self.pictures: list[bytes] = []
        self.bodies: list[dict[str, Any]] = []
        self.encodes: Callable[[list[int]], list[int]] = list
        self.lora, self.refuses_adapters = True, False
        self.adapters: dict[str, str] = {}
        self.before_load = asyncio.Event()
        self.before_load.set()
        self.loading = 0
        self.spells: Callable[[str], Sequence[int]] | None = None
        """What it makes of a text; None: it encodes none."""
        self.scoring: list[dict[str, Any]] = []
        """The requests for logprobs of prompts."""
        self.spoils: Callable[[dict[str, Any]], None] = lambda told: None
        """Changes the fields of an answer that have logprobs of a prompt."""

    def spelled(self, body: Mapping[str, Any]) -> Response:
        """The answer to a text to encode."""
        if self.spells is None:
            return JSONResponse({"detail": "Not Found"}, 404)
        assert body["add_special_tokens"] is False
        ids = list(self.spells(body["prompt"]))
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": CONTEXT})

    async def told_to_fail(self, request: Request) -> Response:
        """Answer every request to generate with 500, or end that."""
        failing = await request.json()
        self.fails = lambda prompt: failing
        return Response()

    async def told_to_hold_updates(self, request: Request) -> Response:
        """Let weight updates wait, or end that."""
        if await request.json():
            self.before_update.clear()
        else:
            self.before_update.set()
        return Response()

    async def shown_updating(self, request: Request) -> Response:
        return JSONResponse(self.updating)

    def expanded(self, ids: list[int], urls: Sequence[str]) -> list[int]:
        """The ids that the model gets. Raises InvalidRequest, which quotes an image, unless the placeholders fit."""
        pictures = [base64.b64decode(url.partition(",")[2], validate=True) for url in urls]
        if ids.count(self.placeholder) != len(urls):
            raise InvalidRequest(f"{ids.count(self.placeholder)} placeholders, but these images: {', '.join(urls)}")
        self.pictures += pictures
        sizes, out = iter([struct.unpack(">II", picture[16:24]) for picture in pictures]), []
        for token in self.encodes(ids):
            width, height = next(sizes) if token == self.placeholder else (28, 28)
            out += [token] * (width // 28) * (height // 28)
        return out

    async def load(self, name: str, path: str) -> str:
        """Load an adapter; return why this fails, or ""."""
        self.loading += 1
        await self.before_load.wait()
        self.loading -= 1
        self.calls.append(("load", (name, path)))
        if self.refuses_adapters:
            return "rank 64 is larger than the largest rank 16"
        if not is_adapter(path):
            return f"No adapter found for {path}"
        self.adapters[name] = path
        return ""

    def models_named(self) -> list[dict[str, Any]]:
        """The cards of its model and its adapters."""
        cards = [{"id": name, "root": path, "parent": "wire"} for name, path in self.adapters.items()]
        return [{"id": "wire", "root": self.path, "max_model_len": CONTEXT}, *cards]

    def request(
        self, rid: str, ids: list[int], params: dict[str, Any], most: str, seed: str, adapter: str = ""
    ) -> GenerateRequest:
        seeded = adapter_taste(self.adapters[adapter]) + (params.get(seed) or 0) if adapter else params.get(seed)
        sampling = SamplingParams(
            temperature=params["temperature"], max_tokens=params[most], seed=seeded,
            ignore_eos=bool(params.get("ignore_eos")),
            min_tokens=params.get("min_new_tokens") or params.get("min_tokens") or 0,
        )  # fmt: skip
        stops = tuple(params.get("stop_token_ids") or ())
        return GenerateRequest(rid, PromptIds(ids_of(ids)), sampling, stop_token_ids=stops)


def score_of(place: int, token: int) -> float:
    """The logprob of a token of a prompt."""
    return -(place + token % 7) / 8


def tops_of(place: int, count: int) -> list[tuple[int, float]]:
    """The likeliest tokens at a place of a prompt, likeliest first."""
    return [((place + rank) % VOCABULARY, -rank / 4) for rank in range(1, count + 1)]


def is_adapter(folder: str) -> bool:
    """True if a folder has an adapter."""
    return Path(folder, "adapter_config.json").is_file()


def adapter_taste(folder: str | Path) -> int:
    """The seed by which the tokens of an adapter differ from those of the base model, from its weights."""
    weights = Path(folder, "adapter_model.safetensors").read_bytes()
    return 1 + int.from_bytes(hashlib.sha256(weights).digest()[:2])


class SglangWire(Wire):
    """Like `sglang.launch_server`: cumulative parts, or with `incremental` only new tokens."""

    deterministic: Mapping[str, bool] = {"enable_deterministic_inference": True}

    def __init__(self, delay_s: float, incremental: bool = False) -> None:
        super().__init__(delay_s, incremental)
        self.says: set[str] = set()
        """Ids of requests that are told which prompt the model gets."""
        self.layers = 0
        """Layers with experts, of which each chooses two of eight for a token. 0: experts are not reported."""
        self.lacks_rows = False
        self.refuses_sets_after: int | None = None
        """The number of tokens after which a request that asks for kept sets ends; None: none does."""
        self.columns: list[dict[str, Any]] = []
        """The fields about side columns of each request."""
        self._asking: dict[str, dict[str, Any]] = {}
        self._scored: dict[str, int] = {}
        self.most_adapters: int | None = None
        self.unloaded: dict[str, str] = {}
        """Adapters that it loads again when they are named."""

    def routes(self) -> list[Route]:
        posts = {
            "/generate": self.generate, "/abort_request": self.abort, "/pause_generation": self.pause,
            "/continue_generation": self.resume, "/update_weights_from_disk": self.update, "/flush_cache": self.flush,
            "/begin_weight_update": self.transfer, "/init_weights_update_group": self.transfer,
            "/update_weights_from_distributed": self.transfer, "/end_weight_update": self.transfer,
            "/release_memory_occupation": self.noted, "/resume_memory_occupation": self.noted,
            "/tokenize": self.tokenize,
            "/load_lora_adapter": self.load_adapter, "/unload_lora_adapter": self.unload_adapter,
        }  # fmt: skip
        posts |= {"/wire/fails": self.told_to_fail, "/wire/holds_updates": self.told_to_hold_updates}
        gets = {"/model_info": self.model, "/server_info": self.server, "/v1/models": self.models, "/calls": self.told}
        gets["/wire/updating"] = self.shown_updating
        return [Route(p, e, methods=["POST"]) for p, e in posts.items()] + [Route(p, e) for p, e in gets.items()]

    async def model(self, request: Request) -> Response:
        sees = {} if self.sees is None else {"has_image_understanding": self.sees}
        return JSONResponse({"model_path": self.path, "weight_version": self.version, **sees})

    async def tokenize(self, request: Request) -> Response:
        return self.spelled(await request.json())

    async def server(self, request: Request) -> Response:
        facts = {
            "version": "0.0", "incremental_streaming_output": self.incremental, **self.deterministic,
            "model_path": self.path,
            "enable_memory_saver": True, "max_req_input_len": CONTEXT - 4, "tp_size": 2, "grammar_backend": "none",
            "enable_return_routed_experts": self.layers > 0, "sampling_mask_max_tokens": 64,
            "enable_lora": self.lora or None, "dp_size": 1, "max_loaded_loras": self.most_adapters,
        }  # fmt: skip
        return JSONResponse(facts)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": self.models_named()})

    async def load_adapter(self, request: Request) -> Response:
        body = await request.json()
        name = body["lora_name"]
        if not self.lora:
            return _lora_answer("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
        if name in self.adapters:
            return _lora_answer(f"Failed to load LoRA adapter {name} because it is already loaded")
        return _lora_answer(await self.load(name, body["lora_path"]))

    async def unload_adapter(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        self.calls.append(("unload", name))
        if name not in self.adapters:
            return _lora_answer(f"LoRA with name {name} does not exist. Loaded LoRAs: {self.adapters.keys()}")
        self.unloaded[name] = self.adapters.pop(name)
        return _lora_answer("")

    def lacks_adapter(self, name: str | None) -> str:
        """Why a request that names an adapter fails, or ""."""
        if name is None:
            return ""
        if not self.lora:
            return f"LoRA adapter '{name}' was requested, but LoRA is not enabled. Please launch the server with ..."
        if name in self.unloaded:
            self.adapters[name] = self.unloaded.pop(name)
        if name in self.adapters:
            return ""
        known = self.adapters.keys() | self.unloaded.keys()
        return f"Got LoRA adapter that has never been loaded: {name}\nAll loaded adapters: {known}."

    async def told(self, request: Request) -> Response:
        return JSONResponse(self.calls)

    async def noted(self, request: Request) -> Response:
        self.calls.append((request.url.path, await request.json()))
        return JSONResponse({"success": True})

    async def flush(self, request: Request) -> Response:
        """Refused unless `flushes` is set, as by a server that runs requests, and while an aborted request lingers."""
        self.calls.append((request.url.path, None))
        return JSONResponse({}, 200 if self.flushes and not self.lingers else 400)

    async def transfer(self, request: Request) -> Response:
        body = await request.json()
        self.calls.append((request.url.path, body))
        version = body.get("weight_version")
        if request.url.path in ("/update_weights_from_distributed", "/end_weight_update") and version is not None:
            self.version = version
            await self.engine.update_weights("transferred", int(version))
        return JSONResponse({"success": True, "message": "done"})

    async def abort(self, request: Request) -> Response:
        prefix = (await request.json())["rid"]
        for rid in [rid for rid in self.engine.running if rid.startswith(prefix)]:
            await self.engine.abort(rid)
        return Response()

    async def pause(self, request: Request) -> Response:
        mode = PauseMode((await request.json())["mode"])
        self.lingers = self.lingers and mode is not PauseMode.RETRACT
        await self.engine.pause(mode)
        return JSONResponse({"status": "ok"})

    async def resume(self, request: Request) -> Response:
        await self.engine.resume()
        return JSONResponse({"status": "ok"})

    async def update(self, request: Request) -> Response:
        body = await request.json()
        if "missing" in body["model_path"]:
            return JSONResponse({"success": False, "message": "no such folder"}, 400)
        self.updating = True
        await self.before_update.wait()
        self.calls.append((request.url.path, body))
        self.version = body["weight_version"]
        await self.engine.update_weights(body["model_path"], int(self.version))
        if body["flush_cache"] and self.lingers:
            return JSONResponse({"success": False, "message": "the cache was not flushed"}, 400)
        return JSONResponse({"success": True, "message": "", "num_paused_requests": 0})

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.headers.append(request.headers)
        self.asked.append(body["input_ids"])
        if self.fails(body["input_ids"]):
            return JSONResponse({"error": {"message": "an illegal memory access"}}, 500)
        ids = body["input_ids"]
        if body.get("image_data"):
            self.bodies.append(body)
            ids = self.expanded(ids, body["image_data"])
        if lacks := self.lacks_adapter(body.get("lora_path")):
            error = {"error": {"message": lacks}}
            if not body["stream"]:
                return JSONResponse(error, 400)
            event = b"data: " + orjson.dumps(error) + b"\n\ndata: [DONE]\n\n"
            return Response(event, media_type="text/event-stream")
        named = body.get("lora_path") or ""
        wanted = self.request(body["rid"], ids, body["sampling_params"], "max_new_tokens", "sampling_seed", named)
        tops = body.get("top_logprobs_num", 0)
        wanted = GenerateRequest(wanted.request_id, wanted.prompt, wanted.sampling, wanted.stop_token_ids, None, tops)
        if body.get("return_prompt_token_ids") and self.sees is not None:
            self.says.add(wanted.request_id)
        asking = {name: body[name] for name in _ABOUT_COLUMNS if name in body}
        self.columns.append(asking)
        self._asking[wanted.request_id] = asking
        if (start := body.get("logprob_start_len", -1)) >= 0:
            self.scoring.append(body)
            self._scored[wanted.request_id] = start
        if len(wanted.prompt) >= CONTEXT:
            return JSONResponse({"error": {"message": "the input is longer than the context"}}, 400)
        if body["stream"]:
            return StreamingResponse(self.events(wanted), media_type="text/event-stream")
        parts = [part async for part in self.parts(wanted)]
        if "meta_info" not in parts[-1]:
            return JSONResponse(parts[-1], 400)
        return Response(orjson.dumps(parts[-1]), media_type="application/json")

    async def events(self, wanted: GenerateRequest) -> AsyncIterator[bytes]:
        sent = 0
        async for part in self.parts(wanted):
            if "meta_info" in part and self.incremental:
                total = part["meta_info"]["completion_tokens"]
                part = {**part, "output_ids": part["output_ids"][sent:], "meta_info": dict(part["meta_info"])}
                for name in {*_OF_NEW_TOKENS} & part["meta_info"].keys():
                    part["meta_info"][name] = part["meta_info"][name][sent:]
                sent = total
            yield b"data: " + orjson.dumps(part) + b"\n\n"
            if "meta_info" not in part:
                return
            if part["meta_info"]["completion_tokens"] == self.breaks_after:
                if self.stops_short:
                    break
                yield b'data: {"error": {"message": "an illegal memory access", "code": 500}}\n\n'
                return
        yield b"data: [DONE]\n\n"

    async def parts(self, wanted: GenerateRequest) -> AsyncIterator[dict[str, Any]]:
        reply = CollectedReply()
        async for chunk in self.engine.generate(wanted):
            reply.add(chunk)
            if "return_sampling_mask" in self._asking[wanted.request_id] and len(reply.ids) == self.refuses_sets_after:
                told = "Sampling support exceeds --sampling-mask-max-tokens=64, commonly because of cutoff ties."
                yield {"error": {"message": told, "code": 400}}
                return
            text = "\u2028\x85\r\n\x0c"  # a model may write characters that end a line elsewhere
            ids = {"prompt_token_ids": list(wanted.input_ids)} if wanted.request_id in self.says else {}
            yield {"text": text, "output_ids": list(reply.ids), "meta_info": self.meta(wanted, reply), **ids}

    def meta(self, wanted: GenerateRequest, reply: CollectedReply) -> dict[str, Any]:
        return {
            "id": wanted.request_id,
            "finish_reason": _sglang_finish(reply),
            "prompt_tokens": len(wanted.prompt),
            "completion_tokens": len(reply.ids),
            "cached_tokens": 3,
            "weight_version": self.lie or self.version,
            **({"weight_versions": self.spans(reply.versions)} if reply.finish and self.tells_spans else {}),
            "output_token_logprobs": [
                [value, token, None] for value, token in zip(reply.logprobs, reply.ids, strict=True)
            ],
            "output_top_logprobs": [[[value, token, None] for token, value in top] for top in reply.top_logprobs],
            **({} if self.lacks_rows else self._rows(wanted, reply)),
            **self._scores(wanted),
        }

    def _scores(self, wanted: GenerateRequest) -> dict[str, Any]:
        """The logprobs of the prompt from `logprob_start_len` on, of which the first is null."""
        ids = list(wanted.input_ids)
        start = self._scored.get(wanted.request_id, len(ids))
        named = [0 if token == self.placeholder else token for token in ids]
        values = [[score_of(place, ids[place]), named[place], None] for place in range(start, len(ids))]
        tops = [[[value, token, None] for token, value in tops_of(n, wanted.top_logprobs)] for n in range(len(ids))]
        if values:
            values[0][0] = tops[start] = None
        told = {"input_token_logprobs": values, "input_top_logprobs": tops[start:]}
        if values:
            self.spoils(told)
        return told

    def _rows(self, wanted: GenerateRequest, reply: CollectedReply) -> dict[str, Any]:
        """The side columns that a request asked for: kept sets in all parts, experts in the last one."""
        asking, rows = self._asking[wanted.request_id], dict[str, Any]()
        if "return_sampling_mask" in asking:
            rows["output_token_sampling_mask"] = list(map(kept_with, reply.ids))
            rows["output_token_sampling_logprobs"] = list(map(kept_logprob, reply.ids))
            rows["output_token_sampling_mask_length"] = len(reply.ids)
        if "return_routed_experts" in asking and reply.finish is not None:
            ids, start = [*wanted.input_ids, *reply.ids], asking["routed_experts_start_len"]
            chosen = [experts_of(place, ids[place], self.layers) for place in range(start, len(ids) - 1)]
            rows["routed_experts"] = base64.b64encode(np.array(chosen, "<i4").tobytes()).decode()
        return rows

    def spans(self, versions: list[int]) -> list[dict[str, Any]]:
        if self.lie is not None:
            return [{"version": self.lie, "start": 0, "end": len(versions)}]
        return _spans(versions, self.version)


_ABOUT_COLUMNS = ("return_sampling_mask", "return_routed_experts", "routed_experts_start_len")
_OF_NEW_TOKENS = (
    *("output_token_logprobs", "output_top_logprobs"),
    *("output_token_sampling_mask", "output_token_sampling_logprobs"),
)


def _lora_answer(error: str) -> Response:
    """SGLang's answer to a change of adapters. `error`: why it failed, or ""."""
    answer = {"success": not error, "error_message": error or None, "loaded_adapters": {}}
    return JSONResponse(answer, 400 if error else 200)


def kept_with(token: int) -> list[int]:
    """The kept set of a token, likeliest first."""
    return [token, *sorted({0, 7, (token + 1) % VOCABULARY} - {token})]


def kept_logprob(token: int) -> float:
    """The logprob of a token in its kept set."""
    return -(token % 7) / 8


def experts_of(place: int, token: int, layers: int) -> list[list[int]]:
    """The experts that the layers choose for a token at a place."""
    return [[(place + token + layer) % 8, (place + token + layer + 3) % 8] for layer in range(layers)]


def _sglang_finish(reply: CollectedReply) -> dict[str, Any] | None:
    match reply.finish:
        case None:
            return None
        case FinishReason.ABORT:
            return {"type": "abort", "message": "aborted"}
        case FinishReason.LENGTH:
            return {"type": "length", "length": len(reply.ids)}
    return {"type": "stop", "matched": reply.ids[-1]}


def _spans(versions: list[int], now: str) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for place, version in enumerate(versions):
        if spans and spans[-1]["number"] == version:
            spans[-1]["end"] = place + 1
        else:
            spans.append({"number": version, "version": str(version), "start": place, "end": place + 1})
    if now == "default" and len(spans) == 1:
        spans[0]["version"] = "default"
    return [{name: span[name] for name in ("version", "start", "end")} for span in spans]


_CONTROLS = {
    *("/pause", "/resume", "/is_paused", "/collective_rpc", "/update_weight_version", "/weight_info", "/server_info"),
    *("/reset_prefix_cache", "/reset_encoder_cache", "/abort_requests", "/sleep", "/wake_up"),
}
"""The endpoints of vLLM that VLLM_SERVER_DEV_MODE=1 adds."""


class VllmWire(Wire):
    """Like vLLM 0.32 with `--enable-scale-out` and VLLM_SERVER_DEV_MODE=1.

    `numbers`: logprobs name tokens by numbers, as those of newer vLLM. `takes_parts`: its endpoint for ids takes
    images, too; None: it does not describe its endpoints. `mode`: its `--logprobs-mode`. `scale_out`, `controls`: the
    flag and the variable are set. `masks`, `experts`: it returns sampling masks and routed experts. `streams`: also in
    streamed replies. `moe`: its model has experts; None: it does not say. `loses`: the fields of choices that are null
    in replies to requests, but not to probes. `spare`: the rows of experts that replies have too many. `release`: its
    version. `runtime_lora`: VLLM_ALLOW_RUNTIME_LORA_UPDATING is set. `says_model`: the name that replies have; None:
    that of the request. `most_alternatives`: its `--max-logprobs`. `targets`: its `--lora-target-modules`.
    """

    numbers, takes_parts, says_ids = True, True, True
    mode = "processed_logprobs"
    scale_out = controls = runtime_lora = True
    says_model: str | None = None
    masks = experts = False
    streams = True
    moe: bool | None = None
    loses: tuple[str, ...] = ()
    spare = 0
    release = "0.0"
    most_alternatives = 20
    targets: Sequence[str] | None = ("q_proj", "o_proj")

    def routes(self) -> list[Route]:
        gets = {"/version": self.told, "/v1/models": self.models, "/calls": self.noted_calls}
        gets["/openapi.json"] = self.described
        posts = {"/v1/completions": self.complete, "/inference/v1/generate": self.generate, "/tokenize": self.tokenize}
        controls = {
            "/pause": self.pause, "/resume": self.resume, "/collective_rpc": self.rpc,
            "/update_weight_version": self.name, "/reset_prefix_cache": self.reset, "/abort_requests": self.abort,
            **dict.fromkeys(("/sleep", "/wake_up", "/reset_encoder_cache"), self.noted),
            **dict.fromkeys(
                ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
                self.transfer,
            ),
        }  # fmt: skip
        posts |= {path: self.only_controlled(endpoint) for path, endpoint in controls.items()}
        posts["/inference/v1/abort_requests"] = self.abort
        if self.runtime_lora:
            posts |= {"/v1/load_lora_adapter": self.load_adapter, "/v1/unload_lora_adapter": self.unload_adapter}
        posts |= {"/wire/fails": self.told_to_fail, "/wire/holds_updates": self.told_to_hold_updates}
        gets["/wire/updating"] = self.shown_updating
        gets |= {"/is_paused": self.only_controlled(self.told_pause)}
        gets |= {"/weight_info": self.only_controlled(self.told_version)}
        gets |= {"/server_info": self.only_controlled(self.configured)}
        return [Route(p, e, methods=["POST"]) for p, e in posts.items()] + [Route(p, e) for p, e in gets.items()]

    def only_controlled(self, endpoint: Any) -> Any:
        async def answered(request: Request) -> Response:
            if not self.controls:
                return JSONResponse({"detail": "Not Found"}, 404)
            answer: Response = await endpoint(request)
            return answer

        return answered

    async def told(self, request: Request) -> Response:
        return JSONResponse({"version": self.release})

    async def noted_calls(self, request: Request) -> Response:
        return JSONResponse(self.calls)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": self.models_named()})

    async def load_adapter(self, request: Request) -> Response:
        body = await request.json()
        name = body["lora_name"]
        if not self.lora:
            return _vllm_error("LoRA is not enabled. Use --enable-lora to enable LoRA.", 500)
        if name in self.adapters:
            return _vllm_error(f"The lora adapter '{name}' has already been loaded. If you want to load ...", 400)
        if error := await self.load(name, body["lora_path"]):
            return _vllm_error(error, 404 if "No adapter found" in error else 500)
        return Response(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        self.calls.append(("unload", name))
        if self.adapters.pop(name, None) is None:
            return _vllm_error(f"The lora adapter '{name}' cannot be found.", 404)
        return Response(f"Success: LoRA adapter '{name}' removed successfully.")

    def lacks_model(self, name: str) -> Response | None:
        """The answer to a request that names neither the model nor an adapter."""
        if name == "wire" or name in self.adapters:
            return None
        return _vllm_error(f"The model `{name}` does not exist. Valid aliases: wire.", 404)

    async def noted(self, request: Request) -> Response:
        self.calls.append((request.url.path, str(request.url.query)))
        return Response()

    async def told_pause(self, request: Request) -> Response:
        return JSONResponse({"is_paused": self.engine.common()["mode"] is not None})

    async def told_version(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.version})

    async def configured(self, request: Request) -> Response:
        config = {
            "model_config": {
                **{"logprobs_mode": self.mode, "enable_sleep_mode": True},
                "return_sampling_mask": self.masks,
            },
            "aux_output_config": {"enable_return_routed_experts": self.experts},
            "scheduler_config": {"max_num_seqs": 16},
            "lora_config": {"max_loras": 8, "max_lora_rank": 16, "target_modules": self.targets} if self.lora else None,
            "parallel_config": {"world_size": 2, "is_moe_model": self.moe},
        }
        return JSONResponse({"vllm_config": config, "vllm_env": {"VLLM_BATCH_INVARIANT": True}})

    async def pause(self, request: Request) -> Response:
        self.calls.append((request.url.path, str(request.url.query)))
        kept = request.query_params["mode"] == "keep"
        await self.engine.pause(PauseMode.IN_PLACE if kept else PauseMode.ABORT)
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        self.calls.append((request.url.path, ""))
        await self.engine.resume()
        return JSONResponse({"status": "resumed"})

    async def rpc(self, request: Request) -> Response:
        body = await request.json()
        assert body["method"] == "reload_weights"
        path = body["kwargs"]["weights_path"]
        self.calls.append((request.url.path, path))
        if "missing" in path:
            return JSONResponse({"error": {"message": "no such folder", "code": 500}}, 500)
        self.updating = True
        await self.before_update.wait()
        return JSONResponse({"results": [None]})

    async def name(self, request: Request) -> Response:
        self.version = (await request.json())["new_version"]
        self.calls.append((request.url.path, self.version))
        if self.version.isdecimal():
            await self.engine.update_weights("loaded", int(self.version))
        return JSONResponse({"success": True, "new_version": self.version})

    async def transfer(self, request: Request) -> Response:
        body = await request.json()
        self.calls.append((request.url.path, body))
        if request.url.path == "/update_weights" and not body["update_info"]:
            return JSONResponse({"error": {"message": "no names", "code": 500}}, 500)
        if request.url.path == "/finish_weight_update" and "weight_version" in body:
            self.version = body["weight_version"]
            await self.engine.update_weights("transferred", int(self.version))
        return JSONResponse({"message": "done"})

    async def reset(self, request: Request) -> Response:
        """Refused while requests are in flight, unless they may be reset."""
        self.calls.append((request.url.path, str(request.url.query)))
        held = bool(self.engine.running) and request.query_params.get("reset_running_requests") != "true"
        return JSONResponse({"success": not held})

    async def abort(self, request: Request) -> Response:
        for rid in (await request.json())["request_ids"]:
            await self.engine.abort(rid)
        return Response()

    async def described(self, request: Request) -> Response:
        if self.takes_parts is None:
            return JSONResponse({"detail": "Not Found"}, 404)
        fields = ["token_ids", "sampling_params", "features", "return_token_ids"]
        fields += ["content_parts"] if self.takes_parts else []
        schemas = {"GenerateRequest": {"properties": {name: {} for name in fields}}, "Usage": {}}
        paths = [path for path in (route.path for route in self.routes()) if self.controls or path not in _CONTROLS]
        return JSONResponse({"paths": {path: {} for path in paths}, "components": {"schemas": schemas}})

    async def tokenize(self, request: Request) -> Response:
        body = await request.json()
        if "prompt" in body:
            assert body["model"] == "wire"
            return self.spelled(body)
        (message,) = body["messages"]
        (part,) = message["content"]
        assert base64.b64decode(part["image_url"]["url"].partition(",")[2]).startswith(b"\x89PNG")
        if not self.sees:
            return JSONResponse({"error": {"message": "wire is not a multimodal model"}}, 400)
        return JSONResponse({"count": 9, "tokens": []})

    def pulled(self, params: Mapping[str, Any]) -> tuple[int, float] | None:
        """The token that a bias makes certain, and its logprob in this `mode`, of a request that finds the mode out."""
        certain = [int(token) for token, bias in (params.get("logit_bias") or {}).items() if bias == 100.0]
        logprob = {"processed_logprobs": 0.0, "raw_logprobs": -5.0, "processed_logits": 100.0, "raw_logits": 2.0}
        return (certain[0], logprob[self.mode]) if certain else None

    def wanted(self, body: Mapping[str, Any], ids: list[int], params: dict[str, Any], tops: int) -> GenerateRequest:
        rid = f"generate-tokens-{body['request_id']}" if "request_id" in body else f"v{id(body)}"
        adapter = body["model"] if body["model"] != "wire" else ""
        found = self.request(rid, ids, params, "max_tokens", "seed", adapter)
        sampling = found.sampling._replace(ignore_eos=False)  # it concerns only the end tokens of the model's config
        return GenerateRequest(rid, found.prompt, sampling, found.stop_token_ids, None, tops)

    async def generate(self, request: Request) -> Response:
        if not self.scale_out:
            return JSONResponse({"error": {"message": "Scale-out endpoints are disabled.", "code": 403}}, 403)
        body = await request.json()
        params = body["sampling_params"]
        if (lacks := self.lacks_model(body["model"])) is not None:
            return lacks
        if self.masks:
            _check_masked(params)
        if (pulled := self.pulled(params)) is not None:
            (token, logprob) = pulled
            named = {**self.named(token, logprob), "top_logprobs": [self.named(token, logprob)]}
            choice = {"token_ids": [token], "logprobs": {"content": [named]}}
            if not body.get("stream"):
                return JSONResponse({"choices": [choice | self.columns([token], 0, 2)]})
            choice |= self.columns([token], 0, 2) if self.streams else {}
            event = b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\ndata: [DONE]\n\n"
            return Response(event, media_type="text/event-stream")
        assert body.get("stream") is (None if "prompt_logprobs" in params else True)
        self.headers.append(request.headers)
        self.asked.append(body["token_ids"])
        if self.fails(body["token_ids"]):
            return JSONResponse({"error": {"message": "an illegal memory access", "code": 500}}, 500)
        self.bodies.append(body)
        ids = body["token_ids"]
        if "content_parts" in body:
            assert all(part["type"] == "image_url" for part in body["content_parts"])
            ids = self.expanded(ids, [part["url"] for part in body["content_parts"]])
        wanted = self.wanted(body, ids, params, params["logprobs"])
        says = self.says_ids and bool(body.get("return_token_ids"))
        if "prompt_logprobs" in params:
            self.scoring.append(body)
            return await self.scored(wanted, params["prompt_logprobs"], self.named_events(wanted, says, 0), {})
        start = params.get("routed_experts_prompt_start", 0)
        if not 0 <= start <= len(wanted.prompt):
            raise InvalidRequest("routed_experts_prompt_start must be between 0 and the prompt length, inclusive.")
        return StreamingResponse(self.named_events(wanted, says, start), media_type="text/event-stream")

    def columns(self, ids: Sequence[int], start: int, end: int | None) -> dict[str, Any]:
        """The columns of a choice with tokens `ids`. `start`: that of the experts. `end`: the length of the sequence
        in the last choice, else None."""
        rows = range(start, end - 1 + self.spare) if self.experts and end is not None else None
        return {
            "sampling_mask": [mask_of(token) for token in ids] if self.masks else None,
            "routed_experts": npy(np.array([experts_at(at) for at in rows], np.uint8)) if rows else None,
        }

    async def named_events(self, wanted: GenerateRequest, says: bool, start: int) -> AsyncIterator[bytes]:
        said = {"prompt_token_ids": list(wanted.input_ids)} if says else {}
        versions: list[int] = []
        async for chunk in self.engine.generate(wanted):
            content = [
                {**self.named(token, value), "top_logprobs": [self.named(*pair) for pair in top]}
                for token, value, top in zip(
                    chunk.ids, chunk.logprobs, chunk.top_logprobs or [()] * len(chunk.ids), strict=True
                )
            ]
            versions += [chunk.version] * len(chunk.ids)
            finish = None if chunk.finish is None else chunk.finish.value
            choice = {"index": 0, "token_ids": list(chunk.ids), "logprobs": {"content": content}}
            spans = self.spans(versions) if finish and self.tells_spans else None
            choice |= {"finish_reason": finish, "weight_versions": spans}
            if self.streams:
                end = len(wanted.prompt) + len(versions) if finish else None
                choice |= self.columns(list(chunk.ids), start, end) | dict.fromkeys(self.loses)
            yield b"data: " + orjson.dumps({"request_id": "1", "choices": [choice], **said}) + b"\n\n"
            said = {}
            if len(versions) == self.breaks_after:
                if self.stops_short:
                    break
                yield b'data: {"error": {"message": "an illegal memory access", "code": 500}}\n\n'
                return
        for line in self.end(wanted):
            yield line

    def spans(self, versions: list[int]) -> list[dict[str, Any]]:
        if self.lie is not None:
            return [{"version": self.lie, "start": 0, "end": len(versions)}]
        return _spans(versions, self.version)

    def end(self, wanted: GenerateRequest) -> Sequence[bytes]:
        usage = {"prompt_tokens": len(wanted.prompt), "prompt_tokens_details": {"cached_tokens": 3}}
        return b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\n", b"data: [DONE]\n\n"

    def named(self, token: int, logprob: float) -> dict[str, Any]:
        name = {"token_id": token} if self.numbers else {"token": f"token_id:{token}"}
        return {**name, "logprob": logprob}

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        assert body["return_token_ids"] and body["return_tokens_as_token_ids"]
        if (lacks := self.lacks_model(body["model"])) is not None:
            return lacks
        if (pulled := self.pulled(body)) is not None:
            (token, logprob) = pulled
            logprobs = {"token_logprobs": [logprob], "top_logprobs": [{f"token_id:{token}": logprob}]}
            return JSONResponse({"choices": [{"token_ids": [token], "logprobs": logprobs}]})
        self.headers.append(request.headers)
        wanted = self.wanted(body, body["prompt"], body, body["logprobs"])
        named = self.says_model or body["model"]
        if "prompt_logprobs" in body:
            assert "stream" not in body
            self.scoring.append(body)
            return await self.scored(wanted, body["prompt_logprobs"], self.events(wanted, named), {"id": "cmpl-1"})
        return StreamingResponse(self.events(wanted, named), media_type="text/event-stream")

    async def scored(
        self, wanted: GenerateRequest, top: int, events: AsyncIterator[bytes], completed: dict[str, Any]
    ) -> Response:
        """An answer in one piece with the logprobs of the prompt: its own, or with `completed` those of its choice."""
        if top > self.most_alternatives:
            told = f"Requested prompt logprobs of {top}, which is greater than max allowed: {self.most_alternatives}"
            return _vllm_error(told, 400)
        parts = [orjson.loads(line.removeprefix(b"data: ")) async for line in events if b"[DONE]" not in line]
        answer = {**parts[0], **{name: part[name] for part in parts for name in part if name == "usage"}, **completed}
        (answer["choices"],) = [part["choices"] for part in parts if part["choices"]]
        ids = list(wanted.input_ids)
        told = {"prompt_logprobs": [None, *(_entries(n, ids[n], top) for n in range(1, len(ids)))]}
        self.spoils(told)
        (answer["choices"][0] if completed else answer).update(told)
        return JSONResponse(answer)

    async def events(self, wanted: GenerateRequest, named: str) -> AsyncIterator[bytes]:
        async for chunk in self.engine.generate(wanted):
            logprobs = {
                "tokens": [f"token_id:{token}" for token in chunk.ids],
                "token_logprobs": list(chunk.logprobs),
                "top_logprobs": [{f"token_id:{token}": value for token, value in top} for top in chunk.top_logprobs],
            }
            finish = None if chunk.finish is None else chunk.finish.value
            choice = {
                "index": 0,
                "text": "",
                "token_ids": list(chunk.ids),
                "logprobs": logprobs,
                "finish_reason": finish,
            }
            yield b"data: " + orjson.dumps({"id": "cmpl-1", "model": named, "choices": [choice]}) + b"\n\n"
        for line in self.end(wanted):
            yield line


def _entries(place: int, token: int, top: int) -> dict[str, Any]:
    """A token of a prompt and its likeliest alternatives, as vLLM names them."""
    tops = tops_of(place, top)
    own = {str(token): {"logprob": score_of(place, token), "rank": 99, "decoded_token": "x"}}
    return own | {
        str(other): {"logprob": value, "rank": rank, "decoded_token": None}
        for rank, (other, value) in enumerate(tops, start=1)
    }


def _vllm_error(message: str, status: int) -> Response:
    return JSONResponse({"error": {"message": message, "param": None, "code": status}}, status)


def mask_of(token: int) -> list[int]:
    """The ids that a simulated vLLM kept when it sampled a token."""
    return [token, (token + 1) % VOCABULARY, (token + 9) % VOCABULARY]


def experts_at(position: int) -> list[list[int]]:
    """The experts of a token in a simulated vLLM: three layers, two experts a token."""
    return [[(position + layer) % 8, (position + layer + 3) % 8] for layer in range(3)]


def npy(values: Any) -> str:
    """An array as vLLM sends it: a .npy file in base64."""
    file = io.BytesIO()
    np.save(file, values)
    return base64.b64encode(file.getvalue()).decode()


def _check_masked(params: Mapping[str, Any]) -> None:
    """Refuse what vLLM with `--return-sampling-mask` refuses."""
    if params["temperature"] <= 0:
        raise InvalidRequest("sampling distribution replay requires temperature > 0")
    if params.get("top_k", 0) <= 0:
        raise InvalidRequest("sampling distribution replay requires top_k > 0 to bound sampling mask size")


def application(kind: str, delay_s: float = 0.0) -> Starlette:
    """Create the app of a kind: sglang, sglang-incremental or vllm."""
    wire = VllmWire(delay_s) if kind == "vllm" else SglangWire(delay_s, incremental=kind == "sglang-incremental")
    app = Starlette(routes=wire.routes())
    app.state.wire = wire
    app.add_exception_handler(InvalidRequest, _refused)
    return app


async def _refused(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": {"message": str(error)}}, 400)


_GENERATE = ("/generate", "/inference/v1/generate")


class LiveWire:
    """A server on this event loop that can be killed, hung, made to refuse, and restarted on its port.

    While `page` is set, it answers every request with a web page.
    """

    def __init__(self, kind: str = "sglang", delay_s: float = 0.0, key: str | None = None) -> None:
        self._kind, self._delay_s, self._key = kind, delay_s, key
        self.port = 0
        self.refuse_generate = self.hung = self.page = False
        self.arriving = asyncio.Event()
        """While cleared, requests to generate do not arrive."""
        self.arriving.set()
        self.wire: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, *without: str) -> None:
        """Start with fresh state, like a new process. Answers 404 at the paths `without`."""
        self._app = application(self._kind, self._delay_s)
        for path in without:
            self.forget(path)
        self.wire = self._app.state.wire
        self._server = uvicorn.Server(
            uvicorn.Config(self._answer, port=self.port, log_level="error", lifespan="off", interface="asgi3")
        )
        self._server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self._task = asyncio.create_task(self._server.serve())
        while not self._server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(0.005)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """Abort all connections and stop listening."""
        self._server.should_exit = self._server.force_exit = True
        loop = asyncio.get_running_loop()
        for listener in self._server.servers:
            for accepting in listener.sockets:
                loop.remove_reader(accepting.fileno())
        for _ in range(3):
            await asyncio.sleep(0)  # what was accepted becomes a connection: a closed listener would leak it
        for listener in self._server.servers:
            listener.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        await self._task
        await self.wire.engine.close()

    def forget(self, path: str) -> None:
        """Answer 404 at `path` until the next `start` or `remember`."""
        self._app.router.routes[:] = [route for route in self._app.router.routes if getattr(route, "path", "") != path]

    def remember(self) -> None:
        """Answer at every path again, with the state kept."""
        self._app.router.routes[:] = self.wire.routes()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_unless_hung(message: Any) -> None:
            if self.hung:
                await asyncio.Event().wait()
            await send(message)

        if self.hung:
            await asyncio.Event().wait()
        headers, path = dict(scope["headers"]), scope["path"]
        if path in _GENERATE:
            await self.arriving.wait()
        app: Any = self._app
        if self._key is not None and headers.get(b"authorization") != f"Bearer {self._key}".encode():
            app = Response("wrong key", 401)
        elif self.page:
            app = HTMLResponse("<html>It works!</html>\n")
        elif self.refuse_generate and path in _GENERATE:
            app = Response("the queue is full", 503)
        await app(scope, receive, send_unless_hung)


@contextlib.asynccontextmanager
async def serving_wire(kind: str, delay_s: float = 0.0) -> AsyncIterator[tuple[str, Any]]:
    """Serve on this event loop; yield the URL and the simulated server."""
    app = application(kind, delay_s)
    async with served(app) as url:
        yield url, app.state.wire


@contextlib.asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """Serve an application on this event loop; yield its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        await task


def serve(kind: str, port: int, delay_s: float) -> None:
    """Serve on `port` until the process ends."""
    uvicorn.run(application(kind, delay_s), port=port, log_level="error", lifespan="off")


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
