"""What commands wrote."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "command_logs",
        sa.Column("sandbox_id", sa.String(64), sa.ForeignKey("sandboxes.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("number", sa.BigInteger, primary_key=True),
        sa.Column("first_at", sa.BigInteger, nullable=False),
        sa.Column("last_at", sa.BigInteger, nullable=False),
        sa.Column("journal", sa.BigInteger, nullable=False),
        sa.Column("last_line", sa.BigInteger, nullable=False),
        sa.Column("size", sa.Integer, nullable=False),
        sa.Column("lines", sa.LargeBinary, nullable=False),
    )
    op.create_index("command_logs_by_time", "command_logs", ["last_at"])
