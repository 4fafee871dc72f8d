"""Help as plain text, with the flags under the headings of their groups. No name is cut on a narrow terminal."""

from __future__ import annotations

from typing import Any

import typer.core


class PlainHelp(typer.core.TyperCommand):
    """A command whose help has a section for each group of flags (`rich_help_panel`), in the order of the flags."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **{**named, "rich_markup_mode": None})

    def get_short_help_str(self, limit: int = 45) -> str:
        """The first sentence, whole: the list of commands wraps it."""
        return " ".join((self.help or "").split("\n\n")[0].split()).split(". ")[0].removesuffix(".")

    def format_options(self, ctx: Any, formatter: Any) -> None:  # typer's own copy of click has these types
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)
