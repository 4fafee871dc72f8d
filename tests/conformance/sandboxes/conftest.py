"""The SDKs of providers of sandboxes have a separate environment."""

from importlib.util import find_spec

collect_ignore_glob = (
    [] if all(map(find_spec, ("e2b", "daytona", "modal", "kubernetes", "uvicorn", "wsproto"))) else ["test_*.py"]
)
