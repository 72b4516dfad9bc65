"""The tables of the store, as the newest migration leaves them; a test compares the two.

Times are microseconds since 1970. JSON is text in SQLite and JSON in PostgreSQL; nothing is searched inside it.
"""

from __future__ import annotations

import sqlalchemy as sa

__all__ = [
    "HEAD",
    "api_keys",
    "audit",
    "command_logs",
    "cores",
    "create_rates",
    "measurements",
    "meta",
    "metadata",
    "sandboxes",
    "snapshots",
    "teams",
    "transitions",
]

#: The newest revision in ``migrations/versions``: a database that has it is opened without loading alembic.
HEAD = "0007"

metadata = sa.MetaData()

sandboxes = sa.Table(
    "sandboxes",
    metadata,
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
    sa.Column("pause_mode", sa.String(16)),
    sa.Column("agent_unresponsive", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("idempotency_key", sa.String(255)),
    sa.Column("request_digest", sa.String(64)),
    sa.Column("setup", sa.JSON(none_as_null=True)),
    sa.Column("egress_pending", sa.Boolean, nullable=False, server_default=sa.false()),
    #: Whose it is. Empty: nobody's, as an earlier schema left it.
    sa.Column("core", sa.String(32), nullable=False, server_default=""),
    sa.Index("sandboxes_by_state", "state"),
    sa.Index("sandboxes_by_end", "ended_at"),
    # Of all creates that claim to be the same one, a single one makes a record. NULLs do not clash.
    sa.Index("sandboxes_by_idempotency_key", "owner", "idempotency_key", unique=True),
)

#: The history of each record; the store keeps the last entries only.
transitions = sa.Table(
    "transitions",
    metadata,
    sa.Column("sandbox_id", sa.String(64), sa.ForeignKey("sandboxes.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("revision", sa.Integer, primary_key=True),
    sa.Column("at", sa.BigInteger, nullable=False),
    sa.Column("from_state", sa.String(16)),
    sa.Column("to_state", sa.String(16), nullable=False),
    sa.Column("note", sa.Text, nullable=False),
)

#: Kept copies of files. A row is one copy; ``id`` and name stay when a newer copy takes the place of an older one.
snapshots = sa.Table(
    "snapshots",
    metadata,
    #: What the backend knows the copy by; unique for all time.
    sa.Column("content", sa.String(64), primary_key=True),
    sa.Column("id", sa.String(64), nullable=False),
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("backend", sa.String(64), nullable=False),
    #: Empty together: it has none.
    sa.Column("name", sa.String(128), nullable=False),
    sa.Column("tag", sa.String(128), nullable=False),
    sa.Column("sandbox_id", sa.String(64), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("resources", sa.JSON, nullable=False),
    sa.Column("envs", sa.JSON, nullable=False),
    sa.Column("setup", sa.JSON, nullable=False),
    sa.Column("handle", sa.JSON(none_as_null=True)),
    #: Whose sandbox it was a copy of, where only that core reaches its files.
    sa.Column("core", sa.String(32), nullable=False, server_default=""),
    sa.Index("snapshots_by_owner", "owner", "created_at"),
    # Of several that want one name or id, a single one has it.
    sa.Index(
        "snapshots_by_id",
        "id",
        unique=True,
        sqlite_where=sa.text("state = 'ready'"),
        postgresql_where=sa.text("state = 'ready'"),
    ),
    sa.Index(
        "snapshots_by_name",
        "owner",
        "name",
        "tag",
        unique=True,
        sqlite_where=sa.text("state = 'ready' AND name <> ''"),
        postgresql_where=sa.text("state = 'ready' AND name <> ''"),
    ),
)

#: What sandboxes used: samples packed by :mod:`sandgate_core.metrics`, in the order of their first one's time.
measurements = sa.Table(
    "measurements",
    metadata,
    sa.Column("sandbox_id", sa.String(64), sa.ForeignKey("sandboxes.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("at", sa.BigInteger, primary_key=True),
    sa.Column("samples", sa.LargeBinary, nullable=False),
)

#: What commands wrote, where that is kept: lines packed by :mod:`sandgate_core.command_log_table`, numbered for each sandbox.
command_logs = sa.Table(
    "command_logs",
    metadata,
    sa.Column("sandbox_id", sa.String(64), sa.ForeignKey("sandboxes.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("number", sa.BigInteger, primary_key=True),
    sa.Column("first_at", sa.BigInteger, nullable=False),
    sa.Column("last_at", sa.BigInteger, nullable=False),
    sa.Column("journal", sa.BigInteger, nullable=False),
    sa.Column("last_line", sa.BigInteger, nullable=False),
    sa.Column("size", sa.Integer, nullable=False),
    sa.Column("lines", sa.LargeBinary, nullable=False),
    sa.Index("command_logs_by_time", "last_at"),
)

api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("id", sa.String(16), primary_key=True),
    sa.Column("digest", sa.String(64), nullable=False, unique=True),
    sa.Column("prefix", sa.String(16), nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("revoked_at", sa.BigInteger),
    sa.Column("last_used_at", sa.BigInteger),
)

#: Owners of keys and sandboxes. A limit that is NULL does not hold.
teams = sa.Table(
    "teams",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("max_sandboxes", sa.Integer),
    sa.Column("max_cpus", sa.Integer),
    sa.Column("max_memory_mb", sa.BigInteger),
    sa.Column("max_life", sa.BigInteger),
    sa.Column("creates_per_minute", sa.Integer),
)

#: Who asked for which change. Without foreign keys: an entry outlives what it is about.
audit = sa.Table(
    "audit",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("at", sa.BigInteger, nullable=False),
    sa.Column("team", sa.String(64), nullable=False),
    sa.Column("key_id", sa.String(16), nullable=False),
    sa.Column("key_name", sa.Text, nullable=False),
    sa.Column("action", sa.String(32), nullable=False),
    sa.Column("subject", sa.String(64), nullable=False),
    sa.Column("outcome", sa.String(32), nullable=False),
    sa.Column("request_id", sa.String(128), nullable=False),
    sa.Index("audit_by_time", "at"),
    sa.Index("audit_by_subject", "subject"),
)

#: The cores of this database. Times are the database's own.
cores = sa.Table(
    "cores",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    #: A gRPC target at which the other cores and their edges reach it.
    sa.Column("address", sa.Text, nullable=False),
    #: Its machine's name, for people.
    sa.Column("host", sa.Text, nullable=False),
    #: Another one for each start of the core.
    sa.Column("boot", sa.String(32), nullable=False),
    sa.Column("lease_end", sa.BigInteger, nullable=False),
)

#: How many creates each team has left of its rate, where several cores count them.
create_rates = sa.Table(
    "create_rates",
    metadata,
    sa.Column("team", sa.String(64), primary_key=True),
    sa.Column("tokens", sa.Double, nullable=False),
    sa.Column("at", sa.BigInteger, nullable=False),
)

meta = sa.Table(
    "meta",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)
