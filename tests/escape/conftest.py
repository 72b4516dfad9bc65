"""A whole gateway on a container engine, and two sandboxes in it: one that attacks, and a neighbour."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from e2b import CommandExitException, Sandbox

from sandgate_testing.containers import Containers
from sandgate_testing.gateway import Gateway

#: Exit status and what was written, of a command as an account.
Attack = Callable[..., tuple[int, str]]


@pytest.fixture(scope="session")
def target(on_engine: Containers) -> Iterator[Gateway]:
    gateway = Gateway(containers=on_engine)
    try:
        gateway.start()
        yield gateway
        log = gateway.log()
        gateway.stop()
        left = gateway.remains()
    finally:
        gateway.discard()
    assert left == []
    assert "Traceback" not in log, log


@pytest.fixture(scope="session")
def attacker(target: Gateway) -> Sandbox:
    return Sandbox.create(timeout=3600, **target.sdk_options)


@pytest.fixture(scope="session")
def neighbour(target: Gateway) -> Sandbox:
    return Sandbox.create(timeout=3600, **target.sdk_options)


@pytest.fixture(params=["user", "root"])
def account(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def attack(attacker: Sandbox, account: str) -> Attack:
    def run(command: str, **options: object) -> tuple[int, str]:
        try:
            done = attacker.commands.run(command, user=account, timeout=60, **options)  # type: ignore[call-overload]
        except CommandExitException as error:
            return error.exit_code, error.stdout + error.stderr
        return done.exit_code, done.stdout + done.stderr

    return run
