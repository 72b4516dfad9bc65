"""The first schema: sandboxes with their history, API keys, and what a deployment must remember of itself.

Written out, not taken from ``schema.py``: a migration must go on making what it made when it was published.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "sandboxes",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("backend", sa.String(64), nullable=False),
        sa.Column("template_id", sa.Text, nullable=False),
        sa.Column("alias", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("started_at", sa.BigInteger),
        sa.Column("end_at", sa.BigInteger),
        sa.Column("ended_at", sa.BigInteger),
        sa.Column("timeout", sa.BigInteger, nullable=False),
        sa.Column("pause_on_timeout", sa.Boolean, nullable=False),
        sa.Column("pause_memory", sa.Boolean, nullable=False),
        sa.Column("auto_resume", sa.Boolean, nullable=False),
        sa.Column("metadata", sa.JSON, nullable=False),
        sa.Column("envs", sa.JSON, nullable=False),
        sa.Column("resources", sa.JSON, nullable=False),
        sa.Column("allow_internet_access", sa.Boolean, nullable=False),
        sa.Column("network", sa.JSON(none_as_null=True)),
        sa.Column("secure", sa.Boolean, nullable=False),
        sa.Column("token_version", sa.Integer, nullable=False),
        sa.Column("handle", sa.JSON, nullable=False),
    )
    op.create_index("sandboxes_by_state", "sandboxes", ["state"])
    op.create_index("sandboxes_by_end", "sandboxes", ["ended_at"])
    op.create_table(
        "transitions",
        sa.Column("sandbox_id", sa.String(64), sa.ForeignKey("sandboxes.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("revision", sa.Integer, primary_key=True),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("from_state", sa.String(16)),
        sa.Column("to_state", sa.String(16), nullable=False),
        sa.Column("note", sa.Text, nullable=False),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(16), primary_key=True),
        sa.Column("digest", sa.String(64), nullable=False, unique=True),
        sa.Column("prefix", sa.String(16), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("revoked_at", sa.BigInteger),
    )
    op.create_table(
        "meta",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )
