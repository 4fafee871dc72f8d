"""`/engine/...`: pause, update weights, release memory and manage servers, with the admin key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request

from proxy.api.audit_log import Endpoint, note
from proxy.api.bodies import Bodies
from proxy.api.http import JsonResponse, key_of
from proxy.api.known_fields import check_given
from proxy.engine.adapters import Adapters
from proxy.engine.admin import EngineAdmin
from proxy.engine.gate import Gate
from proxy.engine.interface import MEMORY_TAGS, Capability, PauseMode, ServerPool, WeightTransfer
from proxy.engine.versions import LARGEST_VERSION
from proxy.hub import revision_of
from proxy.models.declared import DeclaredModel
from proxy.protocols.fields import expect_list, expect_str, json_type, optional_int, optional_text
from proxy.rendering.sight import Sight
from proxy.served_engines import ServedEngine, ServedEngines
from proxy.sessions.access import Access
from proxy.settings import Settings
from proxy.store.deliveries import Event
from proxy.store.outbox import Tell
from tokengrove.errors import EngineIncapable, InvalidRequest, brief
from tokengrove.options.model import RouteKind

_IDLE_MODES = (PauseMode.ABORT, PauseMode.DRAIN)


class EngineEndpoints:
    """The endpoints of a trainer that owns the weights. Each reply has the state of the engine."""

    def __init__(
        self,
        access: Access,
        gate: Gate,
        admin: EngineAdmin,
        servers: ServerPool | None,
        bodies: Bodies,
        settings: Settings,
        adapters: Adapters,
        sight: Sight | None = None,
        model: DeclaredModel | None = None,
        tell: Tell | None = None,
    ) -> None:
        """`servers`: the engine's server pool; None if the engine is not a pool. `adapters`: those of the engine.
        `sight`: the model's vision. `model`: the table of its route, if it has one. `tell` stores an event.
        """
        self._adapters, self._model, self._tell = adapters, model, tell
        self._sight = None if sight is None else sight._asdict()
        self._access, self._gate, self._admin, self._servers = access, gate, admin, servers
        self._bodies, self._revision = bodies, revision_of(settings)

    async def show(self, request: Request) -> JsonResponse:
        """Return the state: engine, model, weight version, pause, and requests in flight and waiting."""
        await self._read(request)
        return await self._state()

    async def pause(self, request: Request) -> JsonResponse:
        """Pause generation. `mode`: `abort` (default: interrupt, then resume each request), or another PauseMode."""
        mode = _mode(await self._known(request, "mode"), tuple(PauseMode))
        await self._admin.pause(mode)
        return await self._state()

    async def resume(self, request: Request) -> JsonResponse:
        """End a pause; interrupted requests continue."""
        await self._known(request)
        await self._admin.resume()
        return await self._state()

    async def update_weights(self, request: Request) -> JsonResponse:
        """Load the weights in the folder `path`, which the engine must be able to read.

        `version`: their weight version (default: the current one plus 1). `mode`: see `pause`. With `update_info`, run
        the step of this name of vLLM's weight transfer.
        """
        body = await self._body(request)
        self._check_trained()
        if "update_info" in body:
            return await self._transfer(request, body)
        _check_known(request, body, "path", "model_path", "version", "mode")
        path, mode = optional_text(body, "path") or optional_text(body, "model_path"), _mode(body, tuple(PauseMode))
        if path is None:
            raise InvalidRequest("'path' is missing: it names the folder of the new weights", param="path")
        version = optional_int(body, "version", least=0, most=LARGEST_VERSION)
        self._adapters.check_weights()
        new = await self._admin.update_weights(path, version, mode)
        await self._published(new)
        return await self._state(version=new)

    async def transfer_weights(self, request: Request) -> JsonResponse:
        """Run a step of SGLang's or vLLM's weight transfer, with its own fields.

        `version` is sent as its `weight_version`.
        """
        body = await self._body(request)
        self._check_trained()
        return await self._transfer(request, body)

    async def _transfer(self, request: Request, body: Mapping[str, Any]) -> JsonResponse:
        fields = dict(body)
        version = optional_int(fields, "version", least=0, most=LARGEST_VERSION)
        fields.pop("version", None)
        if version is not None:
            fields["weight_version"] = str(version)
        named = fields.get("weight_version")
        if not isinstance(named, str | int | None):
            raise InvalidRequest(
                f"'weight_version' must be a string or an integer, not {json_type(named)}", param="weight_version"
            )
        note(request, version=version)
        step = WeightTransfer(request.scope["path"].rsplit("/", 1)[-1])
        self._adapters.check_weights()
        before = self._gate.info().weight_version
        new = await self._admin.transfer_weights(step, fields)
        if new != before:
            await self._published(new)
        return await self._state(version=new)

    async def _published(self, version: int) -> None:
        """Store the event before the trainer is answered; a call that fails here is repeated by the trainer."""
        if self._tell is not None:
            await self._tell(
                Event.VERSION_PUBLISHED, {"version": version, "model": self._gate.info().model, "adapter": False}
            )

    async def release_memory(self, request: Request) -> JsonResponse:
        """Release memory until it is resumed.

        `tags`: weights, kv_cache, cuda_graph (default: all). `mode`: `abort` (default) or `drain` requests in flight.
        """
        body = await self._known(request, "tags", "mode")
        await self._admin.release_memory(_tags(body), _mode(body, _IDLE_MODES))
        return await self._state()

    async def resume_memory(self, request: Request) -> JsonResponse:
        """Restore released memory. Generation continues when all memory is restored."""
        await self._admin.resume_memory(_tags(await self._known(request, "tags")))
        return await self._state()

    async def flush_cache(self, request: Request) -> JsonResponse:
        """Empty the engine's prefix cache."""
        await self._known(request)
        await self._admin.flush_cache()
        return await self._state()

    async def list_servers(self, request: Request) -> JsonResponse:
        """List the servers of the pool."""
        await self._read(request)
        return JsonResponse({"servers": await self._pool().show()})

    async def add_server(self, request: Request) -> JsonResponse:
        """Add the server at `url` to the pool."""
        url = _url(await self._known(request, "url"))
        await self._pool().add(url)
        return JsonResponse({"servers": await self._pool().show()})

    async def remove_server(self, request: Request) -> JsonResponse:
        """Remove the server at `url`: send it no new requests, and wait for its requests in flight."""
        url = _url(await self._known(request, "url"))
        await self._pool().remove(url)
        return JsonResponse({"servers": await self._pool().show()})

    async def _known(self, request: Request, *fields: str) -> Mapping[str, Any]:
        """The body of an endpoint that accepts only these fields."""
        body = await self._body(request)
        _check_known(request, body, *fields)
        return body

    async def _body(self, request: Request) -> Mapping[str, Any]:
        self._access.check_admin(key_of(request))
        return await self._bodies.read_object(request)

    async def _read(self, request: Request) -> None:
        """Check the key and the body of an endpoint that only reads, and has no field."""
        self._access.check_reader(key_of(request))
        await self._bodies.read_object(request)

    def _check_trained(self) -> None:
        """Raise EngineIncapable if the model is frozen."""
        if self._model is not None and self._model.kind is not RouteKind.POLICY:
            raise EngineIncapable(f"the model {self._model.name} is {self._model.kind}: its weights never change")

    def _pool(self) -> ServerPool:
        if self._servers is None:
            raise EngineIncapable("this engine is not a pool of servers; start Tokengrove with --engine URL[,URL...]")
        return self._servers

    async def _state(self, **more: Any) -> JsonResponse:
        info, paused, load = self._gate.info(), self._gate.state.paused, await self._admin.load()
        state = {
            "engine": info.name,
            "model": info.model,
            "revision": self._revision,
            "version": info.weight_version,
            "paused": None if paused is None else paused.value,
            "in_flight": load.in_flight,
            "waiting": load.waiting,
            "released": sorted(self._gate.state.released),
            "capabilities": sorted(info.capabilities),
            "context_length": info.context_length,
            "detail": info.detail,
            "images": self._sight if Capability.IMAGES in info.capabilities else None,
            "adapters": None if self._adapters.unused else self._adapters.show(),
        }
        if self._model is not None:
            state |= {"route": self._model.name, "kind": self._model.kind.value}
        return JsonResponse({**state, **more})


