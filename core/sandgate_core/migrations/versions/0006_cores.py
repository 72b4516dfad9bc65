"""Several cores on one database: who there is, which sandbox is whose, and how often teams have created."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Without an owner: the first core that starts takes what the only core of the earlier schema left.
    op.add_column("sandboxes", sa.Column("core", sa.String(32), nullable=False, server_default=""))
    op.create_table(
        "cores",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("address", sa.Text, nullable=False),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("boot", sa.String(32), nullable=False),
        sa.Column("lease_end", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "create_rates",
        sa.Column("team", sa.String(64), primary_key=True),
        sa.Column("tokens", sa.Double, nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
    )
