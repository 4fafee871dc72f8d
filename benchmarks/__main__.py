"""Measure rollout gateways in front of a fake engine: what they cost, and whether their exports are exact.

Each gateway runs from an environment of its own (`python -m benchmarks.environments NAME...`), on one core; the engine
and the agents have the others. Results go to OUT/results.json, OUT/results.md and OUT/results.svg. README.md explains
every measure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import uvloop

from benchmarks.environments import FOLDER, python_of, version_of
from benchmarks.gateways import GATEWAYS
from benchmarks.gateways.base import Gateway, Place
from benchmarks.gateways.direct import Direct
from benchmarks.measures import Bench, Figures, PhaseFailed, Plan, engine_of
from benchmarks.model import write_model, write_vision_model
from benchmarks.processes import NotStarted, free_port, on_core
from benchmarks.report import write_report

ROOT = Path(__file__).parents[1]
DEFAULT = ("tokengrove", "rllm", "litellm")


async def measure(gateway: Gateway, python: Path, folder: Path, model: Path, plan: Plan) -> Figures:
    """Return the figures of a gateway, in front of an engine of its own."""
    engine = engine_of(model, free_port(), folder / "engine.log", ROOT, sys.executable)
    timeout = aiohttp.ClientTimeout(total=600)
    try:
        async with aiohttp.ClientSession(timeout=timeout, read_bufsize=2**20) as http:
            bench = Bench(gateway, Place(python, free_port(), folder, engine.url, model), engine, http, plan)
            if isinstance(gateway, Direct):
                return await bench.latency_alone()
            await bench.start()
            try:
                return await bench.run()
            finally:
                bench.process.stop()
    finally:
        engine.stop()


def run(names: list[str], environments: Path, tokenizer: Path | None, plan: Plan, keep: Path | None) -> dict[str, Any]:
    """Measure the pass-through and the named gateways. A gateway that fails is reported with the reason."""
    found: dict[str, Any] = {}
    folder = keep or Path(tempfile.mkdtemp(prefix="gateways-"))
    model = folder / "model"
    write_model(model, tokenizer)
    write_vision_model(folder / "model-vision", model)
    for gateway in (Direct(), GATEWAYS["pass-through"], *(GATEWAYS[name] for name in names)):
        python = python_of(gateway, environments)
        entry: dict[str, Any] = {"wire": gateway.wire, "keeps": gateway.keeps, "licence": gateway.licence}
        found[gateway.name] = entry
        if python is None:
            entry["left_out"] = f"not installed: python -m benchmarks.environments {gateway.name}"
            continue
        entry["version"] = version_of(gateway, python)
        print(f"{gateway.name} {entry['version']} ...", file=sys.stderr, flush=True)
        (folder / gateway.name).mkdir()
        began = time.monotonic()
        try:
            with on_core(-1):
                entry["figures"] = uvloop.run(measure(gateway, python, folder / gateway.name, model, plan))
        except (TimeoutError, NotStarted, PhaseFailed, aiohttp.ClientError) as error:
            entry["left_out"] = f"{type(error).__name__}: {error}"
        entry["took_s"] = time.monotonic() - began
        print(f"  {entry['took_s']:.0f} s {entry.get('left_out', '')}", file=sys.stderr, flush=True)
    if keep is None:
        shutil.rmtree(folder)
    return found


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    cpu = platform.processor() or platform.machine()
    facts = Path("/proc/cpuinfo")
    if facts.exists():
        names = [line.partition(":")[2].strip() for line in facts.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    load = psutil.getloadavg()[0]
    return {"cpu": cpu, "cores": psutil.cpu_count(), "python": platform.python_version(), "load_before": round(load, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    others = sorted(set(GATEWAYS) - {"pass-through"})
    names = parser.add_argument("--gateways", nargs="+", choices=others, default=list(DEFAULT), metavar="NAME")
    names.help = ", ".join(others)
    parser.add_argument("--environments", type=Path, default=FOLDER, help="folder of the gateways' environments")
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer.json; default: one trained on the load")
    parser.add_argument("--quick", action="store_true", help="a fraction of the load: whether it works, not how fast")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"), help="folder of the results")
    parser.add_argument("--keep", type=Path, help="new folder for the files of engines and gateways; default: deleted")
    options = parser.parse_args()
    if options.keep is not None:
        options.keep.mkdir(parents=True)
    plan = Plan.quick() if options.quick else Plan()
    results: dict[str, Any] = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "plan": asdict(plan)}
    results["command"] = " ".join(sys.argv[1:])
    environments, keep = options.environments.resolve(), options.keep.resolve() if options.keep else None
    began = time.monotonic()
    results["gateways"] = run(options.gateways, environments, options.tokenizer, plan, keep)
    results["took_s"] = round(time.monotonic() - began)
    used = os.times()
    results["cpu_s"] = round(used.user + used.system + used.children_user + used.children_system)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(write_report(results, options.out))


if __name__ == "__main__":
    main()
