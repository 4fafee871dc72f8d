"""Create the tables: sessions, interactions, returns and intents."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
oldest_server = "0001"


def upgrade() -> None:
    _create_sessions()
    _create_interactions()
    _create_returns()
    _create_intents()


def downgrade() -> None:
    op.drop_table("intents")
    op.drop_table("returns")
    op.drop_table("interactions")
    op.drop_table("sessions")


def _create_sessions() -> None:
    op.create_table(
        "sessions",
        sa.Column("number", sa.Integer(), nullable=False, comment="order of creation, the cursor of listings"),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("group_id", sa.Text()),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("api_key_hash", sa.Text()),
        sa.Column("control_key_hash", sa.Text()),
        sa.Column("path_key_hash", sa.Text()),
        sa.Column("sampling", sa.LargeBinary()),
        sa.Column("limits", sa.LargeBinary()),
        sa.Column("metadata", sa.LargeBinary()),
        sa.Column("discount", sa.Double(), nullable=False),
        sa.Column("credit", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text()),
        sa.Column("exit_reason", sa.Text()),
        sa.Column("finished", sa.Boolean()),
        sa.Column("metrics", sa.LargeBinary()),
        sa.Column("weight_version", sa.BigInteger()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False, comment="last commit or change, Unix seconds"),
        sa.Column("ended_at", sa.Double()),
        sa.Column("next_seq", sa.Integer(), nullable=False, comment="seq of the next interaction, so also their count"),
        sa.Column("ended_order", sa.BigInteger(), comment="order in which sessions ended, the order of claims"),
        sa.Column("claimed_by", sa.Text()),
        sa.Column("claimed_until", sa.Double()),
        sa.Column("acknowledged_at", sa.Double()),
        sa.PrimaryKeyConstraint("number", name="pk_sessions"),
        sa.UniqueConstraint("session_id", name="uq_sessions_session_id"),
    )
    op.create_index("ix_sessions_api_key_hash", "sessions", ["api_key_hash"])
    op.create_index("ix_sessions_control_key_hash", "sessions", ["control_key_hash"])
    op.create_index("ix_sessions_ended_at", "sessions", ["ended_at"])
    op.create_index("ix_sessions_ended_order", "sessions", ["ended_order"])
    op.create_index("ix_sessions_group_id", "sessions", ["group_id"])
    op.create_index("ix_sessions_status", "sessions", ["status"])
    op.create_index("ix_sessions_task_id", "sessions", ["task_id"])


def _create_interactions() -> None:
    op.create_table(
        "interactions",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column(
            "seq", sa.Integer(), nullable=False, comment="order of completion within the session, from 0, any status"
        ),
        sa.Column("parent_id", sa.Text()),
        sa.Column("aligned", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("api", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("purpose", sa.Text()),
        sa.Column("agent", sa.Text()),
        sa.Column("state_hash", sa.Text()),
        sa.Column("request_hash", sa.Text(), nullable=False),
        sa.Column("idempotency_key", sa.Text()),
        sa.Column("new_messages", sa.LargeBinary()),
        sa.Column("output", sa.LargeBinary()),
        sa.Column("tools", sa.LargeBinary()),
        sa.Column("template_options", sa.LargeBinary()),
        sa.Column("sampling", sa.LargeBinary()),
        sa.Column("prefix_length", sa.Integer(), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False, comment="prefix_length plus the ids in prompt_suffix"),
        sa.Column("output_tokens", sa.Integer(), nullable=False),
        sa.Column("prompt_suffix", sa.LargeBinary(), nullable=False, comment="int32, little-endian"),
        sa.Column("output_ids", sa.LargeBinary(), nullable=False, comment="int32, little-endian"),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False, comment="float32, little-endian"),
        sa.Column("versions", sa.LargeBinary(), comment="runs of (count, version)"),
        sa.Column("finish_reason", sa.Text()),
        sa.Column("stop_string", sa.Text()),
        sa.Column("reward", sa.Double(), comment="raw, as it was set"),
        sa.Column("rewards", sa.LargeBinary()),
        sa.Column("token_rewards", sa.LargeBinary(), comment="float32, little-endian, one per output id"),
        sa.Column("trainable", sa.Boolean(), nullable=False),
        sa.Column("spans", sa.LargeBinary()),
        sa.Column("error", sa.Text()),
        sa.Column("notes", sa.LargeBinary()),
        sa.Column("cached_tokens", sa.Integer()),
        sa.Column("reasoning_tokens", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("first_token_at", sa.Double()),
        sa.Column("completed_at", sa.Double()),
        sa.Column("replied_at", sa.Double(), comment="when the end of the reply was written out"),
        sa.PrimaryKeyConstraint("id", name="pk_interactions"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name="fk_interactions_session_id"),
        sa.UniqueConstraint("session_id", "seq", name="uq_interactions_session_id"),
    )


def _create_returns() -> None:
    op.create_table(
        "returns",
        sa.Column("interaction_id", sa.Text(), nullable=False),
        sa.Column("discount", sa.Double(), nullable=False),
        sa.Column("credit", sa.Text(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("interaction_id", "discount", "credit", name="pk_returns"),
        sa.ForeignKeyConstraint(["interaction_id"], ["interactions.id"], name="fk_returns_interaction_id"),
    )


def _create_intents() -> None:
    op.create_table(
        "intents",
        sa.Column("interaction_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("begun_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("interaction_id", name="pk_intents"),
    )
    op.create_index("ix_intents_session_id", "intents", ["session_id"])
