"""Fixtures of the whole: one gateway for each worker, and gateways that a test may break.

``--backend``, an option of the suite for backends, says what they make sandboxes with: ``process``, as without it,
``docker`` or ``opensandbox``. They start what a user starts, `sandgate serve`, and see to it that nothing of it is left.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from sandgate_testing.containers import Containers
from sandgate_testing.gateway import Gateway
from sandgate_testing.images import Images
from sandgate_testing.requirements import lacking, need
from sandgate_testing.reserved_ports import ReservedPort
from sandgate_testing.sdk import PackageUnavailable

# How long examples take is the machine's business, and it may be crowded.
settings.register_profile("any pace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any pace")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--isolation",
        choices=["bubblewrap", "none"],
        default="bubblewrap",
        help="how gateways under test isolate sandboxes; never falls back to `none` by itself",
    )


@pytest.fixture(scope="session")
def isolation(request: pytest.FixtureRequest) -> str:
    """What stands between sandboxes: ``none``, ``bubblewrap``, or ``container`` where the backend is another."""
    backend = request.config.getoption("--backend") or "process"
    if backend not in {"process", "docker", "opensandbox"}:
        pytest.exit(f"these tests know no backend {backend}", returncode=pytest.ExitCode.USAGE_ERROR)
    if backend != "process":
        return "container"
    chosen: str = request.config.getoption("--isolation")
    if chosen == "bubblewrap":
        need("bubblewrap")
    return chosen


@pytest.fixture(scope="session")
def reserve_port() -> Iterator[Callable[[], int]]:
    """A port that nobody listens on and nobody is given; for a server of the test's own, or for none."""
    with contextlib.ExitStack() as reserved:
        yield lambda: reserved.enter_context(ReservedPort()).number


@pytest.fixture(scope="session")
def images() -> Iterator[Images]:
    """Images for containers, on the engine as long as tests need them."""
    need("docker")
    with Images.of_this_run(functools.partial(lacking, "docker")) as images:
        yield images


@pytest.fixture(scope="session")
def on_engine(images: Images, tmp_path_factory: pytest.TempPathFactory) -> Containers:
    """What gateways that make containers are told."""
    from sandgate_bundle import make_portable
    from sandgate_plugin_docker import enter

    bundle = make_portable(tmp_path_factory.mktemp("bundle"), entrance=Path(enter.__file__))
    return Containers(image=images.debian(), bundle=bundle.path.parent)


@pytest.fixture(scope="session")
def on_server(images: Images, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    """The same for gateways on an OpenSandbox server, which is started for them."""
    from sandgate_bundle import MOUNT, make_portable
    from sandgate_plugin_opensandbox import enter
    from sandgate_testing.opensandbox import OnServer, OpenSandboxServer

    need("packages")
    bundle = make_portable(tmp_path_factory.mktemp("bundle"), entrance=Path(enter.__file__))
    try:
        server = OpenSandboxServer(execd_image=images.execd(), binds=(f"{bundle.path}:{MOUNT}:ro",))
    except PackageUnavailable as error:
        lacking("packages", str(error))
    try:
        server.start()
        yield OnServer(image=images.debian(), bundle=bundle.path.parent, server=server)
        left = server.sandboxes()
    finally:
        server.discard()
    assert left == []


@pytest.fixture(scope="session")
def containers(isolation: str, request: pytest.FixtureRequest) -> Containers | None:
    """The same for gateways under test; None: they are to make none."""
    if isolation != "container":
        return None
    on_server = request.config.getoption("--backend") == "opensandbox"
    chosen: Containers = request.getfixturevalue("on_server" if on_server else "on_engine")
    return chosen


@pytest.fixture(scope="session")
def gateway(isolation: str, containers: Containers | None) -> Iterator[Gateway]:
    """A running gateway that all tests of one worker share. What they do to it must not show in its log."""
    gateway = Gateway(isolation=isolation, containers=containers)
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
    assert gateway.api_key not in log, "the API key stands in the log"


@pytest.fixture
def make_gateway(isolation: str, containers: Containers | None) -> Iterator[Callable[..., Gateway]]:
    """Gateways of a test's own, started by the test itself; keyword arguments as of :class:`Gateway`."""
    made: list[Gateway] = []

    def make(**options: object) -> Gateway:
        made.append(Gateway(isolation=isolation, containers=containers, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for gateway in made:
        gateway.discard()
