"""Parameters of a function as a list, which qwen-agent sends as its tools declare them, instead of a JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.protocols.fields import expect_object, expect_str, optional_bool
from tokengrove.errors import InvalidRequest, brief


def parse_parameters(value: Any, name: str) -> Mapping[str, Any]:
    """Return the JSON schema of a function's parameters, from a schema or a list; null is an empty schema.

    An item of a list is the schema of one parameter, with its `name`, and `required` if an argument must have it.
    `name`: the path of the field. Raises InvalidRequest with the path of a field.
    """
    if value is None:
        return {}
    if not isinstance(value, list):
        return expect_object(value, name)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for index, item in enumerate(value):
        parameter = dict(expect_object(item, at := f"{name}[{index}]"))
        called = expect_str(parameter.pop("name", None), f"{at}.name")
        if called in properties:
            raise InvalidRequest(f"'{at}.name' is {brief(called)}, like an earlier one", param=f"{at}.name")
        if optional_bool(parameter, "required", at=f"{at}."):
            required.append(called)
        parameter.pop("required", None)
        properties[called] = parameter
    return {"type": "object", "properties": properties, "required": required}
