"""The libraries of the page are the files of the registry's packages that the manifest names, each with its licence."""

from __future__ import annotations

import gzip
import io
import json
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from proxy.page.endpoints import page_files
from supply import sbom, vendored

PACKAGES = vendored.manifest()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one vendored file, and a registry whose packages `a@1` and `a@2` have that file."""

    def pack(command: list[str], **_: Any) -> None:
        assert command[:2] == ["npm", "pack"]
        version = command[-1].rpartition("@")[2]
        target = Path(command[command.index("--pack-destination") + 1]) / "a.tgz"
        # The header of a gzip file has a time, and the digests of two packings are compared.
        with gzip.GzipFile(target, "wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
            for name, text in {"package.json": '{"license": "MIT"}', "dist/a.mjs": f"// {version}\n"}.items():
                entry = tarfile.TarInfo(f"package/{name}")
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text.encode()))

    monkeypatch.setattr(subprocess, "run", pack)
    monkeypatch.setattr(vendored, "VENDOR", tmp_path)
    monkeypatch.setattr(vendored, "MANIFEST", tmp_path / "manifest.json")
    files = {"a/a.mjs": {"from": "dist/a.mjs", "sha256": ""}}
    package = {"version": "0", "licence": "", "integrity": "", "files": files}
    vendored.update({"a": package}, "a", "1")
    return tmp_path


def test_every_vendored_file_is_unchanged_and_in_the_manifest() -> None:
    assert vendored.changed(PACKAGES) == []
    assert all(len(package["integrity"]) > 90 for package in PACKAGES.values())


def test_a_file_that_was_changed_added_or_lost_is_found(folder: Path) -> None:
    packages = vendored.manifest()
    assert vendored.changed(packages) == []
    (folder / "a" / "a.mjs").write_text("changed")
    (folder / "a" / "more.mjs").write_text("more")
    assert vendored.changed(packages) == ["a/a.mjs", "a/more.mjs"]
    (folder / "a" / "a.mjs").unlink()
    assert "a/a.mjs" in vendored.changed(packages)


def test_an_update_takes_the_files_of_another_version(folder: Path) -> None:
    packages = vendored.manifest()
    assert vendored.differing("a", packages["a"]) == []
    vendored.update(packages, "a", "2")
    assert (folder / "a" / "a.mjs").read_text() == "// 2\n"
    updated = vendored.manifest()
    assert (updated["a"]["version"], updated["a"]["licence"]) == ("2", "MIT")
    assert vendored.changed(updated) == [] == vendored.differing("a", updated["a"])
    updated["a"]["version"] = "1"
    assert vendored.differing("a", updated["a"]) == ["a: the archive is another one", "a/a.mjs: not dist/a.mjs of a 1"]


def test_each_package_has_its_licence_beside_it_and_the_page_serves_it() -> None:
    for package in PACKAGES.values():
        folders = {path.split("/")[0] for path in package["files"]}
        assert all(f"{folder}/LICENSE" in package["files"] for folder in folders)
        for folder in folders:
            assert page_files().files[f"vendor/{folder}/LICENSE"].headers["content-type"].startswith("text/plain")


def test_the_readme_of_the_folder_lists_the_packages_as_the_manifest_does() -> None:
    rows = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \| ([\w.-]+) \|", (vendored.VENDOR / "README.md").read_text(), re.M)
    assert rows == [(name, package["version"], package["licence"]) for name, package in PACKAGES.items()]


@pytest.mark.wide
def test_a_bill_of_materials_has_the_packages_and_allows_their_licences() -> None:
    found = vendored.components(PACKAGES)
    assert sbom.strange_licences({"components": found}) == []
    assert "pkg:npm/preact@" + PACKAGES["preact"]["version"] in {component["purl"] for component in found}
    bill = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": found}
    assert sbom.faults_of(json.dumps(bill)) is None


def test_every_import_of_a_library_is_in_the_import_map_and_leads_to_a_file() -> None:
    files, version = page_files().files, page_files().version
    [written] = re.findall(r'<script type="importmap">(.*?)</script>', files["index.html"].content.decode(), re.S)
    known = {name: target.replace(f"@{version}/", "") for name, target in json.loads(written)["imports"].items()}
    for name, target in known.items():
        path = target.removeprefix("./ui/")
        assert path in files or (name.endswith("/") and any(file.startswith(path) for file in files)), name
    for file, served in files.items():
        if file.endswith(("js", "mjs")):
            for name in _imports(served.content.decode()):
                _check_import(name, file, known)


def _imports(text: str) -> list[str]:
    return re.findall(r"""(?:^|[;}\s])(?:import|export)\b[^"'();]*?\bfrom\s*["']([^"']+)["']""", text) + re.findall(
        r"""^import\s*["']([^"']+)["']""", text, re.M
    )


def _check_import(name: str, file: str, known: dict[str, str]) -> None:
    if name.startswith("."):
        path = (vendored.VENDOR.parent / file).parent / name
        assert path.resolve().is_file(), f"{file} imports {name}"
    else:
        folder = next((key for key in known if key.endswith("/") and name.startswith(key)), None)
        assert name in known or folder, f"{file} imports {name}"
        if folder:
            rest = name.removeprefix(folder)
            assert (vendored.VENDOR / known[folder].removeprefix("./ui/vendor/") / rest).is_file(), f"{file}: {name}"
