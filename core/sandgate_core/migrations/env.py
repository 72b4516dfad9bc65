"""Runs the migrations on the connection that :mod:`sandgate_core.store` hands over; there is no configuration file."""

from __future__ import annotations

from alembic import context

from sandgate_core.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
