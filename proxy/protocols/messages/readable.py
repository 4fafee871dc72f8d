"""Writes blocks that no chat template knows as text: documents, search results, the state of a browser, and results of
tools that a provider ran.

The text is a function of the block alone, so a history that is sent again is the same conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from proxy.protocols.fields import expect_list, expect_object, expect_str, optional_str
from proxy.protocols.messages.accepted_types import SOURCES, Treatment
from proxy.protocols.parts import image_of
from proxy.protocols.tool_inputs import json_text
from proxy.types import ImagePart
from tokengrove.errors import UnsupportedParameter, brief

Part = str | ImagePart

_ACCEPTED = [
    kind for (block, kind), row in SOURCES.items() if block == "document" and row.treatment is Treatment.SERVED
]
_CHANGES = {
    "tab_opened": "opened the tab {tab_id}",
    "download_started": "download {download_id} of {url} has started",
    "download_completed": "download {download_id} of {url} is complete",
    "download_failed": "download {download_id} of {url} has failed",
}
_MORE = ("path", "size_bytes", "error")


def document_parts(block: Mapping[str, Any], name: str) -> list[Part]:
    """A `document`: its title, its context and its text, each in tags. Raises InvalidRequest."""
    source, at = expect_object(block.get("source"), f"{name}.source"), f"{name}.source"
    kind = source.get("type")
    if kind == "text":
        media = optional_str(source, "media_type", f"{at}.")
        if media not in (None, "text/plain"):
            message = f"'{at}.media_type' must be text/plain, not {brief(media)}"
            raise UnsupportedParameter(message, param=f"{at}.media_type")
        body: list[Part] = [expect_str(source.get("data"), f"{at}.data")]
    elif kind == "content":
        body = _content_parts(source.get("content"), f"{at}.content", images=True)
    else:
        row = SOURCES.get(("document", kind)) if isinstance(kind, str) else None
        how = f"{row.how}; " if row is not None else ""
        raise UnsupportedParameter(
            f"'{at}.type' {brief(kind)} of a 'document' is not supported: {how}accepted are {', '.join(_ACCEPTED)}",
            param=f"{at}.type",
        )
    heads = {field: optional_str(block, field, f"{name}.") for field in ("title", "context")}
    return _tagged("document", heads, body)


def search_result_parts(block: Mapping[str, Any], name: str) -> list[Part]:
    """A `search_result`: its title, its source and its text, each in tags. Raises InvalidRequest."""
    heads: dict[str, str | None] = {
        field: expect_str(block.get(field), f"{name}.{field}") for field in ("title", "source")
    }
    return _tagged("search_result", heads, _content_parts(block.get("content"), f"{name}.content", images=False))


def browser_state_text(block: Mapping[str, Any], name: str) -> str:
    """The tabs of a browser, and what a call changed. Raises InvalidRequest."""
    lines = ["Open tabs:"]
    for index, value in enumerate(expect_list(block.get("tabs"), f"{name}.tabs")):
        at = f"{name}.tabs[{index}]"
        tab = expect_object(value, at)
        tab_id, title, url = (expect_str(tab.get(field), f"{at}.{field}") for field in ("tab_id", "title", "url"))
        lines.append(f"- {tab_id}: {title} {url}{' (active)' if tab.get('active') is True else ''}")
    changes = block.get("state_changes")
    for index, value in enumerate([] if changes is None else expect_list(changes, f"{name}.state_changes")):
        lines.append(_change(expect_object(value, at := f"{name}.state_changes[{index}]"), at))
    return "\n".join(lines)


def result_parts(block: Mapping[str, Any], name: str) -> list[Part]:
    """The result of a tool that a provider ran: its texts, else its JSON. Raises UnsupportedParameter if encrypted."""
    content, at = block.get("content"), f"{name}.content"
    items = content if isinstance(content, list) else [content]
    for item in items:
        if isinstance(item, dict) and any(key.startswith("encrypted") and item[key] for key in item):
            kind = brief(block.get("type"))
            message = f"'{name}' of type {kind} is encrypted, so the model cannot read it; leave out call and result"
            raise UnsupportedParameter(message, param=name)
    if content is None or isinstance(content, str):
        return [content or ""]
    if isinstance(content, dict) and content.get("type") == "web_fetch_result":
        document = expect_object(content.get("content"), f"{at}.content")
        url = expect_str(content.get("url"), f"{at}.url")
        return [f"{url}\n", *document_parts(document, f"{at}.content")]
    if isinstance(content, list) and all(isinstance(item, dict) and item.get("type") == "text" for item in content):
        return _content_parts(content, at, images=False)
    return [json_text(content, at)]


def _tagged(tag: str, heads: Mapping[str, str | None], body: list[Part]) -> list[Part]:
    lines = [f"<{name}>{value}</{name}>\n" for name, value in heads.items() if value]
    return [f"<{tag}>\n{''.join(lines)}<content>\n", *body, f"\n</content>\n</{tag}>\n"]


def _content_parts(content: Any, name: str, *, images: bool) -> list[Part]:
    """A text, or the text of blocks, each on a line of its own, and their images."""
    if isinstance(content, str):
        return [content]
    parts: list[Part] = []
    for index, value in enumerate(expect_list(content, name)):
        block = expect_object(value, at := f"{name}[{index}]")
        if parts:
            parts.append("\n")
        if images and (image := image_of(block)) is not None:
            parts.append(image)
        elif block.get("type") == "text":
            parts.append(expect_str(block.get("text"), f"{at}.text"))
        else:
            message = (
                f"'{at}' has type {brief(block.get('type'))}; accepted is text{' or, of vision models, image' * images}"
            )
            raise UnsupportedParameter(message, param=at)
    return parts


def _change(change: Mapping[str, Any], name: str) -> str:
    kind = change.get("type")
    told = _CHANGES.get(kind) if isinstance(kind, str) else None
    if told is None:
        message = f"'{name}.type' {brief(kind)} is not supported; accepted are {', '.join(_CHANGES)}"
        raise UnsupportedParameter(message, param=f"{name}.type")
    fields = {field: expect_str(change.get(field), f"{name}.{field}") for field in _fields(told)}
    more = [f"{field} {change[field]}" for field in _MORE if isinstance(change.get(field), str | int)]
    return f"- {told.format(**fields)}{': ' * bool(more)}{', '.join(more)}"


def _fields(told: str) -> Iterator[str]:
    return (field for field in ("tab_id", "download_id", "url") if f"{{{field}}}" in told)
