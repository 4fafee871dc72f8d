"""Finds the images in a request's JSON, in the parts of its API that may have one, and writes images back to JSON.

Each image is replaced, in place, by an `ImagePart` before the body is parsed. JSON cannot contain an `ImagePart`, so
parsers recognise only images that were read. An unsearched body is parsed as for a model without vision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from proxy.protocols.fields import expect_object, expect_str, json_type, optional_str
from proxy.types import Api, ImagePart
from tokengrove.errors import InvalidRequest, UnsupportedParameter, brief

_DETAILS = {"auto": "", "low": "low", "high": "high", "original": "high"}
_KIND = {Api.CHAT: "image_url", Api.RESPONSES: "input_image", Api.MESSAGES: "image"}
_GOOGLE_FILES = "generativelanguage.googleapis.com"
_RESOLUTIONS = {"UNSPECIFIED": "", "LOW": "low", "MEDIUM": "", "HIGH": "high", "ULTRA_HIGH": "high"}
_OTHER_MEDIA = frozenset(
    {
        *("image", "image_url", "input_image", "input_audio", "audio_url", "video", "video_url", "input_video"),
        *("file", "input_file", "document"),
    }
)


class Source(NamedTuple):
    """An image as the client sent it: the value at `key` of `holder`. `name`: the path of the field.

    `text`: a data URL, base64 text or an http(s) URL, or its UTF-8 bytes in the body. `detail`: as in `ImagePart`.
    """

    holder: Any
    key: str | int
    text: str | memoryview
    name: str
    detail: str = ""

    def put(self, image: ImagePart) -> None:
        """Replace the source with the image."""
        self.holder[self.key] = image._replace(detail=self.detail)


def image_sources(body: Any, api: Api) -> list[Source]:
    """Return the images of a decoded body, in order. Raises InvalidRequest naming a part with an unsupported medium."""
    if not isinstance(body, dict):
        return []
    if api is Api.GENERATE:
        return _of_image_data(body)
    if api is Api.GOOGLE:
        return _of_contents(body)
    field = "input" if api is Api.RESPONSES else "messages"
    items = body.get(field)
    if api not in _KIND or type(items) is not list:
        return []
    found: list[Source] = []
    for index, item in enumerate(items):
        if type(item) is dict:
            content, output = item.get("content"), item.get("output")
            if type(content) is list:
                found += _of_parts(content, api, f"{field}[{index}].content")
            if type(output) is list:
                found += _of_parts(output, api, f"{field}[{index}].output")
            elif type(output) is dict and item.get("type") == "computer_call_output":
                found.append(_input_image(output, f"{field}[{index}].output"))
    return found


def with_data(value: Any, data_url: Callable[[str], str]) -> Any:
    """Return a body, or a value in it, with its `ImagePart`s written as images of the API.

    `data_url`: the data URL of an image, by digest.
    """
    if isinstance(value, list):
        return [data_url(item.digest) if isinstance(item, ImagePart) else with_data(item, data_url) for item in value]
    if not isinstance(value, dict):
        return value
    if isinstance(image := value.get("image_url"), ImagePart):
        url, detail = data_url(image.digest), {"detail": image.detail} if image.detail else {}
        if value.get("type") == "input_image":
            return {**value, "image_url": url, **detail}
        return {**value, "image_url": {"url": url, **detail}}
    if isinstance(image := value.get("inlineData"), ImagePart):
        head, _, data = data_url(image.digest).partition(";base64,")
        return {**value, "inlineData": {"mimeType": head.removeprefix("data:"), "data": data}}
    if isinstance(image := value.get("source"), ImagePart):
        head, _, data = data_url(image.digest).partition(";base64,")
        return {**value, "source": {"type": "base64", "media_type": head.removeprefix("data:"), "data": data}}
    return {name: with_data(item, data_url) for name, item in value.items()}


def written_images(value: Any) -> Iterator[ImagePart]:
    """The images of a body that a protocol wrote, in any order."""
    if isinstance(value, ImagePart):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from written_images(item)


def _of_parts(parts: list[Any], api: Api, name: str) -> Iterator[Source]:
    for index, part in enumerate(parts):
        if type(part) is not dict or (kind := part.get("type")) == "text":
            continue
        if kind == _KIND[api]:
            yield _READ[api](part, f"{name}[{index}]")
        elif kind == "tool_result" and api is Api.MESSAGES and type(part.get("content")) is list:
            yield from _of_parts(part["content"], api, f"{name}[{index}].content")
        elif kind == "document" and api is Api.MESSAGES:  # its parser refuses other sources, and images in answers
            source = part.get("source")
            if type(source) is dict and type(source.get("content")) is list:
                yield from _of_parts(source["content"], api, f"{name}[{index}].source.content")
        elif type(kind) is str and kind in _OTHER_MEDIA:
            raise UnsupportedParameter(
                f"'{name}[{index}]' has type {brief(kind)}; beside text this server takes images, "
                "which this API sends as "
                f"parts of type {brief(_KIND[api])}",
                param=f"{name}[{index}]",
            )


def _image_url(part: dict[str, Any], name: str) -> Source:
    """An image part of a chat message. Some clients send the URL alone, without an object around it."""
    value = part.get("image_url")
    if isinstance(value, str):
        return Source(part, "image_url", value, f"{name}.image_url", _detail(part, name))
    value = expect_object(value, f"{name}.image_url")
    text = expect_str(value.get("url"), f"{name}.image_url.url")
    return Source(part, "image_url", text, f"{name}.image_url.url", _detail(value, f"{name}.image_url"))


def _input_image(part: dict[str, Any], name: str) -> Source:
    """An image part of an input item, or the screenshot of a `computer_call_output`."""
    if part.get("image_url") is None and part.get("file_id") is not None:
        raise _no_files(f"{name}.file_id", "image_url")
    return Source(
        part,
        "image_url",
        expect_str(part.get("image_url"), f"{name}.image_url"),
        f"{name}.image_url",
        _detail(part, name),
    )


def _image_block(block: dict[str, Any], name: str) -> Source:
    source, at = expect_object(block.get("source"), f"{name}.source"), f"{name}.source"
    match source.get("type"):
        case "base64":
            # The bytes determine the type: agents often send a wrong `media_type`.
            optional_str(source, "media_type", f"{at}.")
            data = expect_str(source.get("data"), f"{at}.data")
            if data[:5] in ("http:", "https"):
                raise InvalidRequest(f"'{at}.data' must be base64 text, not a URL", param=f"{at}.data")
            return Source(block, "source", data, f"{at}.data")
        case "url":
            return Source(block, "source", expect_str(source.get("url"), f"{at}.url"), f"{at}.url")
        case "file":
            raise _no_files(f"{at}.file_id", "a source of type base64")
        case _:
            raise InvalidRequest(f"'{at}.type' must be base64 or url", param=f"{at}.type")


_READ = {Api.CHAT: _image_url, Api.RESPONSES: _input_image, Api.MESSAGES: _image_block}


def _of_image_data(body: dict[str, Any]) -> list[Source]:
    """The images of `/v1/generate`: base64 texts or URLs, one or a list, in the order of their tokens."""
    value = body.get("image_data")
    if value is None:
        return []
    if isinstance(value, str):
        value = body["image_data"] = [value]
    if not isinstance(value, list):
        message = f"'image_data' must be a list of base64 texts or URLs, not {json_type(value)}"
        raise InvalidRequest(message, param="image_data")
    names = (f"image_data[{index}]" for index in range(len(value)))
    return [Source(value, at, expect_str(value[at], name), name) for at, name in enumerate(names)]


def _of_contents(body: dict[str, Any]) -> list[Source]:
    """The images of Google's API, in the user's parts and in `parts` of a `functionResponse`."""
    contents, config = body.get("contents"), _either(body, "generationConfig")
    config = config if isinstance(config, dict) else {}
    level = _either(config, "mediaResolution")
    found: list[Source] = []
    for index, content in enumerate(contents if isinstance(contents, list) else ()):
        parts = content.get("parts") if isinstance(content, dict) else None
        if isinstance(parts, list):
            found += _of_google_parts(parts, f"contents[{index}].parts", level)
    return found


def _of_google_parts(parts: list[Any], name: str, level: Any) -> Iterator[Source]:
    """`level`: the resolution of images without one of their own."""
    for index, part in enumerate(parts):
        if not isinstance(part, dict):
            continue
        path = f"{name}[{index}]"
        result = _either(part, "functionResponse")
        if isinstance(result, dict) and isinstance(inner := result.get("parts"), list):
            yield from _of_google_parts(inner, f"{path}.functionResponse.parts", level)
        for field in ("inlineData", "fileData"):
            if (value := _either(part, field)) is not None:
                key = field if field in part else _snake(field)
                yield _google_image(part, key, expect_object(value, f"{path}.{field}"), f"{path}.{field}", level)


def _google_image(part: dict[str, Any], key: str, value: Mapping[str, Any], name: str, level: Any) -> Source:
    """The bytes determine the type of an image; `mimeType` tells only whether it is one."""
    kind = _either(value, "mimeType")
    if kind is not None and not expect_str(kind, f"{name}.mimeType").startswith(("image/", "application/octet-stream")):
        message = f"'{name}.mimeType' is {brief(kind)}; beside text this server takes images"
        raise UnsupportedParameter(message, param=f"{name}.mimeType")
    field = "data" if key.startswith("inline") else "fileUri"
    text = expect_str(_either(value, field), f"{name}.{field}")
    if field == "fileUri" and (_GOOGLE_FILES in text or text[:5] not in ("http:", "https")):
        raise _no_files(f"{name}.fileUri", "inlineData")
    own = _either(part, "mediaResolution")
    own = _either(own, "level") if isinstance(own, dict) else None
    return Source(part, key, text, f"{name}.{field}", _resolution(own or level, name))


def _resolution(level: Any, name: str) -> str:
    """The `detail` of a resolution; resolutions between are those of the model's processor."""
    if level is None:
        return ""
    found = expect_str(level, f"{name}.mediaResolution").removeprefix("MEDIA_RESOLUTION_")
    if found not in _RESOLUTIONS:
        known = ", ".join(f"MEDIA_RESOLUTION_{each}" for each in _RESOLUTIONS)
        raise InvalidRequest(f"'mediaResolution' must be one of {known}", param=f"{name}.mediaResolution")
    return _RESOLUTIONS[found]


def _either(value: Mapping[str, Any], name: str) -> Any:
    """A field of Google's API, whose clients write it in camel case or in snake case."""
    found = value.get(name)
    return value.get(_snake(name)) if found is None else found


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def _detail(part: Mapping[str, Any], name: str) -> str:
    detail = part.get("detail")
    if detail is None:
        return ""
    if not isinstance(detail, str) or detail not in _DETAILS:
        raise InvalidRequest(f"'{name}.detail' must be one of {', '.join(_DETAILS)}", param=f"{name}.detail")
    return _DETAILS[detail]


def _no_files(name: str, instead: str) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"'{name}' is not supported: this server keeps no files; send the image in {instead}", param=name
    )
