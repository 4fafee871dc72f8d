"""Archives that an agent's environment sends: whatever is in them, only plain files below the target are written."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from tokengrove.rollout.harbor.archives import unpack


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> io.BytesIO:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    file.seek(0)
    return file


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def test_links_devices_and_names_that_lead_elsewhere_are_left_out(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    given = archive(
        (member("../outside/up"), b"x"),
        (member(f"{outside}/whole"), b"x"),
        (member("link", tarfile.SYMTYPE, str(outside)), b""),
        (member("link/through"), b"x"),
        (member("hard", tarfile.LNKTYPE, "/etc/hostname"), b""),
        (member("pipe", tarfile.FIFOTYPE), b""),
        (member("kept"), b"kept"),
    )
    unpack(given, tmp_path / "in")
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert found == ["in/kept", "in/link/through"] and not list(outside.iterdir())
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_an_archive_with_a_header_of_many_bytes_is_refused_before_that_is_read(tmp_path: Path, kind: bytes) -> None:
    given = archive((member("header", kind), bytes(2**20 + 1)), (member("kept"), b"kept"))
    with pytest.raises(ValueError, match="a header has 1048577 bytes; the limit is 1048576"):
        unpack(given, tmp_path)
    assert given.tell() < 2**20


def test_a_file_of_holes_is_left_out_since_it_would_fill_the_disk(tmp_path: Path) -> None:
    holes = member("holes")
    holes.pax_headers = {
        **{"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": "holes"},
        **{"GNU.sparse.size": str(2**20), "GNU.sparse.numblocks": "1", "GNU.sparse.map": "0,1"},
    }
    unpack(archive((holes, b"x"), (member("kept"), b"kept")), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize(
    "content",
    [b"no archive" * 100, gzip.compress(archive((member("a"), b"x")).getvalue())],
    ids=["no archive", "compressed"],  # compressed bytes have the time in them, and workers must collect the same names
)
def test_what_is_no_plain_archive_is_an_error_that_says_so(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ValueError, match="invalid archive"):
        unpack(io.BytesIO(content), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_place_of_a_folder_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be written"):
        unpack(archive((member("a"), b"x"), (member("a/b"), b"x")), tmp_path)
