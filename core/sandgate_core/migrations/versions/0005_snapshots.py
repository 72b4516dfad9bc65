"""Snapshots, and of a sandbox what its template says about each start and whether its rules reached the backend."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sandboxes", sa.Column("setup", sa.JSON(none_as_null=True)))
    op.add_column("sandboxes", sa.Column("egress_pending", sa.Boolean, nullable=False, server_default=sa.false()))
    op.create_table(
        "snapshots",
        sa.Column("content", sa.String(64), primary_key=True),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("backend", sa.String(64), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("tag", sa.String(128), nullable=False),
        sa.Column("sandbox_id", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("resources", sa.JSON, nullable=False),
        sa.Column("envs", sa.JSON, nullable=False),
        sa.Column("setup", sa.JSON, nullable=False),
        sa.Column("handle", sa.JSON(none_as_null=True)),
        sa.Column("core", sa.String(32), nullable=False, server_default=""),
    )
    op.create_index("snapshots_by_owner", "snapshots", ["owner", "created_at"])
    _unique("snapshots_by_id", ["id"], "state = 'ready'")
    _unique("snapshots_by_name", ["owner", "name", "tag"], "state = 'ready' AND name <> ''")


def _unique(name: str, columns: list[str], where: str) -> None:
    condition = sa.text(where)
    op.create_index(name, "snapshots", columns, unique=True, sqlite_where=condition, postgresql_where=condition)
