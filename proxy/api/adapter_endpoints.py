"""`/engine/adapters`: a trainer publishes the LoRA adapters of a route, with the admin key."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from proxy.api.audit_log import note
from proxy.api.bodies import Bodies
from proxy.api.headers import headers_of
from proxy.api.http import JsonResponse, key_of
from proxy.api.known_fields import check_given, refuse
from proxy.engine.adapter_files import AdapterFiles
from proxy.engine.adapters import Adapters
from proxy.engine.interface import AdapterSource
from proxy.engine.versions import LARGEST_VERSION
from proxy.protocols.fields import expect_str, json_type, optional_int, optional_text
from proxy.sessions.access import Access
from proxy.store.deliveries import Event
from proxy.store.outbox import Tell
from tokengrove.errors import InvalidRequest, NotFound, brief


class AdapterEndpoints:
    """The endpoints of a trainer of adapters."""

    def __init__(
        self,
        access: Access,
        bodies: Bodies,
        adapters: Mapping[str, Adapters],
        files: AdapterFiles,
        tell: Tell | None = None,
    ) -> None:
        """`adapters`: those of each policy by its route, the server's own first. `files`: those sent as bytes.
        `tell` stores an event."""
        self._tell = tell
        self._access, self._bodies, self._adapters, self._files = access, bodies, adapters, files

    async def index(self, request: Request) -> JsonResponse:
        """List the live adapters of each route."""
        self._access.check_reader(key_of(request))
        await self._bodies.read_object(request)
        shown = [{"name": name, **adapters.show()} for name, adapters in self._adapters.items()]
        return JsonResponse({"adapters": shown})

    async def publish(self, request: Request) -> JsonResponse:
        """Publish an adapter, once there is room for it: `path`, or `config` and `tensors`.

        `name`: the route; by default that of the server's own engine. `version`: by default one more than the newest.
        """
        self._access.check_admin(key_of(request))
        adapters, version, source = await self._read(request)
        version = await adapters.publish(source, version)
        note(request, version=version)
        if self._tell is not None:
            told = {"version": version, "model": adapters.route or None, "adapter": True}
            await self._tell(Event.VERSION_PUBLISHED, told)
        return JsonResponse({"name": adapters.route, "version": version, "live": adapters.show()["live"]})

    async def withdraw(self, request: Request) -> JsonResponse:
        """Unload the adapter `version` of `name`, which must be unused and not the newest."""
        self._access.check_admin(key_of(request))
        body = await self._bodies.read_object(request)
        check_given(body, ("name", "version"))
        note(request, name=body.get("name"), version=body.get("version"))
        adapters, version = self._named(body), _version(body)
        if version is None:
            raise InvalidRequest("'version' is missing: it names the adapter", param="version")
        await adapters.withdraw(version)
        return JsonResponse({"name": adapters.route, **adapters.show()})

    async def _read(self, request: Request) -> tuple[Adapters, int | None, AdapterSource]:
        """Read the body of a publication. Its memory is free again while the publication waits."""
        with self._bodies.upload(request.scope, headers_of(request.scope), request.receive) as upload:
            raw = await upload.read()
            body = await upload.decode_object(raw)
            check_given(body, ("name", "path", "config", "tensors", "version"))
            note(request, **{name: body.get(name) for name in ("name", "path", "version")})
            adapters, version = self._named(body), _version(body)
            path = optional_text(body, "path")
            if path:
                refuse(body, ("config", "tensors"), "is in the folder 'path' already; send one or the other")
                return adapters, version, AdapterSource(path)
            if path is not None or (body.get("config") is None and body.get("tensors") is None):
                raise InvalidRequest(
                    "'path' is missing: it names a folder with adapter_config.json and adapter_model.safetensors; or "
                    "send 'config' and 'tensors'",
                    param="path",
                )
            config = _config(body)
            tensors = await upload.do(len(raw), _decoded, expect_str(body.get("tensors"), "tensors"))
            return adapters, version, await asyncio.to_thread(self._files.write, config, tensors)

    def _named(self, body: Mapping[str, Any]) -> Adapters:
        """The adapters of a route. Without a table of models, the only route may have any name."""
        name = optional_text(body, "name")
        if name is None and len(self._adapters) > 1:
            raise InvalidRequest(
                f"'name' is missing: this server trains several models ({', '.join(self._adapters)})", param="name"
            )
        if name is None or list(self._adapters) == [""]:
            return next(iter(self._adapters.values()))
        if name not in self._adapters:
            known = ", ".join(self._adapters)
            raise NotFound(f"'name' is {brief(name)}, which is none of the policies: {known}", param="name")
        return self._adapters[name]


def _version(body: Mapping[str, Any]) -> int | None:
    return optional_int(body, "version", least=1, most=LARGEST_VERSION)


def _config(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The contents of adapter_config.json. Raises InvalidRequest if it is none of a LoRA adapter."""
    config = body.get("config")
    if not isinstance(config, dict):
        raise InvalidRequest(
            f"'config' must be the object in adapter_config.json, not {json_type(config)}", param="config"
        )
    if (kind := config.get("peft_type")) != "LORA":
        raise InvalidRequest(f"'config.peft_type' must be \"LORA\", not {brief(kind)}", param="config.peft_type")
    return config


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"'tensors' is no base64: {error}", param="tensors") from None
