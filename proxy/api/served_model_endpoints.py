"""`/engine/models`: the models of a server, and models that are served until it ends, with the admin key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from proxy.api.audit_log import note
from proxy.api.bodies import Bodies
from proxy.api.http import JsonResponse, key_of
from proxy.api.known_fields import check_given
from proxy.models.declared import DeclaredModel, engine_urls, read_model
from proxy.protocols.fields import expect_str
from proxy.served_engines import ServedEngines
from proxy.sessions.access import Access
from proxy.settings import Settings
from proxy.settings.checks import listed
from proxy.turns.running import RunningTurns
from proxy.upstream.hosts import check_url
from tokengrove.errors import ConfigurationError, InvalidRequest, UnsupportedParameter
from tokengrove.options.model import RouteKind


class ServedModelEndpoints:
    """Shows, adds and removes models. A model that is added here is not in the configuration: a restart forgets it."""

    def __init__(
        self, access: Access, bodies: Bodies, served: ServedEngines, running: RunningTurns, settings: Settings
    ) -> None:
        self._access, self._bodies, self._served, self._running = access, bodies, served, running
        self._hosts = tuple(name.lower().strip("[]") for name in listed(settings.model_hosts))

    async def index(self, request: Request) -> JsonResponse:
        """The models by name, without their keys."""
        self._access.check_reader(key_of(request))
        await self._bodies.read_object(request)
        return self._answer()

    async def add(self, request: Request) -> JsonResponse:
        """Serve another model: `name`, and the options of its table."""
        self._access.check_admin(key_of(request))
        body = await self._bodies.read_object(request)
        note(request, name=body.get("name"), kind=body.get("kind"))
        if not self._served.routes.names.declared:
            raise InvalidRequest(
                "this server declares no models, so it serves every name; start it with --models to add others",
                param="name",
            )
        model = self._read(body)
        try:
            await self._served.add(model)
        except ConfigurationError as error:
            raise InvalidRequest(str(error), param=_field(str(error), body)) from None
        return self._answer()

    async def remove(self, request: Request) -> JsonResponse:
        """Serve the model `name` no more."""
        self._access.check_admin(key_of(request))
        body = await self._bodies.read_object(request)
        check_given(body, ("name",))
        name = expect_str(body.get("name"), "name")
        note(request, name=name)
        await self._served.remove(name, self._running.uses)
        return self._answer()

    def _read(self, body: Mapping[str, Any]) -> DeclaredModel:
        """The model in a body. Raises InvalidRequest, which names the field."""
        name = expect_str(body.get("name"), "name")
        table = {key: value for key, value in body.items() if key != "name"}
        if "key_variable" in table:
            raise UnsupportedParameter(
                "'key_variable' reads a variable of the server, so only the configuration may name one; give 'key'",
                param="key_variable",
            )
        if table.get("url") is not None:
            check_url(expect_str(table["url"], "url"), self._hosts)
        try:
            model = read_model(name, table, {})
        except ConfigurationError as error:
            raise InvalidRequest(str(error), param=_field(str(error), table)) from None
        if model.kind is RouteKind.POLICY:
            raise InvalidRequest(
                "'kind' must be frozen or external here: trained models are declared in the configuration", param="kind"
            )
        for engine in engine_urls(dict(model.own).get("engine", "")):
            check_url(engine, self._hosts, "engine")
        if model.upstream is None and "//" not in dict(model.own).get("engine", ""):
            raise InvalidRequest(
                "'engine' must be the URLs of inference servers here: an engine in this process is declared in the "
                "configuration",
                param="engine",
            )
        return model

    def _answer(self) -> JsonResponse:
        return JsonResponse({"models": [_shown(each) for each in self._served.routes.names.declared.values()]})


def _field(message: str, table: Mapping[str, Any]) -> str | None:
    """The field that a message about a table names."""
    return next((key for key in table if re.search(rf"\.{re.escape(key)}\b", message)), None)


def _shown(model: DeclaredModel) -> dict[str, Any]:
    """A model without its key."""
    upstream = model.upstream
    own = {name: value for name, value in model.own if name in ("engine", "model", "tokenizer")}
    if upstream is not None:
        own = {"url": upstream.url, "api": upstream.api.value, "upstream_model": upstream.model}
    return {
        "name": model.name,
        "kind": model.kind.value,
        "lora": model.lora,
        "restricted": model.restricted,
        "max_turns": model.max_turns,
        "max_total_tokens": model.max_total_tokens,
        **own,
    }
