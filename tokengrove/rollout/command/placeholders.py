"""Replaces `{...}` in the words of a command with values of its episode. Other braces are unchanged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from tokengrove.errors import InvalidRequest
from tokengrove.rollout.command.addresses import addresses_of
from tokengrove.rollout.command.prompts import usual_prompt
from tokengrove.rollout.episodes import Episode
from tokengrove.rollout.placeholder_names import PLACEHOLDER


@dataclass(frozen=True, slots=True)
class Placeholders:
    """The values of one episode by name, as texts. `data`: the task's row. `prompt`: None if the task has none."""

    values: Mapping[str, str]
    data: Mapping[str, Any]
    prompt: str | None

    @classmethod
    def of(
        cls,
        episode: Episode,
        *,
        workdir: str,
        home: str,
        model: str = "tokengrove",
        prompt: str | None = None,
        server_url: str | None = None,
        container: str = "",
    ) -> Placeholders:
        """The values of an episode. `prompt`: a template in which the other placeholders are filled.

        Raises InvalidRequest if the template names a field that the task lacks.
        """
        addresses = addresses_of(episode.session, server_url)
        values = {
            **{"task_id": episode.task.task_id, "session_id": episode.session.session_id, "model": model},
            **{"sample": str(episode.plan.sample), "seed": str(episode.plan.seed), "api_key": addresses.api_key},
            **{"base_url": addresses.base_url, "root_url": addresses.root_url},
            **{"workdir": workdir, "home": home, "container": container},
        }
        data = episode.task.data
        bare = cls(values, data, None)
        return cls(values, data, usual_prompt(data) if prompt is None else bare.fill(prompt))

    def fill(self, text: str) -> str:
        """Return the text with its placeholders replaced. Raises InvalidRequest for a placeholder without a value."""
        return PLACEHOLDER.sub(self._value, text)

    def words(self, words: Iterable[str]) -> list[str]:
        """`fill` for the words of a command line."""
        return [self.fill(word) for word in words]

    def path(self, text: str) -> str:
        """Like `fill`, for a path of this machine. Raises InvalidRequest if a value adds `..` to the path."""
        filled = self.fill(text)
        if ".." in PurePath(filled).parts and ".." not in PurePath(text).parts:
            raise InvalidRequest(
                f"task {self.values['task_id']!r} gives {filled!r} for the path {text!r}: a field in a path must not "
                "contain '..'",
                param="data",
            )
        return filled

    def script(self, text: str) -> tuple[str, dict[str, str]]:
        """A script for the shell and the variables that it needs, as in `with_variables`. Raises InvalidRequest."""
        return with_variables(text, self._value)

    def _value(self, match: re.Match[str]) -> str:
        name, path = match.groups()
        if name is None:
            return _as_text(self._field(path))
        if name != "prompt":
            return self.values[name]
        if self.prompt is None:
            raise InvalidRequest(
                f"task {self.values['task_id']!r} has no text for {{prompt}}: name its field with "
                "--prompt '{data.FIELD}'",
                param="prompt",
            )
        return self.prompt

    def _field(self, path: str) -> Any:
        if path in self.data:
            return self.data[path]
        found: Any = self.data
        for part in path.split("."):
            try:
                found = found[int(part)] if isinstance(found, list) else found[part]
            except (KeyError, IndexError, TypeError, ValueError):
                known = ", ".join(map(str, self.data)) or "none"
                raise InvalidRequest(
                    f"task {self.values['task_id']!r} has no field {path!r} for {{data.{path}}}; it has {known}",
                    param="data",
                ) from None
        return found


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_TOKEN = re.compile(rf"{PLACEHOLDER.pattern}|\\.|['\"\n]|(?<![^\s;&|(])#", re.DOTALL)
_NAME = "TOKENGROVE_VALUE_"


def with_variables(text: str, value: Callable[[re.Match[str]], str]) -> tuple[str, dict[str, str]]:
    """Return a script with `${...}` in place of its placeholders, and the variables that it needs.

    In single quotes, where a shell expands nothing, the quotes are closed before a value and opened again after it.
    Without quotes, the shell splits a value at white space, like every variable. In a here-document with a quoted
    delimiter, values are not expanded.
    """
    variables: dict[str, str] = {}
    inside = ""  # the quote, or the # of a comment, that the following text is in

    def part(match: re.Match[str]) -> str:
        nonlocal inside
        found = match[0]
        if found.startswith("{"):
            name = f"{_NAME}{len(variables)}"
            variables[name] = value(match)
            return f"""'"${{{name}}}"'""" if inside == "'" else f"${{{name}}}"
        inside = _after(inside, found)
        return found

    return _TOKEN.sub(part, text), variables


def _after(inside: str, found: str) -> str:
    """The quote or comment that the text after this quote, line end, escaped character or # is in."""
    if inside == "#":
        return "" if found == "\n" else inside
    if inside == "'":
        return "" if found.endswith("'") else inside  # a backslash has no special meaning here
    if found == inside:
        return ""
    return found if not inside and found in ("'", '"', "#") else inside
