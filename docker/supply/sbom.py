"""Writes what an environment consists of as CycloneDX 1.6 JSON, with licences, and refuses licences that are not known.

    PYTHONPATH=docker python -m supply.sbom PYTHON OUTPUT   # PYTHON: the interpreter of the environment

The images and the one file are built with it, so their bills of materials list what was really installed. It needs
cyclonedx-bom, which docker/locks/build.txt has.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from supply import vendored
from tokengrove import __version__

ROOT = Path(__file__).resolve().parents[2]
# What may be installed beside Apache-2.0 code and passed on with it. MPL-2.0 and LGPL-3.0 ask for the source of the
# package itself, which we use as it is and do not link into one program.
ALLOWED = {
    *(
        "0BSD",
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "CNRI-Python",
        "ISC",
        "LGPL-3.0-only",
    ),
    *("LLVM-exception", "MIT", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Zlib"),
}
# Classifiers name a licence without its version; these are as good as one of the above.
CLASSIFIERS = {
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: BSD License": "BSD-3-Clause",
    "License :: OSI Approved :: ISC License (ISCL)": "ISC",
    "License :: OSI Approved :: MIT License": "MIT",
    "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "License :: OSI Approved :: Python Software Foundation License": "PSF-2.0",
}
# Packages whose metadata name no licence in a way that a program can read, as their LICENSE files say.
READ_BY_HAND = {"fastokens": "Apache-2.0", "protobuf": "BSD-3-Clause", "transformers": "Apache-2.0"}


def bill_of(python: str) -> dict[str, Any]:
    """The bill of materials of the environment of an interpreter. Raises CalledProcessError."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--pyproject", str(ROOT / "pyproject.toml")]
    made = subprocess.run(
        [*command, "--no-validate", "--output-reproducible", python], check=True, capture_output=True, text=True
    )
    bill: dict[str, Any] = json.loads(made.stdout)
    asked = [python, "-c", "import platform; print(platform.python_version())"]
    version = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    root = bill["metadata"]["component"]
    root["version"], root["purl"] = __version__, f"pkg:pypi/tokengrove@{__version__}"
    for component in bill["components"]:
        if component["name"] in READ_BY_HAND:
            component["licenses"] = [{"license": {"id": READ_BY_HAND[component["name"]]}}]
    bill["components"] += vendored.components(vendored.manifest())
    bill["components"].append(
        {
            "type": "platform",
            "bom-ref": f"cpython=={version}",
            "name": "cpython",
            "version": version,
            "licenses": [{"license": {"id": "PSF-2.0"}}],
            "purl": f"pkg:generic/cpython@{version}",
        }
    )
    return bill


def strange_licences(bill: dict[str, Any]) -> list[str]:
    """The components whose licence is unknown or not allowed, each with what it says."""
    found = []
    for component in bill["components"]:
        said = licences_of(component)
        if not said or not all(set(words_of(licence)) <= ALLOWED for licence in said):
            found.append(f"{component['name']} {component['version']}: {', '.join(said) or 'no licence'}")
    return found


def licences_of(component: dict[str, Any]) -> list[str]:
    """The SPDX expressions of a component, or what it says instead."""
    named = [choice.get("expression") or choice["license"] for choice in component.get("licenses", ())]
    texts = [licence if isinstance(licence, str) else licence.get("id") or licence["name"] for licence in named]
    return [CLASSIFIERS.get(text, text) for text in texts]


def words_of(expression: str) -> list[str]:
    """The licences and exceptions in an SPDX expression. A choice is not made: each must be allowed."""
    return (
        re.sub(r"\b(AND|OR|WITH)\b|[()]", " ", expression).split()
        if re.search(r"\b(AND|OR|WITH)\b", expression)
        else [expression]
    )


def faults_of(text: str) -> str | None:
    """What the schema of CycloneDX 1.6 says against a bill of materials; None if nothing."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    return None if error is None else str(error)


def write(python: str, output: Path) -> None:
    """Write the bill of materials of the environment of an interpreter. Exits if a licence is not allowed."""
    bill = bill_of(python)
    text = json.dumps(bill, indent=2, sort_keys=True) + "\n"
    if strange := strange_licences(bill):
        sys.exit(
            "licences that docker/supply/sbom.py does not allow; read them, then add what is fine:\n"
            + "\n".join(strange)
        )
    if fault := faults_of(text):
        sys.exit(f"the bill of materials breaks the schema of CycloneDX: {fault}")
    output.write_text(text)
    print(f"{output}: {len(bill['components'])} components")


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: PYTHONPATH=docker python -m supply.sbom PYTHON OUTPUT")
    write(sys.argv[1], Path(sys.argv[2]))


if __name__ == "__main__":
    main()
