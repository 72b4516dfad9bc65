"""Programs written for older releases of the SDKs, many of which know a domain and HTTPS only: they notice nothing.

The scripts in ``clients/`` speak as those releases did. docs/compatibility.md lists the releases.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from sandgate_testing.gateway import Gateway
from sandgate_testing.requirements import lacking, need
from sandgate_testing.sdk import PackageUnavailable, SdkClient, command_of, installed
from sandgate_testing.tls_front import TlsFront

SCRIPTS = Path(__file__).parent / "clients"
DOMAIN = "older.test"
STEPS = (
    "create",
    "run",
    "stream",
    "time_limit",
    "background",
    "stdin",
    "terminal",
    "files",
    "watch",
    "urls",
    "list",
    "get_info",
    "metrics",
    "set_timeout",
    "connect",
    "pause",
    "kill",
    "asynchronous",
)
_FIRST = frozenset({"get_info", "metrics", "pause"})
#: Release to what it has no method for.
PYTHON: Mapping[str, frozenset[str]] = {
    "1.0.6": _FIRST,
    "1.5.2": frozenset({"metrics", "pause"}),
    "1.11.1": frozenset({"pause"}),
    "2.0.2": frozenset(),
    "2.10.2": frozenset(),
    "2.20.3": frozenset(),
}
JAVASCRIPT: Mapping[str, frozenset[str]] = {
    "1.0.7": _FIRST | {"asynchronous"},
    "1.13.2": frozenset({"pause", "asynchronous"}),
    "2.0.1": frozenset({"asynchronous"}),
    "2.10.4": frozenset({"asynchronous"}),
}

#: Those that can be given addresses instead of a domain.
AT_ONE_ADDRESS = frozenset({"2.10.2", "2.20.3", "2.10.4"})

# The first test of a release waits for its installation.
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="the front needs a certificate"),
]


def released(source: str, version: str) -> SdkClient:
    name = {"pip": "python", "npm": "javascript"}[source]
    script = "older.py" if source == "pip" else "older.mjs"
    return SdkClient(name=f"{name}-{version}", source=source, version=version, script=script, create_route="/sandboxes")


RELEASES = [
    (released(source, version), lacks)
    for source, releases in (("pip", PYTHON), ("npm", JAVASCRIPT))
    for version, lacks in releases.items()
]


def named(value: object) -> str:
    return value.name if isinstance(value, SdkClient) else ""


@pytest.fixture(autouse=True)
def accounts(isolation: str) -> None:
    if isolation == "none":
        pytest.skip("without isolation all accounts are one user")


@pytest.fixture
def front(make_gateway: Callable[..., Gateway], tmp_path: Path) -> Iterator[tuple[TlsFront, Gateway]]:
    with TlsFront(DOMAIN, tmp_path) as front:
        gateway = make_gateway(options=("--domain", f"{DOMAIN}:{front.port}"))
        gateway.start()
        front.lead_to(gateway.address)
        yield front, gateway
        gateway.stop()


@pytest.mark.parametrize(("client", "lacks"), RELEASES, ids=named)
def test_older_release_does_what_it_always_did(
    front: tuple[TlsFront, Gateway], tmp_path: Path, client: SdkClient, lacks: frozenset[str]
) -> None:
    """W3, T3, R2, and the routes of rest.md 2 that only these use."""
    tls, gateway = front
    trust = {"SSL_CERT_FILE": str(tls.certificate), "NODE_EXTRA_CA_CERTS": str(tls.certificate)}
    where = {"E2B_DOMAIN": f"{DOMAIN}:{tls.port}", "E2B_API_KEY": gateway.api_key}
    assert steps_taken(client, tmp_path, {**trust, **where}) == [step for step in STEPS if step not in lacks]


@pytest.mark.parametrize(("client", "lacks"), [row for row in RELEASES if row[0].version in AT_ONE_ADDRESS], ids=named)
def test_older_release_works_at_one_address(
    gateway: Gateway, tmp_path: Path, client: SdkClient, lacks: frozenset[str]
) -> None:
    """S1, R2: without names of hosts, as ``sandgate serve`` prints it."""
    where = {**gateway.sdk_environment, "E2B_DOMAIN": DOMAIN}
    assert steps_taken(client, tmp_path, where) == [step for step in STEPS if step not in lacks]


def steps_taken(client: SdkClient, folder: Path, where: Mapping[str, str]) -> list[str]:
    """Runs the script of a release; none of its steps may fail."""
    need("node" if client.source == "npm" else "packages")
    try:
        installed(client)
    except PackageUnavailable as error:
        lacking("packages", str(error))
    shutil.copytree(SCRIPTS, folder, dirs_exist_ok=True)
    if client.source == "npm":
        # Node looks for packages beside the script and above it, and nowhere else.
        (folder / "node_modules").symlink_to(client.environment / "node_modules")
    done = subprocess.run(
        command_of(client, folder / client.script),
        cwd=folder,
        env={"HOME": str(folder), "PATH": os.environ["PATH"], "LANG": "C.UTF-8", **where},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    # Some releases log to standard output.
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step"')]
    assert reports, done.stderr
    assert [report["error"] for report in reports if not report["ok"]] == []
    return [report["step"] for report in reports]
