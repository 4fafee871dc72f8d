"""Imports the packages that `tokengrove serve` uses, once: processes of the tests are forked from one that has them.

It only imports, so that no thread runs in the process that is forked; and nothing of the project, whose modules thus
begin anew in every process.
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
