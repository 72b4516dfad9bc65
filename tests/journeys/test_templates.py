"""What the SDK learns about templates (C24), and templates of several backends in one gateway."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2b import Sandbox, SandboxException, Template

from sandgate_testing.containers import Containers, containers_of
from sandgate_testing.gateway import Gateway
from sandgate_testing.images import Images
from sandgate_testing.requirements import need


def test_template_exists_says_which_are_there(gateway: Gateway) -> None:
    options = {"api_url": gateway.url, "api_key": gateway.api_key}
    assert Template.exists("base", **options) is True
    assert Template.exists("no-such-template", **options) is False


@pytest.fixture(scope="module")
def both(images: Images, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Processes by default, and containers beside them: a table in the configuration is all it takes."""
    need("bubblewrap")
    from sandgate_bundle import make_portable
    from sandgate_plugin_docker import enter

    bundle = make_portable(tmp_path_factory.mktemp("bundle"), entrance=Path(enter.__file__))
    box = ["[backends.docker.templates.box]", f'image = "{images.debian()}"', 'envs = {FROM = "the template"}']
    box += ['start_command = "echo started > ~/mark; sleep 1000"', 'ready_command = "test -e ~/mark"']
    containers = Containers(
        image=images.debian(), bundle=bundle.path.parent, settings=["[backends.process]", "warm = 0", *box]
    )
    gateway = Gateway(containers=containers, options=("--backend", "process"))
    try:
        gateway.start()
        yield gateway
        gateway.stop()
        left = gateway.remains()
    finally:
        gateway.discard()
    assert left == []


def test_one_gateway_makes_sandboxes_with_two_backends(both: Gateway) -> None:
    process = Sandbox.create("base", **both.sdk_options)
    container = Sandbox.create("box", **both.sdk_options)
    try:
        boxes = both.state_dir / "backends/process/boxes"
        assert {box.name for box in boxes.iterdir()} == {process.sandbox_id}
        assert set(containers_of(both.state_dir)) == {container.sandbox_id}
        # Which one it is shows to nobody who works with it, but for what its template says.
        assert process.commands.run("echo $FROM").stdout == "\n"
        assert container.commands.run("echo $FROM; cat ~/mark").stdout == "the template\nstarted\n"
        # Each is held to what its own backend can do.
        rules = {"allow_out": ["1.1.1.1"], "deny_out": ["0.0.0.0/0"]}
        with pytest.raises(SandboxException, match="'process' does not offer network rules"):
            process.update_network(rules)  # type: ignore[arg-type]
        container.update_network(rules)  # type: ignore[arg-type]
        assert container.get_info().network == rules
        listed = {box.sandbox_id for box in Sandbox.list(api_url=both.url, api_key=both.api_key).next_items()}
        assert listed == {process.sandbox_id, container.sandbox_id}
        with pytest.raises(SandboxException, match="404"):
            Sandbox.create("no-such-template", **both.sdk_options)
    finally:
        process.kill()
        container.kill()
