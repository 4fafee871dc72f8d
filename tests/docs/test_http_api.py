"""docs/http-api.md has a section for every route, each with a request and a reply, and every error code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from proxy.app import build_app
from proxy.protocols.chat import protocol as chat
from proxy.protocols.completions import protocol as completions
from proxy.protocols.google import protocol as google
from proxy.protocols.messages import protocol as messages
from proxy.protocols.responses import protocol as responses
from proxy.settings import Settings
from tests.docs.pages import ROOT
from tokengrove import errors

PAGE = (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^### ", PAGE, flags=re.M)[1:]


def routes(folder: Path) -> set[str]:
    """`METHOD /path` of every route; the four addresses of a turn are one, as are those with and without session."""
    app = build_app(Settings(engine="scripted", database_url=f"sqlite:///{folder / 't.db'}"))
    found = {(method, route.path) for route in app.routes for method in route.methods - {"HEAD"}}
    named = {(method, _of_google(path.replace(":path", ""))) for method, path in found}
    bare = {(method, path.removeprefix("/{session}")) for method, path in named}
    of_a_session = {(method, f"/{{session}}{path}") for method, path in bare} & named
    turns = {(method, path) for method, path in bare if path.startswith("/v1")}
    without_v1 = {(method, path.removeprefix("/v1")) for method, path in turns}
    control = {(method, path.removeprefix("/{session}")) for method, path in of_a_session if "/rl/" in path}
    rest = bare - without_v1 - control | {(method, f"/{{session}}{path}") for method, path in control}
    return {f"{method} {path}" for method, path in rest}


def _of_google(path: str) -> str:
    """A path of Google's API under one of its versions."""
    return re.sub(r"(/v1alpha|/v1beta|/v1|)(/models/\{model\}:)", r"/v1beta\2", path)


def documented(section: str) -> set[str]:
    method, _, paths = section.splitlines()[0].partition(" ")
    return {f"{method} {path}" for path in paths.split(", ")}


def test_there_is_a_section_for_every_route_and_for_nothing_else(tmp_path: Path) -> None:
    assert set().union(*map(documented, SECTIONS)) == routes(tmp_path)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.splitlines()[0][:60])
def test_every_section_shows_a_request_to_its_endpoint_and_the_reply(section: str) -> None:
    languages = re.findall(r"^```(\w+)$", section.split("\n## ")[0], re.M)
    assert "bash" in languages and languages[-1] in ("json", "text")
    first = documented(section) & {item for item in documented(section) if _requests(section, item)}
    assert first, "no request goes to the endpoint"


def _requests(section: str, endpoint: str) -> bool:
    path = re.escape(endpoint.split(" ")[1].removeprefix("/{session}")).replace(r"\{session\}", "[^/ ]+")
    for name in ("model", "interaction", "digest", "trainer", "step"):
        path = path.replace(rf"\{{{name}\}}", "[^/ ]+")
    return re.search(path + r"(?=[ \n])", section.split("```bash", 1)[1]) is not None


def test_every_error_code_is_documented_with_its_status() -> None:
    classes = [errors.ProxyError]
    for kind in classes:
        classes += kind.__subclasses__()
    shown = {code: int(status) for code, status in re.findall(r"^\| `(\w+)` \| (\d+) \|", PAGE, re.M)}
    assert shown == {kind.code: kind.status for kind in classes if kind.__module__ == errors.__name__}


@pytest.mark.parametrize(
    ("api", "protocol"),
    [
        ("chat completions", chat),
        ("completions", completions),
        ("responses", responses),
        ("messages", messages),
        ("google", google),
    ],
)
@pytest.mark.parametrize("treatment", ["honoured", "ignored", "refused"])
def test_the_fields_of_each_api_are_documented_as_honoured_ignored_or_refused(
    api: str, protocol: Any, treatment: str
) -> None:
    [row] = re.findall(rf"^\| {api} \| {treatment} \| (.*) \|$", PAGE, re.M)
    assert set(re.findall(r"`([\w.]+)`", row)) == getattr(protocol, treatment.upper())
