"""Images: stored once per database, and deleted with the last session that has them.

No image of a session is lost if another session is deleted at the same time. On PostgreSQL, adding an image to a
session first locks or creates the image's row. Deleting a session first locks the rows of its images, and then checks,
in a separate statement, which other sessions have them. So one of the two sees the change of the other. As a safeguard,
the foreign key of `session_images` refuses the rest. SQLite has one writer.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, delete, exists, select, text

from proxy.store.sql.statement import Named, Statement, json_list
from proxy.store.sql.tables import images, session_images, sessions
from proxy.types import ImageFile, ImagePart

_NAMES, _LINK_NAMES = images.c.keys(), session_images.c.keys()
_NEW_IMAGE = f"INSERT INTO images ({', '.join(_NAMES)}) VALUES (:{', :'.join(_NAMES)}) ON CONFLICT (digest) DO "
_INSERT_IMAGE = {
    "sqlite": Statement(text(_NEW_IMAGE + "NOTHING")),  # an update would write the bytes again
    "postgresql": Statement(text(_NEW_IMAGE + "UPDATE SET size = images.size")),  # added meanwhile: lock it
}
_HOLD = Statement(
    select(images.c.digest)
    .where(Named(images.c.digest))
    .order_by(images.c.digest)
    .with_for_update(read=True, key_share=True)  # others may also hold it
)
_INSERT_LINK = Statement(
    text(
        f"INSERT INTO session_images ({', '.join(_LINK_NAMES)}) VALUES (:{', :'.join(_LINK_NAMES)}) "
        "ON CONFLICT (session_id, digest) DO NOTHING"
    )
)
_FILE = [images.c[name] for name in ("digest", "media_type", "width", "height", "data", "pixels")]
_LOAD = Statement(select(*_FILE).where(Named(images.c.digest)))
_PIXELS = Statement(select(images.c.digest, images.c.pixels).where(Named(images.c.digest)))
_OF_SESSION = session_images.c.session_id == bindparam("of_session")
_JOINED = session_images.join(images, images.c.digest == session_images.c.digest)
_USED = exists().where(session_images.c.digest == images.c.digest)
_PARTS = Statement(
    select(images.c.digest, images.c.width, images.c.height, images.c.size, session_images.c.url)
    .select_from(_JOINED)
    .where(_OF_SESSION)
)
_FIND = Statement(select(*_FILE).select_from(_JOINED).where(_OF_SESSION, images.c.digest == bindparam("of_digest")))


def insert_images(connection: Connection, new: Sequence[tuple[str, ImageFile]]) -> None:
    """Store images for sessions, whose rows are locked. Images that are already stored stay unchanged."""
    files = {file.digest: file for _, file in new}
    now = time.time()
    insert_rows(connection, [{**f._asdict(), "size": len(f.data), "created_at": now} for f in files.values()])
    links = {(name, file.digest): file.url for name, file in new}
    _INSERT_LINK.run(
        connection, [{"session_id": name, "digest": digest, "url": links[name, digest]} for name, digest in links]
    )


def insert_rows(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Store rows of `images`. Rows that are already stored stay unchanged, and are locked against deletion.

    Their bytes are not sent again: sessions of a group often begin with the same screenshot.
    """
    stored = _HOLD.fetch(connection, {"names": json_list(row["digest"] for row in rows)})
    missing = {row["digest"]: row for row in rows}
    for (digest,) in stored:
        del missing[digest]
    if missing:  # in order, so that two transactions lock them in the same order
        _INSERT_IMAGE[connection.dialect.name].run(connection, [missing[digest] for digest in sorted(missing)])


def load_images(connection: Connection, digests: Collection[str]) -> list[ImageFile]:
    """The images of these digests that are stored."""
    return [ImageFile(*row) for row in _LOAD.fetch(connection, {"names": json_list(digests)})]


def load_pixels(connection: Connection, digests: Collection[str]) -> dict[str, str]:
    """The pixel digests of stored images by image digest; unknown ones are omitted."""
    found = _PIXELS.fetch(connection, {"names": json_list(digests)})
    return {digest: pixels for digest, pixels in found if pixels}


def load_parts(connection: Connection, session_id: str) -> list[tuple[ImagePart, int, str | None]]:
    """Each image of a session: a part without a position, its number of bytes, and the URL it was fetched from."""
    found = _PARTS.fetch(connection, {"of_session": session_id})
    return [(ImagePart(digest, 0, width, height), size, url) for digest, width, height, size, url in found]


def find_image(connection: Connection, session_id: str, digest: str) -> ImageFile | None:
    """An image of a session; None if the session has none of this digest."""
    found = _FIND.fetch(connection, {"of_session": session_id, "of_digest": digest})
    return ImageFile(*found[0]) if found else None


def drop_images(connection: Connection, session_ids: Collection[str]) -> None:
    """Remove the images of sessions, whose rows are locked, and delete images that no other session has."""
    gone = delete(session_images).where(session_images.c.session_id.in_(session_ids))
    digests = set(connection.execute(gone.returning(session_images.c.digest)).scalars())
    if digests:
        drop_unused(connection, digests)


def drop_strays(connection: Connection, most: int) -> int:
    """Remove at most `most` images of deleted sessions, and delete at most as many images that no session has.

    Servers of releases without images leave them behind. Return the number found.
    """
    there = exists().where(sessions.c.session_id == session_images.c.session_id)
    query = select(session_images.c.session_id, session_images.c.digest).where(~there).limit(most)
    found = connection.execute(query).all()
    if found:
        gone = session_images.c.session_id.in_({name for name, _ in found})
        connection.execute(delete(session_images).where(gone, ~there))
    loose = select(images.c.digest).where(~_USED).limit(most)
    digests = list(connection.execute(loose).scalars())
    if digests:
        drop_unused(connection, digests)
    return len(found) + len(digests)


def drop_unused(connection: Connection, digests: Collection[str]) -> int:
    """Delete the images of these digests that no session has; return their number."""
    names = {"names": json_list(digests)}
    of_these = Named(images.c.digest)
    if connection.dialect.name != "sqlite":
        connection.execute(select(images.c.digest).where(of_these).order_by(images.c.digest).with_for_update(), names)
    return connection.execute(delete(images).where(of_these, ~_USED), names).rowcount
