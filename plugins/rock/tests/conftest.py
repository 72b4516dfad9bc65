"""A gateway with the profile and one without it, side by side, with real sandboxes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandgate_testing.gateway import Gateway
from sandgate_testing.requirements import need
from sandgate_testing.sides import COMMANDS, FOREIGN_KEY, Side


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Gateway]]:
    """Starts gateways: ``rock`` with the profile, ``table`` more lines of its settings."""
    need("bubblewrap")
    made: list[Gateway] = []
    started: list[Gateway] = []

    def start(*, rock: bool, table: str = "", config: str = "") -> Gateway:
        file = tmp_path_factory.mktemp("config") / "gateway.toml"
        profile = 'profile = "rock"\n' if rock else ""
        lines = f"[plugins.rock]\n{table}\n" if rock else ""
        file.write_text(f'{profile}domain = "box.test"\n{config}\n{lines}[backends.process]\nwarm = 0\n')
        gateway = Gateway(options=("--config", str(file)))
        made.append(gateway)
        gateway.start()
        started.append(gateway)
        return gateway

    try:
        yield start
        for gateway in started:
            log = gateway.log()
            gateway.stop()
            assert gateway.remains() == []
            assert "Traceback" not in log, log
            assert gateway.api_key not in log
            assert FOREIGN_KEY not in log
    finally:
        for gateway in made:
            gateway.discard()


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.touch()
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def rock(make: Callable[..., Gateway], keys_file: Path) -> Side:
    table = f'max_commands = {COMMANDS}\nkeys_file = "{keys_file}"'
    gateway = make(rock=True, table=table)
    # The gateway has made its own key by now; the file is read again because it has changed.
    keys_file.write_text(f"# a client's key, and ours\n{FOREIGN_KEY} {gateway.api_key}\n")
    return Side(gateway, is_rock=True)


@pytest.fixture(scope="module")
def plain(make: Callable[..., Gateway]) -> Side:
    return Side(make(rock=False), is_rock=False)
