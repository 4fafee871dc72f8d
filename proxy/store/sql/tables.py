"""The tables after the newest migration; a test compares the two.

Column types are portable: text, integers, double precision, booleans and bytes encoded by `codec`. An interaction row
stores only what the node adds to its parent.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

sessions = Table(
    "sessions",
    metadata,
    Column("number", Integer, primary_key=True, comment="order of creation, the cursor of listings"),
    Column("session_id", Text, nullable=False, unique=True),
    Column("task_id", Text, nullable=False, index=True),
    Column("group_id", Text),
    Column("status", Text, nullable=False, index=True),
    Column("api_key_hash", Text),
    Column("control_key_hash", Text),
    Column("path_key_hash", Text),
    Column("sampling", LargeBinary),
    Column("limits", LargeBinary),
    Column("metadata", LargeBinary),
    Column("discount", Double, nullable=False),
    Column("credit", Text, nullable=False),
    Column("outcome", Text),
    Column("exit_reason", Text),
    Column("finished", Boolean),
    Column("metrics", LargeBinary),
    Column("weight_version", BigInteger),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False, comment="last commit or change, Unix seconds"),
    Column("ended_at", Double, index=True),
    Column("next_seq", Integer, nullable=False, comment="seq of the next interaction, so also their count"),
    Column("ended_order", BigInteger, index=True, comment="order in which sessions ended, the order of claims"),
    Column("claimed_by", Text),
    Column("claimed_until", Double),
    Column("acknowledged_at", Double),
    Column("keys_expire_at", Double),
    Column("took_capacity", Boolean, nullable=False, server_default=false()),
    Column("validation", Boolean, nullable=False, server_default=false(), comment="its metadata says validate: true"),
    Column("exported_at", Double, comment="when it was last exported after its end"),
    Column("revision", Integer, nullable=False, server_default="0", comment="grows with every change but new turns"),
    Column("group_size", Integer, comment="sessions that its group needs to be claimed"),
    Column("claimed_order", BigInteger, comment="the last ended_order when it was claimed"),
    Column("series", Text, comment="the session that it continues: `default`, ..."),
    Column(
        "turn_options",
        LargeBinary,
        comment="JSON of what holds for all turns: sampling_policy, tool_parser, ...",
    ),
    Column("reward_scope", Text, comment="whose rewards count, as its start said: session, path or agent"),
    Column("score", Double, comment="of the whole session, as its end gave it"),
    Column("delivery", Text, comment="`runner` if whoever runs it exports it, NULL if claims deliver it"),
    Column("withdrawn_at", Double, comment="when it left its group, claims and exports, Unix seconds"),
    Column("checksum", LargeBinary, comment="XXH3-128 of the columns that its start sets for good"),
    Column("end_checksum", LargeBinary, comment="XXH3-128 of the columns that its end sets for good"),
    Column("feedback_key_hash", Text),
)

# New sessions have few of these values or none. A missing value has no entry in the index.
_SELDOM = ("group_id", "api_key_hash", "control_key_hash", "claimed_by", "series", "feedback_key_hash")
for column in (sessions.c[name] for name in _SELDOM):
    Index(None, column, sqlite_where=column.is_not(None), postgresql_where=column.is_not(None))

# The index that claims scan. Without it they would scan all acknowledged sessions.
WAITING = text("acknowledged_at IS NULL AND ended_order IS NOT NULL")
Index("ix_sessions_waiting", sessions.c.ended_order, sqlite_where=WAITING, postgresql_where=WAITING)

capacity = Table(
    "capacity",
    metadata,
    Column("name", Text, primary_key=True),
    Column("available", BigInteger, nullable=False, comment="starts that were granted and not taken"),
)

interactions = Table(
    "interactions",
    metadata,
    Column("id", Text, primary_key=True),
    Column("session_id", Text, ForeignKey("sessions.session_id"), nullable=False),
    Column("seq", Integer, nullable=False, comment="order of completion within the session, from 0, any status"),
    Column("parent_id", Text),
    Column("aligned", Boolean, nullable=False),
    Column("reason", Text, nullable=False),
    Column("api", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("purpose", Text),
    Column("agent", Text),
    Column("state_hash", Text),
    Column("request_hash", Text, nullable=False),
    Column("idempotency_key", Text),
    Column("new_messages", LargeBinary),
    Column("output", LargeBinary),
    Column("tools", LargeBinary),
    Column("template_options", LargeBinary),
    Column("sampling", LargeBinary),
    Column("prefix_length", Integer, nullable=False),
    Column("prompt_tokens", Integer, nullable=False, comment="prefix_length plus the ids in prompt_suffix"),
    Column("output_tokens", Integer, nullable=False),
    Column("prompt_suffix", LargeBinary, nullable=False, comment="int32, little-endian"),
    Column("output_ids", LargeBinary, nullable=False, comment="int32, little-endian"),
    Column("logprobs", LargeBinary, nullable=False, comment="float32, little-endian"),
    Column("versions", LargeBinary, comment="runs of (count, version)"),
    Column("finish_reason", Text),
    Column("stop_string", Text),
    Column("reward", Double, comment="raw, as it was set"),
    Column("rewards", LargeBinary),
    Column("token_rewards", LargeBinary, comment="float32, little-endian, one per output id"),
    Column("trainable", Boolean, nullable=False),
    Column("spans", LargeBinary),
    Column("error", Text),
    Column("notes", LargeBinary),
    Column("cached_tokens", Integer),
    Column("reasoning_tokens", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("first_token_at", Double),
    Column("completed_at", Double),
    Column("unmasked_logprobs", LargeBinary, comment="float32, little-endian: without the mask of the grammar"),
    Column("asked", LargeBinary, comment="what the request asked of its reply, without defaults"),
    Column(
        "images",
        LargeBinary,
        comment="JSON: the images of prompt_suffix, each with the place of its tokens in the whole prompt",
    ),
    Column("checksum", LargeBinary, comment="XXH3-128 of the columns that never change"),
    UniqueConstraint("session_id", "seq"),
)

returns = Table(
    "returns",
    metadata,
    Column("interaction_id", Text, ForeignKey("interactions.id"), primary_key=True),
    Column("discount", Double, primary_key=True),
    Column("credit", Text, primary_key=True),
    Column("value", Double, nullable=False),
)

intents = Table(
    "intents",
    metadata,
    Column("interaction_id", Text, primary_key=True),
    Column("session_id", Text, nullable=False, index=True),
    Column("begun_at", Double, nullable=False),
    Column("request_hash", Text),
    Column("idempotency_key", Text),
    Column("owner", Text, comment="the process that runs it, NULL once that has ended"),
    Column("answered", Boolean, comment="an equal later request was answered by another process"),
)

# Complete interactions whose reply was not completely written. A turn adds a row and its reply deletes it, so the table
# stays small; a column of the interaction would write all its tokens a second time.
unreplied = Table(
    "unreplied",
    metadata,
    Column("interaction_id", Text, primary_key=True),
    Column("session_id", Text, nullable=False, index=True),
    sqlite_with_rowid=False,
)

# Hashes of keys that were replaced or whose session was deleted. An open server refuses them but accepts unknown keys.
withdrawn_keys = Table(
    "withdrawn_keys",
    metadata,
    Column("key_hash", Text, primary_key=True),
    Column("session_id", Text, primary_key=True, index=True),
    sqlite_with_rowid=False,
)

# One row, written by each migration. It tells a server that is older than the database whether it may run.
compatibility = Table(
    "compatibility",
    metadata,
    Column("oldest_server", Text, primary_key=True, comment="the oldest revision of servers that run on this database"),
)

# Engine servers that a server has paused and not continued yet. After a crash, the next start continues them.
engine_pauses = Table(
    "engine_pauses",
    metadata,
    Column("url", Text, primary_key=True),
    Column("owner", Text, primary_key=True, comment="the server that paused it: HOST:PORT"),
    Column("mode", Text, nullable=False),
    Column("released", Text, nullable=False, comment="kinds of memory, with commas"),
    Column("until", Double, nullable=False, comment="a lease, Unix seconds"),
    sqlite_with_rowid=False,
)

# Images of conversations, each stored once for all sessions that have it, and deleted with the last of them.
images = Table(
    "images",
    metadata,
    Column("digest", Text, primary_key=True, comment="SHA-256 of the data, in hex"),
    Column("media_type", Text, nullable=False),
    Column("width", Integer, nullable=False, comment="in pixels, as it is decoded"),
    Column("height", Integer, nullable=False),
    Column("pixels", Text, nullable=False, comment="a digest of the decoded pixels, if known"),
    Column("size", Integer, nullable=False, comment="bytes of data"),
    Column("created_at", Double, nullable=False),
    # The last column, so that SQLite reads the others without it.
    Column("data", LargeBinary, nullable=False, comment="as the client sent it"),
)

# No foreign key to the session: servers of releases without images also delete sessions.
session_images = Table(
    "session_images",
    metadata,
    Column("session_id", Text, primary_key=True),
    Column("digest", Text, ForeignKey("images.digest"), primary_key=True, index=True),
    Column("url", Text, comment="where the server fetched it"),
    sqlite_with_rowid=False,
)

# Rows beside tokens, too large for a column of the interaction. No foreign key, as for images.
side_columns = Table(
    "side_columns",
    metadata,
    Column("interaction_id", Text, primary_key=True),
    Column("name", Text, primary_key=True, comment="routed_experts, kept, ..."),
    Column("session_id", Text, nullable=False, index=True),
    Column("start", Integer, nullable=False, comment="position of the token of the first row"),
    Column("number", Integer, nullable=False, comment="of rows"),
    Column("dtype", Text, nullable=False, comment="of the values, or of the ids of sets"),
    Column("shape", Text, nullable=False, comment="of a row: sizes with commas"),
    Column("checksum", LargeBinary, nullable=False, comment="XXH3-128 of the other columns"),
    # The last column, so that SQLite reads the others without it.
    Column("data", LargeBinary, nullable=False, comment="the rows, little-endian"),
)

# One row for each named route of a session. No foreign key, as for images. Rows of kind policy hold the claims of
# trained routes other than the server's own, whose claims are in `sessions`, where older servers find them.
session_routes = Table(
    "session_routes",
    metadata,
    Column("session_id", Text, primary_key=True),
    Column("route", Text, primary_key=True, comment="a name in the table of models"),
    Column("kind", Text, primary_key=True, comment="policy, frozen or external, when its turns ran"),
    Column("claimed_by", Text),
    Column("claimed_until", Double),
    Column("claimed_order", BigInteger, comment="as in sessions"),
    Column("acknowledged_at", Double),
)
QUEUED_ROUTES = text("acknowledged_at IS NULL AND kind = 'policy'")
Index("ix_session_routes_queued", session_routes.c.route, sqlite_where=QUEUED_ROUTES, postgresql_where=QUEUED_ROUTES)
Index(
    None,
    session_routes.c.claimed_by,
    sqlite_where=session_routes.c.claimed_by.is_not(None),
    postgresql_where=session_routes.c.claimed_by.is_not(None),
)

# What trainers told of tokens: a row for each run of tokens of a turn that one sampler drew, by trainer and step. The
# streams are in `side_columns`. No foreign key, as for images.
annotated = Table(
    "annotations",
    metadata,
    Column("interaction_id", Text, primary_key=True),
    Column("trainer", Text, primary_key=True),
    Column("step", BigInteger, primary_key=True),
    Column("first", Integer, primary_key=True, comment="index of the first of its tokens in the output"),
    Column("session_id", Text, nullable=False, index=True),
    Column("server", Text, nullable=False, comment="the engine server that sampled, empty for one in the process"),
    Column("dtype", Text, nullable=False),
    Column("quantization", Text, nullable=False),
    Column("version", BigInteger, nullable=False, comment="weight version of the tokens"),
    Column("tokens", Integer, nullable=False, comment="those with a stream"),
    Column("masked", Integer, nullable=False),
    Column("clipped", Integer, nullable=False),
    Column("compared", Integer, nullable=False, comment="tokens with the logprobs of both"),
    Column("kl", Double, nullable=False, comment="summed over them"),
    Column("log_ratio", Double, nullable=False, comment="the largest of them"),
    Column("noted_at", Double, nullable=False, comment="Unix seconds"),
    Index("ix_annotations_trainer", "trainer", "step"),
)

# Files of archived sessions. `open`: it may have sessions that `archived_sessions` does not name, as after a crash.
# `settled`: it has exactly those. `doomed`: no session is in it any more, and it is about to be deleted.
archive_files = Table(
    "archive_files",
    metadata,
    Column("file", Text, primary_key=True, comment="its URL"),
    Column("state", Text, nullable=False, comment="open, settled or doomed"),
    Column("created_at", Double, nullable=False),
)

# Sessions that were moved to a file. They have no rows elsewhere but the hashes of their keys in `withdrawn_keys`.
archived_sessions = Table(
    "archived_sessions",
    metadata,
    Column("session_id", Text, primary_key=True),
    Column("file", Text, nullable=False, index=True, comment="the file of archive_files that has it"),
    Column("number", Integer, nullable=False, comment="as in sessions"),
    Column("task_id", Text, nullable=False),
    Column("group_id", Text),
    Column("ended_at", Double, nullable=False, index=True),
    Column("turns", Integer, nullable=False, comment="interactions of any status"),
    Column("archived_at", Double, nullable=False, comment="Unix seconds"),
)

# How much of each session the full-text index has. The index itself, `turn_words`, is of another kind on each database
# (`sql.texts`), so it is not here. No foreign key, as for images.
indexed_sessions = Table(
    "indexed_sessions",
    metadata,
    Column("session_id", Text, primary_key=True),
    Column("number", Integer, nullable=False, index=True, comment="as in sessions, when it was indexed"),
    Column("turns", Integer, nullable=False, comment="interactions below this seq are in the index"),
)

# One row for each process that writes to a PostgreSQL: a commit whose answer was lost is looked up there.
commit_marks = Table(
    "commit_marks",
    metadata,
    Column("writer", Text, primary_key=True, comment="a random name for each process that writes"),
    Column("number", BigInteger, nullable=False, comment="of its last transaction that left a mark"),
    Column("marked_at", Double, nullable=False),
    sqlite_with_rowid=False,
)

# Answers to control calls with an Idempotency-Key, for clients that repeat them. They are deleted after a day.
answers = Table(
    "answers",
    metadata,
    Column("call_hash", Text, primary_key=True, comment="of the Idempotency-Key and the caller's key"),
    Column("request_hash", Text, nullable=False, comment="of the method, the path and the body"),
    Column("answer", LargeBinary, nullable=False, comment="sealed with the Idempotency-Key"),
    Column("answered_at", Double, nullable=False, index=True),
    sqlite_with_rowid=False,
)

# Events that receivers of webhooks do not have yet, one row for each receiver. A delivery deletes its row.
webhook_deliveries = Table(
    "webhook_deliveries",
    metadata,
    Column("id", Text, primary_key=True, comment="of the event, the same for all receivers"),
    Column("url", Text, primary_key=True),
    Column("event", Text, nullable=False, comment="session.ended, ..."),
    Column("body", Text, nullable=False, comment="JSON, as it is sent"),
    Column("created_at", Double, nullable=False, comment="Unix seconds"),
    Column("attempts", Integer, nullable=False),
    Column("due_at", Double, comment="of the next attempt, NULL for a dead letter"),
    Column("error", Text, comment="of the last attempt"),
    Index("ix_webhook_deliveries_url", "url", "due_at"),
)
