"""Compiles chat templates with minijinja, which is several times faster than jinja2 but not equal in everything.

`compile_minijinja` refuses templates with constructs for which the text is known to differ. A compiled template returns
None for a conversation for which the text may differ, and the caller then uses jinja2. The self-check of
`template_text` looks for the remaining differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from json import JSONEncoder
from typing import Any

import orjson
from jinja2 import nodes
from minijinja import Environment

from proxy.rendering.templates.jinja2_template import strftime_now, to_json

WriteFast = Callable[[Mapping[str, Any]], str | None]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Filters, tests and methods that both engines apply alike to every value that both accept.
_FILTERS = _words(
    "capitalize count d default first items join last length list lower map reject rejectattr replace"
    " reverse safe select selectattr string title tojson trim upper"
)
_TESTS = _words(
    "!= == boolean defined eq equalto false in integer iterable mapping ne none number sequence string true undefined"
)
_METHODS = _words(
    "capitalize count endswith find get isdigit items join keys lower lstrip replace rstrip split"
    " startswith strip title upper values"
)
_LOOP = _words("index index0 first last length previtem nextitem")
_MISSING = _words("lipsum cycler joiner self varargs kwargs")

# White space in Python, not in Rust: `trim`, `strip` and `split` differ.
_SEPARATORS = tuple(f"\\u001{digit}".encode() for digit in "cdef")

# minijinja holds the GIL while it writes, so it is not used for texts that take longer than a few milliseconds.
_MOST_VALUES, _MOST_BYTES = 4_000, 2**20

# Between these bounds, both engines write fractions without exponent. They write 1.0 differently.
_LEAST, _MOST = 1e-4, 1e16

# Keywords of JSON schemas that hold lists. If they hold something else, minijinja writes other text: a loop over the
# letters of a text has no last iteration, and `in` finds methods of a dict (`items`, `update` ...) like its keys.
_LISTS = _words("oneOf anyOf allOf required")

# The filter `tojson` without options.
_JSON = JSONEncoder(ensure_ascii=False)


class _Undecided(Exception):
    """minijinja cannot distinguish None from undefined here, and jinja2 treats them differently."""


def compile_minijinja(source: str, parsed: nodes.Template) -> WriteFast:
    """Compile a chat template. `parsed` is its jinja2 syntax tree. Raises ValueError with the reason if it cannot."""
    unlike = next(_differences(parsed), None)
    if unlike is not None:
        raise ValueError(f"differs in {unlike}")
    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        debug=False,
        auto_escape_callback=lambda name: False,
        filters={"tojson": _to_json},
        tests={"iterable": _iterable, "sequence": _sequence},
        globals={"raise_exception": _raise_exception, "strftime_now": strftime_now},
    )
    try:
        environment.add_template("chat", source)
    except Exception as error:
        raise ValueError(f"cannot compile it: {str(error).splitlines()[0]}") from error
    render = environment.render_template

    def write(context: Mapping[str, Any]) -> str | None:
        if not _written_alike(context):
            return None
        try:
            return render("chat", **context)
        except Exception:  # refused or failed: jinja2 decides which, with the message that clients know
            return None
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            return None

    return write


def _differences(parsed: nodes.Template) -> Iterator[str]:
    """Yield the constructs in a template whose text differs between the engines for some values."""
    yield from (f"`{name.name}`" for name in parsed.find_all(nodes.Name) if name.name in _MISSING)
    yield from (f"filter `{node.name}`" for node in parsed.find_all(nodes.Filter) if node.name not in _FILTERS)
    yield from (f"test `{node.name}`" for node in parsed.find_all(nodes.Test) if node.name not in _TESTS)
    for compared in parsed.find_all(nodes.Compare):
        if isinstance(compared.expr, nodes.Const) and hasattr(dict, str(compared.expr.value)):
            yield f"`{compared.expr.value}` in"
    called = {id(node.node) for node in parsed.find_all(nodes.Call)}
    spaces = _namespaces(parsed)
    for got in parsed.find_all(nodes.Getattr):
        of = got.node.name if isinstance(got.node, nodes.Name) else None
        if of == "loop":
            alike = got.attr in _LOOP
        elif id(got) in called:
            alike = got.attr in _METHODS
        else:
            alike = of in spaces or not hasattr(dict, got.attr)
        if not alike:
            yield f"`.{got.attr}`"


def _namespaces(parsed: nodes.Template) -> set[str]:
    """Return the names of namespaces. Their attributes may have any name, in both engines."""
    found = set()
    for assigned in parsed.find_all(nodes.Assign):
        match assigned:
            case nodes.Assign(target=nodes.Name(name=name), node=nodes.Call(node=nodes.Name(name="namespace"))):
                found.add(name)
    return found


def _written_alike(context: Mapping[str, Any]) -> bool:
    """Return whether both engines write these values alike: not too many values, no odd numbers or characters."""
    for message in context.get("messages", ()):
        if len(message.get("content") or "") > _MOST_BYTES:  # orjson would hold the GIL
            return False
    try:
        text = orjson.dumps(context)  # refuses surrogates and large integers
    except TypeError:
        return False
    if len(text) > _MOST_BYTES:
        return False
    for separator in _SEPARATORS:
        if separator in text:
            return False
    waiting: list[Any] = [context]
    for value in waiting:  # grows during the loop
        kind = type(value)
        if kind is dict:
            for keyword in _LISTS.intersection(value):
                if type(value[keyword]) in (str, dict):
                    return False
            waiting.extend(value.values())
        elif kind is list:
            waiting.extend(value)
        elif kind is float and (value.is_integer() or not _LEAST <= abs(value) < _MOST):
            return False
    return len(waiting) <= _MOST_VALUES


def _to_json(value: Any, **options: Any) -> str:
    if value is None:
        raise _Undecided
    return to_json(value, **options) if options else _JSON.encode(value)


def _iterable(value: Any) -> bool:
    if value is None:
        raise _Undecided
    return isinstance(value, Iterable)


def _sequence(value: Any) -> bool:
    if value is None:
        raise _Undecided
    return isinstance(value, Sized)


def _raise_exception(message: str) -> None:
    raise _Undecided(message)