Call = Callable[[EngineEndpoints, Request], Awaitable[JsonResponse]]


class EnginesByModel:
    """The engines of a server by the names of their routes: a request names one in the query parameter `model`."""

    def __init__(self, served: ServedEngines, make: Callable[[ServedEngine], EngineEndpoints]) -> None:
        """`make`: the endpoints of an engine. Requests that name none are for the server's own engine, unless several
        models are trained."""
        self._served, self._make = served, make

    def endpoint(self, call: Call) -> Endpoint:
        """The endpoint that makes a call of the engine that the request names."""

        async def of_engine(request: Request) -> JsonResponse:
            return await call(self._make(self._of(request)), request)

        return of_engine

    def _of(self, request: Request) -> ServedEngine:
        names = self._served.routes.names
        name = request.query_params.get("model")
        if name is None:
            if len(names.trained) > 1:
                message = f"this server trains several models: name one with ?model= ({', '.join(names.trained)})"
                raise InvalidRequest(message, param="model")
            return self._served.main
        if (found := self._served.find(name)) is None:
            engines = ", ".join(each.route.name for each in self._served)
            raise InvalidRequest(
                f"'model' names {brief(name)}, which no engine here serves; name one of {engines}", param="model"
            )
        return found


def _check_known(request: Request, body: Mapping[str, Any], *fields: str) -> None:
    """Raise InvalidRequest for other fields than these, and note their values for the audit log."""
    check_given(body, fields)
    note(request, **{name: body.get(name) for name in fields})


def _mode(body: Mapping[str, Any], choices: tuple[PauseMode, ...]) -> PauseMode:
    name = body.get("mode")
    if name is None:
        return PauseMode.ABORT
    if name not in choices:
        raise InvalidRequest(f"'mode' must be one of {', '.join(choices)}", param="mode")
    return PauseMode(name)


def _tags(body: Mapping[str, Any]) -> tuple[str, ...]:
    if body.get("tags") is None:
        return ()
    tags = tuple(expect_str(tag, "tags") for tag in expect_list(body["tags"], "tags"))
    for tag in tags:
        if tag not in MEMORY_TAGS:
            raise InvalidRequest(
                f"'tags' contains {brief(tag)}, which is none of {', '.join(MEMORY_TAGS)}", param="tags"
            )
    return tags


def _url(body: Mapping[str, Any]) -> str:
    url = optional_text(body, "url")
    if url is None or not url.startswith(("http://", "https://")):
        raise InvalidRequest("'url' must be the http:// or https:// address of a server", param="url")
    return url
