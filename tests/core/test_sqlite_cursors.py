"""Statements of SQLite: each one visit to the driver's thread, and none left unfinished."""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine

from sandgate_core import database

TABLE = sa.Table("t", sa.MetaData(), sa.Column("n", sa.Integer, primary_key=True), sa.Column("s", sa.String))


@pytest.fixture
async def engine(tmp_path):
    engine, _ = await database.opened(url=f"sqlite:///{tmp_path / 'db'}", state_dir=tmp_path, node="n")
    async with engine.begin() as connection:
        await connection.run_sync(TABLE.create)
    yield engine
    await engine.dispose()


async def driver_of(engine: AsyncEngine):
    async with engine.connect() as connection:
        return (await connection.get_raw_connection()).driver_connection


@pytest.fixture
async def visits(engine, monkeypatch):
    """How often the thread was asked for something."""
    driver, seen = await driver_of(engine), []
    ask = driver._execute

    async def asked(function, *args, **kwargs):
        seen.append(function.__name__)
        return await ask(function, *args, **kwargs)

    monkeypatch.setattr(driver, "_execute", asked)
    return seen


async def test_change_is_made_in_three_visits(engine, visits):
    async with engine.begin() as connection:
        await connection.execute(TABLE.insert(), {"n": 1, "s": "x"})
    assert visits == ["execute", "execute", "commit"]


async def test_question_is_answered_in_two_visits_beside_its_transaction(engine, visits):
    async with engine.connect() as connection:
        assert (await connection.execute(sa.select(TABLE))).all() == []
    assert visits == ["execute", "execute", "fetchall", "rollback"]


async def test_rows_counts_and_many_at_once_come_back_as_they_are(engine):
    async with engine.begin() as connection:
        await connection.execute(TABLE.insert(), [{"n": n, "s": str(n)} for n in range(300)])
        changed = await connection.execute(TABLE.update().where(TABLE.c.n < 7).values(s="small"))
        assert changed.rowcount == 7
        added = await connection.execute(TABLE.insert(), {"s": "next"})
        assert added.inserted_primary_key == (300,)
        returned = await connection.execute(TABLE.delete().where(TABLE.c.n == 299).returning(TABLE.c.s))
        assert returned.scalars().all() == ["299"]
        rows = await connection.execute(sa.select(TABLE).order_by(TABLE.c.n).limit(2))
        assert rows.mappings().all() == [{"n": 0, "s": "small"}, {"n": 1, "s": "small"}]


async def test_statement_that_fails_spoils_nothing(engine):
    async with engine.begin() as connection:
        await connection.execute(TABLE.insert(), {"n": 1})

    async def add(*numbers: int) -> None:
        async with engine.begin() as connection:
            for number in numbers:
                await connection.execute(TABLE.insert(), {"n": number})

    with pytest.raises(IntegrityError):
        await add(2, 1)
    with pytest.raises(OperationalError):
        async with engine.connect() as connection:
            await connection.execute(sa.text("SELECT nothing FROM nowhere"))
    async with engine.begin() as connection:
        assert (await connection.execute(sa.select(TABLE.c.n))).scalars().all() == [1]


async def test_what_was_not_committed_is_taken_back_whoever_forgot_it(engine):
    async with engine.connect() as connection:
        await connection.execute(TABLE.insert(), {"n": 1})
    driver = await driver_of(engine)
    async with engine.connect():
        await (await driver.cursor()).execute("BEGIN IMMEDIATE")
        await (await driver.cursor()).execute("INSERT INTO t (n) VALUES (2)")
    assert not driver.in_transaction
    async with engine.connect() as connection:
        assert (await connection.execute(sa.select(TABLE))).all() == []


async def test_cancelled_callers_leave_the_database_to_others(engine):
    """At whatever moment: nothing half done stays, no transaction goes on, no table stays locked."""
    async with engine.begin() as connection:
        await connection.execute(TABLE.insert(), [{"n": n, "s": "x" * 100} for n in range(500)])

    async def change(number: int) -> None:
        async with engine.begin() as connection:
            await connection.execute(TABLE.insert(), {"n": 1000 + 2 * number})
            await connection.execute(sa.select(TABLE))
            await connection.execute(TABLE.insert(), {"n": 1001 + 2 * number})

    for number in range(60):
        task = asyncio.create_task(change(number))
        for _ in range(number // 2):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
    async with asyncio.timeout(30), engine.begin() as connection:
        await connection.execute(TABLE.insert(), {"n": 5000})
        added = (await connection.execute(sa.select(TABLE.c.n).where(TABLE.c.n.between(1000, 4999)))).scalars().all()
        # A change of the schema is what an unfinished statement would hold up.
        await connection.execute(sa.schema.DropTable(TABLE))
    assert {n // 2 for n in added if n % 2} == {n // 2 for n in added if not n % 2}
