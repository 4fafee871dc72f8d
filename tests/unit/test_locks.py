"""The locks have all that the images and the one file install, in versions that pyproject.toml allows."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tomllib
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from supply import locks, sbom, vendored
from supply.locks import Lock
from tests.unit.test_docker import DOCKER, DOCKERFILES

PROJECT = tomllib.loads((locks.ROOT / "pyproject.toml").read_text())["project"]
# Where a system of another kind than the images' would need something else.
ENVIRONMENT = {"sys_platform": "linux", "platform_system": "Linux", "extra": ""}


def packages(lock: Lock) -> dict[str, tuple[str, tuple[str, ...]]]:
    return locks.entries(lock.path.read_text())


def required(lock: Lock) -> list[Requirement]:
    """What a lock is for, without the extra that the image of another project has."""
    texts = list(lock.more)
    if lock.extras is not None:
        texts += PROJECT["dependencies"]
        texts += [text for extra in lock.extras for text in PROJECT["optional-dependencies"][extra]]
    needed = map(Requirement, texts)
    return [each for each in needed if each.marker is None or each.marker.evaluate(ENVIRONMENT)]


@pytest.mark.parametrize("lock", locks.ALL, ids=lambda lock: str(lock.name))
def test_a_lock_is_as_it_was_written_and_has_a_hash_of_each_package_and_no_place(lock: Lock) -> None:
    text = lock.path.read_text()
    assert locks.written(packages(lock), lock) == text  # nothing between the entries: no path, index or comment
    assert all(hashes for _, hashes in packages(lock).values())
    assert "file:" not in text and "://" not in text


@pytest.mark.parametrize("lock", [lock for lock in locks.ALL if not lock.on_top_of], ids=lambda lock: str(lock.name))
def test_a_lock_has_all_that_is_required_in_versions_that_are_allowed(lock: Lock) -> None:
    locked = {canonicalize_name(name): Version(version) for name, (version, _) in packages(lock).items()}
    for each in required(lock):
        version = locked.get(canonicalize_name(each.name))
        assert version is not None, f"{each} is not in {lock.path.name}: run PYTHONPATH=docker python -m supply.locks"
        assert each.specifier.contains(version, prereleases=True), f"{each} is locked at {version}"


def test_what_the_gpu_image_adds_is_allowed_and_leaves_sglangs_packages_alone() -> None:
    [lock] = [lock for lock in locks.ALL if lock.on_top_of]
    specifiers = {canonicalize_name(each.name): each.specifier for each in required(lock)}
    for name, (version, _) in packages(lock).items():
        assert name not in specifiers or specifiers[canonicalize_name(name)].contains(version)
    assert {"sqlalchemy", "alembic", "psycopg"} <= packages(lock).keys()
    assert not {"torch", "sglang", "transformers", "numpy"} & packages(lock).keys()
    assert f"FROM lmsysorg/{lock.on_top_of.replace('==', ':v')}" in DOCKERFILES[1].read_text()  # type: ignore[union-attr]


def test_the_images_install_the_locks_by_hash_and_then_the_extras_that_were_locked() -> None:
    for path, name in zip(DOCKERFILES, ("cpu", "gpu"), strict=True):
        [lock] = [lock for lock in locks.ALL if lock.name == name]
        text = re.sub(r"\\\n\s*", "", path.read_text())
        installs = [line for line in re.split(r"&&|\n", text) if "pip install" in line and not line.startswith("#")]
        assert all("--require-hashes" in line or "--no-index" in line for line in installs)
        assert any(f"{name}.txt" in line for line in installs)
        [extras] = re.findall(r"'tokengrove\[([\w,]+)\]'", text)
        assert set(extras.split(",")) == set(lock.extras or ()) - {"sglang"}
        assert "supply.sbom" in text and f"torch=={torch()}" in (DOCKER / "locks" / "cpu.txt").read_text()


def torch() -> str:
    [found] = [text for text in PROJECT["optional-dependencies"]["cpu"] if text.startswith("torch==")]
    return str(found).removeprefix("torch==") + "+cpu"


def test_every_locked_package_has_a_licence_that_is_allowed() -> None:
    names = {
        canonicalize_name(name)
        for lock in locks.ALL
        if lock.name not in ("build", "release", "freeze")
        for name in packages(lock)
    }
    bill = {"components": [component(name) for name in sorted(names) if installed(name)]}
    assert len(bill["components"]) > 0.9 * len(names)
    assert sbom.strange_licences(bill) == []


def installed(name: str) -> bool:
    try:
        return bool(metadata.distribution(name))
    except metadata.PackageNotFoundError:
        return False


def component(name: str) -> dict[str, object]:
    """A component as a bill of materials has it, from the metadata of an installed package."""
    about = metadata.metadata(name)
    classified = [each for each in about.get_all("Classifier") or () if each in sbom.CLASSIFIERS]
    said = [sbom.READ_BY_HAND.get(name), about["License-Expression"], *classified, about["License"]]
    found = next(filter(None, said), None)
    return {"name": name, "version": about["Version"], "licenses": [{"license": {"name": found}}] if found else []}


@pytest.mark.wide
def test_a_bill_of_materials_keeps_to_the_schema_and_is_refused_for_a_foreign_licence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path / "env")
    python, output = tmp_path / "env" / "bin" / "python", tmp_path / "sbom.cdx.json"
    [packages] = (tmp_path / "env").glob("lib/python*/site-packages")
    monkeypatch.setattr(sys, "argv", ["sbom", str(python), str(output)])
    for name, licence in (("fine", "MIT OR Apache-2.0"), ("foreign", "GPL-3.0-only")):
        (packages / f"{name}-1.dist-info").mkdir()
        about = f"Metadata-Version: 2.4\nName: {name}\nVersion: 1\nLicense-Expression: {licence}\n"
        (packages / f"{name}-1.dist-info" / "METADATA").write_text(about)
    with pytest.raises(SystemExit, match="foreign 1: GPL"):
        sbom.main()
    shutil.rmtree(packages / "foreign-1.dist-info")
    sbom.main()
    bill = json.loads(output.read_text())
    assert (bill["bomFormat"], bill["specVersion"], bill["metadata"]["component"]["name"]) == (
        "CycloneDX",
        "1.6",
        "tokengrove",
    )
    assert {each["name"]: sbom.licences_of(each) for each in bill["components"]} == {
        "fine": ["MIT OR Apache-2.0"],
        "cpython": ["PSF-2.0"],
        **{name: [package["licence"]] for name, package in vendored.manifest().items()},
    }
    assert sbom.faults_of(output.read_text()) is None
    assert "bomFormat" in str(sbom.faults_of("{}"))


def test_unknown_and_foreign_licences_are_named() -> None:
    def of(licence: dict[str, str]) -> dict[str, object]:
        return {"name": "it", "version": "1", "licenses": [{"license": licence}]}

    assert sbom.strange_licences({"components": [of({"id": "MIT"}), of({"name": "BSD"})]}) == ["it 1: BSD"]
    assert sbom.strange_licences({"components": [{"name": "it", "version": "1"}]}) == ["it 1: no licence"]
    mixed = {"name": "it", "version": "1", "licenses": [{"expression": "MIT AND (GPL-3.0-only OR Apache-2.0)"}]}
    assert sbom.strange_licences({"components": [mixed]}) == ["it 1: MIT AND (GPL-3.0-only OR Apache-2.0)"]
