"""The command line. Thin: flags become `Settings`, and every foreseen failure is one line and a non-zero exit."""

from __future__ import annotations

import contextlib
import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_type_hints

import typer
import typer.core

from proxy.errors import ConfigurationError, ProxyError
from proxy.export_flags import ExportFlags
from proxy.settings import VARIABLE_PREFIX, Settings, from_environment

if TYPE_CHECKING:
    from starlette.applications import Starlette

app = typer.Typer(
    name="tokengrove",
    help="Standalone rollout proxy for agentic reinforcement learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class _PlainHelp(typer.core.TyperCommand):
    """Help as a list: a table of so many long flags and variables would cut their names at 80 columns."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **{**named, "rich_markup_mode": None})


DatabaseUrl = Annotated[
    str | None, typer.Option("--database-url", help="The database [TOKENGROVE_DATABASE_URL; sqlite:///tokengrove.db].")
]


def main() -> None:
    """The `tokengrove` command."""
    try:
        app()
    except ConfigurationError as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    print(f"tokengrove: {message}", file=sys.stderr)
    sys.exit(1)


def serve(**flags: Any) -> None:
    """Serve a model to agents and record what they do. Without arguments: a tiny built-in model on 127.0.0.1:8080."""
    settings = from_environment(flags)
    from proxy import server

    server.run(settings, lambda served, url: _announce(served, url, settings))


def _announce(served: Starlette, url: str, settings: Settings) -> None:
    """What is served, where, with which database, and the next command to try."""
    info, renderer = served.state.engine.info(), served.state.renderer
    print(f"tokengrove serves {served.state.model} at {url}")
    print(f"  engine    {info.name}, weight version {info.weight_version}, context {info.context_length} tokens")
    if info.detail:
        print(f"            {info.detail}")
    print(f"  renderer  {renderer.family}, encoding with {renderer.encoder}")
    print(f"  database  {served.state.store.label}")
    access = "admin key needed" if settings.admin_key else "open: any key or none, on this machine only"
    print(f"  access    {access}")
    for title, command in zip(("try", ""), _to_try(url, keys=settings.admin_key is not None), strict=True):
        print(f"  {title:10}{command}")
    sys.stdout.flush()


def _to_try(url: str, *, keys: bool) -> tuple[str, str]:
    """Two commands to paste. With keys a session is started first: its answer says where an agent may talk."""
    if keys:
        start = f"curl -s {url}/rl/start_session -H 'authorization: Bearer ADMIN_KEY' -d '{{\"task_id\": \"try\"}}'"
        return start, "then an agent, with the base_url and the api_key of the answer"
    turn = '{"model": "any", "max_tokens": 32, "messages": [{"role": "user", "content": "hello"}]}'
    export = '{"session_id": "try-1"}'
    return f"curl -s {url}/try-1/v1/chat/completions -d '{turn}'", f"curl -s {url}/export_trajectories -d '{export}'"


def demo(
    train: Annotated[
        bool, typer.Option("--train", help="Close the loop: train the model until it plays well.")
    ] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="With --train: of first weights and games; 0.")] = None,
    plot: Annotated[Path | None, typer.Option(help="With --train: where to draw the rewards (.svg or .html).")] = None,
) -> None:
    """Run two short agents against the built-in model, reward them, export, and show the trees and samples."""
    if train:
        _train_demo(seed or 0, plot)
        return
    if seed is not None or plot is not None:
        raise ConfigurationError("--seed and --plot are for demo --train")
    from rich.console import Console

    from proxy import server
    from proxy.rollout.demo import run_demo

    with tempfile.TemporaryDirectory(prefix="tokengrove-demo-") as folder:
        database = Path(folder) / "demo.db"
        settings = Settings(port=0, database_url=f"sqlite:///{database}", log_level="warning")
        with server.serving(settings) as url:
            run_demo(url, Console())


def _train_demo(seed: int, plot: Path | None) -> None:
    from rich.console import Console

    from proxy import server
    from proxy.app import write_tiny_model
    from proxy.rollout.train_demo import check_plot, run_train_demo

    check_plot(plot)
    with tempfile.TemporaryDirectory(prefix="tokengrove-demo-") as folder:
        model, database = Path(folder) / "tokengrove-tiny", Path(folder) / "demo.db"
        write_tiny_model(model, seed)
        # On the CPU even where there is a GPU: the trainer is there too, and ratios are exact on one kind of machine.
        settings = Settings(
            port=0,
            model=str(model),
            engine="transformers",
            engine_arg=("device=cpu",),
            database_url=f"sqlite:///{database}",
            log_level="warning",
        )
        try:
            with server.serving(settings) as url:
                run_train_demo(url, model, Console(), seed=seed, plot=plot)
        except ProxyError as error:
            _fail(error.message)


def doctor(
    model: Annotated[str | None, typer.Option(help="Folder of the model; none: the tiny built-in one.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder of the tokenizer, if it is another.")] = None,
    family: Annotated[str | None, typer.Option(help="Renderer family.")] = None,
    tool_parser: Annotated[str | None, typer.Option(help="Tool-call format.")] = None,
    reasoning_parser: Annotated[str | None, typer.Option(help="Reasoning format.")] = None,
) -> None:
    """Try a model's tokenizer and chat template, without its weights: what is bridged, parsed, forked or refused."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from proxy.app import examine_model

    given = {"model": model, "tokenizer": tokenizer, "family": family}
    settings = from_environment({**given, "tool_parser": tool_parser, "reasoning_parser": reasoning_parser})
    found = examine_model(settings)
    console = Console()
    for name, value in found.facts:
        console.print(f"{name:12}{value}", markup=False, highlight=False, soft_wrap=True)
    table = Table("conversation", "", "what was found")
    for check in found.checks:
        style = {"breaks": "red", "forks": "yellow", "refused": "dim"}.get(check.verdict, "green")
        table.add_row(Text(check.name), Text(check.verdict, style), Text(check.detail))
    console.print(table)
    if found.broken:
        raise typer.Exit(1)


Url = Annotated[str | None, typer.Option(help="A running server: export samples for training from it.")]
Key = Annotated[str | None, typer.Option(envvar="TOKENGROVE_ADMIN_KEY", help="The server's admin key, if it has one.")]


def export(
    everything: Annotated[bool, typer.Option("--all", help="Every session, with all that is stored of it.")] = False,
    output: Annotated[
        str, typer.Option("-o", "--output", help="File (.jsonl.zst or .jsonl) or -; with --url a folder.")
    ] = "-",
    database_url: DatabaseUrl = None,
    url: Url = None,
    admin_key: Key = None,
    require_complete: Annotated[
        bool, typer.Option("--require-complete", help="Exit code 1 when a session lacks calls.")
    ] = False,
    **flags: Any,
) -> None:
    """Write samples for training from a server (--url), or a backup of a database (--all) that may be in use."""
    if everything == (url is not None):
        raise ConfigurationError("give --url URL for samples to train on, or --all for a backup of the database")
    _check_of_one_kind(url, {"database_url": database_url}, {"require_complete": require_complete or None, **flags})
    if url is None:
        _back_up(output, database_url)
        return
    from proxy.client import export_files

    body = ExportFlags(**{name: value for name, value in flags.items() if value is not None}).body()
    try:
        tally = export_files.export_files(url, admin_key, output, body, body.pop("format"))
    except ProxyError as error:
        _fail(f"{url}: {error.message}")
    if require_complete and tally.incomplete:
        _fail(
            f"{tally.incomplete} of {tally.sessions} sessions are incomplete: a call failed, was cut or has not ended"
        )


def _check_of_one_kind(url: str | None, of_a_backup: dict[str, Any], of_samples: dict[str, Any]) -> None:
    """Raise ConfigurationError for a flag that goes with the other kind of export, and would do nothing here."""
    defaults = {spec.name: spec.default or None for spec in fields(ExportFlags)}
    strays, kind = (of_samples, "--url") if url is None else (of_a_backup, "--all")
    for name, value in strays.items():
        if value is not None and value != defaults.get(name):
            raise ConfigurationError(f"--{name.replace('_', '-')} goes with {kind}: it says nothing of this export")


def _back_up(output: str, database_url: str | None) -> None:
    from proxy.store.backup import export_all

    with _counting("exported") as progress:
        totals = export_all(_database_url(database_url), output, progress)
    print(f"exported {totals.sessions} sessions, {totals.interactions} interactions to {output}", file=sys.stderr)


def import_(
    path: Annotated[Path, typer.Argument(help="A file that `tokengrove export --all` wrote.")],
    on_conflict: Annotated[str, typer.Option(help="For sessions that are there already: refuse or skip.")] = "refuse",
    database_url: DatabaseUrl = None,
) -> None:
    """Add every session of a backup to the database, which is made or upgraded if need be."""
    from proxy.store.backup import Conflict, import_all

    if on_conflict not in list(Conflict):
        raise ConfigurationError(f"--on-conflict {on_conflict} is not one of {', '.join(Conflict)}")
    with _counting("imported") as progress:
        done, passed = import_all(_database_url(database_url), path, Conflict(on_conflict), progress)
    kept = f", {passed} were there already" if passed else ""
    print(f"imported {done.sessions} sessions, {done.interactions} interactions{kept}", file=sys.stderr)


@contextlib.contextmanager
def _counting(verb: str) -> Iterator[Callable[[Any], None]]:
    """A line on the terminal that counts sessions; nothing where there is no terminal."""
    from rich.console import Console

    with Console(stderr=True).status(f"{verb} nothing yet") as status:
        yield lambda totals: status.update(f"{verb} {totals.sessions} sessions, {totals.interactions} interactions")


db_app = typer.Typer(no_args_is_help=True, help="Look after the database; no server is needed.")
app.add_typer(db_app, name="db")


def _database_url(given: str | None) -> str:
    return from_environment({"database_url": given}).database_url


@db_app.command("upgrade")
def db_upgrade(database_url: DatabaseUrl = None) -> None:
    """Bring the database to the newest revision."""
    from proxy.store import schema

    print(f"the database is at revision {schema.upgrade(_database_url(database_url))}")


@db_app.command("current")
def db_current(database_url: DatabaseUrl = None) -> None:
    """Print the revision of the database; exit code 1 when it is not the one that this tokengrove needs."""
    from proxy.store import schema

    found, needed = schema.current(_database_url(database_url)), schema.head()
    print(f"revision {found or 'none'}, this tokengrove needs {needed}")
    if found != needed:
        raise typer.Exit(1)


@db_app.command("check")
def db_check(
    database_url: DatabaseUrl = None,
    session: Annotated[str | None, typer.Option(help="Only this session.")] = None,
) -> None:
    """Walk every stored session and prove that nothing is missing, broken or trained twice. Changes nothing."""
    from proxy.audit import audit
    from proxy.store.inspection import inspecting

    with inspecting(_database_url(database_url)) as inspection:
        result = audit(inspection, session)
    for finding in result.findings:
        print(finding)
    counts = f"{result.sessions} sessions, {result.interactions} interactions, {result.output_tokens} sampled tokens"
    print(f"{counts}, {result.begun_not_ended} calls begun and not ended, {len(result.findings)} findings")
    if result.findings:
        raise typer.Exit(1)


@db_app.command("prune")
def db_prune(
    older_than: Annotated[str, typer.Option(help="Sessions that ended so long ago: 30d, 12h, 90m or 3600s.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    database_url: DatabaseUrl = None,
) -> None:
    """Delete old sessions that were exported, acknowledged or have expired. Nothing else is ever deleted."""
    from proxy.store.pruning import prune

    pruned = prune(_database_url(database_url), _duration_s(older_than), dry_run=dry_run)
    verb = "would delete" if dry_run else "deleted"
    print(f"{verb} {pruned.sessions} sessions, {pruned.interactions} interactions, {pruned.tokens} tokens")
    if pruned.kept:
        print(f"kept {pruned.kept} sessions that ended as long ago, since nobody has exported them")


_SECONDS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}


def _duration_s(text: str) -> float:
    """Seconds of 30d, 12h, 90m or 3600s. Raises ConfigurationError."""
    number, unit = text[:-1], text[-1:]
    if not number.isdecimal() or unit not in _SECONDS:
        raise ConfigurationError(f"--older-than {text!r} is no duration; write 30d, 12h, 90m or 3600s")
    return float(int(number) * _SECONDS[unit])


def _export_signature() -> inspect.Signature:
    """The flags of the command itself, and one for each field of ExportFlags."""
    own = inspect.signature(export, eval_str=True).parameters.values()
    hints, parameters = get_type_hints(ExportFlags), []
    for spec in fields(ExportFlags):
        about, default = spec.metadata, spec.default or None
        kind: Any = list[str] | None if hints[spec.name] == tuple[str, ...] else hints[spec.name] | None
        name = f"--{spec.name.replace('_', '-')}"
        option = typer.Option(name, help=about["help"], rich_help_panel=about["panel"], **about["bounds"])
        kept = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(spec.name, kept, default=default, annotation=Annotated[kind, option]))
    return inspect.Signature([*(each for each in own if each.kind is not each.VAR_KEYWORD), *parameters])


def _settings_signature() -> inspect.Signature:
    """One flag for each field of Settings; None means not given, so that a variable or the default holds."""
    hints = get_type_hints(Settings)
    parameters = []
    for spec in fields(Settings):
        name = f"--{spec.name.replace('_', '-')}"
        text = f"{spec.metadata['help']} [{VARIABLE_PREFIX}{spec.name.upper()}; default: {_default_text(spec.default)}]"
        kind: Any = hints[spec.name]
        if kind in (bool, bool | None):
            option = typer.Option(f"{name}/--no-{spec.name.replace('_', '-')}", help=text, show_default=False)
            kind = bool | None
        elif kind == tuple[str, ...]:
            option, kind = typer.Option(name, help=text, show_default=False), list[str] | None
        else:
            option, kind = typer.Option(name, help=text, show_default=False), kind | None
        parameters.append(
            inspect.Parameter(
                spec.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
            )
        )
    return inspect.Signature(parameters)


def _default_text(value: Any) -> str:
    return "none" if value in (None, ()) else str(value)


def _command(
    function: Any,
    signature: inspect.Signature | None = None,
    name: str | None = None,
    kind: type[typer.core.TyperCommand] | None = None,
) -> None:
    if signature is not None:
        function.__signature__ = signature
        function.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    app.command(name, cls=kind)(function)


_command(serve, _settings_signature(), kind=_PlainHelp)
_command(demo)
_command(doctor)
_command(export, _export_signature())
_command(import_, name="import")


if __name__ == "__main__":
    main()
