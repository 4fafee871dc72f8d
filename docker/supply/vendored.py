"""The libraries of the page in `proxy/page/static/vendor`: unchanged files of packages of the npm registry.

    PYTHONPATH=docker python -m supply.vendored                     # compare every file with its package
    PYTHONPATH=docker python -m supply.vendored --newest            # say which packages have newer versions
    PYTHONPATH=docker python -m supply.vendored --update diff=9.0.1 # take the files of another version

`manifest.json` there says of each package its version, licence, the digest of the registry's archive, and of each file
where in the package it comes from and its SHA-256. It needs npm, for `npm pack` and `npm view`.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

VENDOR = Path(__file__).resolve().parents[2] / "proxy" / "page" / "static" / "vendor"
MANIFEST = VENDOR / "manifest.json"


def manifest() -> dict[str, Any]:
    """What is vendored: {package: {version, licence, integrity, files: {path: {from, sha256}}}}."""
    packages: dict[str, Any] = json.loads(MANIFEST.read_text())
    return packages


def components(packages: dict[str, Any]) -> list[dict[str, Any]]:
    """The packages as components of a CycloneDX bill of materials."""
    return [
        {
            "type": "library",
            "bom-ref": f"{name}@{package['version']}",
            "name": name,
            "version": package["version"],
            "licenses": [{"license": {"id": package["licence"]}}],
            "purl": f"pkg:npm/{name}@{package['version']}",
        }
        for name, package in packages.items()
    ]


def changed(packages: dict[str, Any]) -> list[str]:
    """What does not agree: files that the manifest lacks, that are missing, or that have other content than it says."""
    known = {path: file["sha256"] for package in packages.values() for path, file in package["files"].items()}
    there = {path.relative_to(VENDOR).as_posix(): path for path in VENDOR.rglob("*") if path.is_file()}
    found = {name: digest(path.read_bytes()) for name, path in there.items() if path.parent != VENDOR}
    return sorted(name for name in known.keys() | found.keys() if known.get(name) != found.get(name))


def digest(content: bytes) -> str:
    """The SHA-256 of a file in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def fetched(name: str, version: str) -> tuple[str, dict[str, bytes]]:
    """The digest of a package's archive as the registry writes it, and its files. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", "--pack-destination", folder, f"{name}@{version}"]
        subprocess.run(command, check=True, capture_output=True)
        [archive] = Path(folder).iterdir()
        integrity = "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        with tarfile.open(archive) as opened:
            files = {
                member.name.removeprefix("package/"): read.read()
                for member in opened
                if (read := opened.extractfile(member)) is not None
            }
    return integrity, files


def differing(name: str, package: dict[str, Any]) -> list[str]:
    """What differs between the registry's package and what is here."""
    integrity, files = fetched(name, package["version"])
    wrong = [] if integrity == package["integrity"] else [f"{name}: the archive is another one"]
    for path, file in package["files"].items():
        if digest(files.get(file["from"], b"")) != file["sha256"]:
            wrong.append(f"{path}: not {file['from']} of {name} {package['version']}")
    return wrong


def update(packages: dict[str, Any], name: str, version: str) -> None:
    """Take the files of another version. Raises KeyError where the new package lacks one of them."""
    package = packages[name]
    integrity, files = fetched(name, version)
    taken = {path: files[file["from"]] for path, file in package["files"].items()}
    licence = json.loads(files["package.json"])["license"]
    package.update(version=version, licence=licence, integrity=integrity)
    for path, content in taken.items():
        (VENDOR / path).parent.mkdir(parents=True, exist_ok=True)
        (VENDOR / path).write_bytes(content)
        package["files"][path]["sha256"] = digest(content)
    MANIFEST.write_text(json.dumps(packages, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare or update the libraries of the page.")
    parser.add_argument("--newest", action="store_true", help="say which packages have newer versions")
    parser.add_argument("--update", metavar="NAME=VERSION", help="take the files of another version")
    asked = parser.parse_args()
    packages = manifest()
    if asked.update:
        name, _, version = asked.update.partition("=")
        update(packages, name, version)
    elif asked.newest:
        for name, package in packages.items():
            told = subprocess.run(["npm", "view", name, "version"], check=True, capture_output=True, text=True)
            print(f"{name}: {package['version']}, newest {told.stdout.strip()}")
    elif wrong := changed(packages) + [line for name, each in packages.items() for line in differing(name, each)]:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
