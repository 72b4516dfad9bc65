"""What a pause keeps, the key of a create that may be repeated, and what sandboxes used."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sandboxes", sa.Column("pause_mode", sa.String(16)))
    op.add_column("sandboxes", sa.Column("agent_unresponsive", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("sandboxes", sa.Column("idempotency_key", sa.String(255)))
    op.add_column("sandboxes", sa.Column("request_digest", sa.String(64)))
    op.create_index("sandboxes_by_idempotency_key", "sandboxes", ["owner", "idempotency_key"], unique=True)
    op.create_table(
        "measurements",
        sa.Column("sandbox_id", sa.String(64), sa.ForeignKey("sandboxes.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("at", sa.BigInteger, primary_key=True),
        sa.Column("samples", sa.LargeBinary, nullable=False),
    )
