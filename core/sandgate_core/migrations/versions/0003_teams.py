"""Teams with their limits, and when a key was used last. Every owner that there is becomes a team without limits."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "teams",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("max_sandboxes", sa.Integer),
        sa.Column("max_cpus", sa.Integer),
        sa.Column("max_memory_mb", sa.BigInteger),
        sa.Column("max_life", sa.BigInteger),
        sa.Column("creates_per_minute", sa.Integer),
    )
    op.execute(
        "INSERT INTO teams (id, name, created_at) "
        "SELECT owner, owner, MIN(created_at) FROM "
        "(SELECT owner, created_at FROM api_keys UNION ALL SELECT owner, created_at FROM sandboxes) AS known GROUP BY owner"
    )
    op.add_column("api_keys", sa.Column("last_used_at", sa.BigInteger))
