"""Imports the packages of `tokengrove serve` once, in the fork server from which the tests fork their processes.

This module only imports, so no thread runs in the fork server. It imports no module of the project, so every forked
process initialises those itself.
"""

import gc
import importlib

for name in (
    "alembic.command",
    "fastokens",
    "httpx",
    "jiter",
    "llguidance",
    "numpy",
    "orjson",
    "prometheus_client",
    "psycopg",
    "renderers",
    "rich.console",
    "sqlalchemy.dialects.postgresql",
    "sqlalchemy.dialects.sqlite",
    "starlette.applications",
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "typer.core",
    "typer.rich_utils",
    "uvicorn.protocols.http.httptools_impl",
    "uvloop",
    "xxhash",
    "zstandard",
):
    importlib.import_module(name)
gc.freeze()
