"""What docs/compatibility.md says beyond the journeys: more that works, and that all else is refused by name."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import e2b
import httpx
import pytest
from e2b import CommandExitException, PtySize, Sandbox

from sandgate_testing.gateway import Gateway


@pytest.fixture(scope="module")
def sandbox(gateway: Gateway) -> Iterator[Sandbox]:
    sandbox = Sandbox.create(**gateway.sdk_options)
    yield sandbox
    sandbox.kill()


Options = dict[str, Any]
Call = Callable[[Sandbox, Options], Any]

MISSING: dict[str, tuple[Call, str]] = {
    "fork": (lambda box, _: box.fork(), "does not offer fork"),
    "create_snapshot(mode=full)": (lambda box, _: box.create_snapshot(mode="full"), "does not offer snapshots"),
    "create(network=rules)": (
        lambda _, o: Sandbox.create(network={"rules": {"h": [{"transform": {"headers": {"a": "b"}}}]}}, **o),
        "network.rules",
    ),
    "update_network(egress_proxy=…)": (
        lambda box, _: box.update_network({"egress_proxy": {"address": "127.0.0.1:1080"}}),
        "egressProxy",
    ),
    "create(volume_mounts=…)": (lambda _, o: Sandbox.create(volume_mounts={"/x": "v"}, **o), "volumeMounts"),
    "create(mcp=…)": (lambda _, o: Sandbox.create(mcp={"x": {}}, **o), "mcp"),
    "Template.build": (lambda _, o: e2b.Template.build(e2b.Template().from_base_image(), "x", **_api(o)), "templates"),
    "Volume.create": (lambda _, o: e2b.Volume.create("v", **_api(o)), "volumes"),
    "Volume.list": (lambda _, o: e2b.Volume.list(**_api(o)), "volumes"),
    "Secret.list": (lambda _, o: e2b.Secret.list(**_api(o)).next_items(), "secrets"),
}


def _api(options: Options) -> Options:
    return {name: value for name, value in options.items() if name != "sandbox_url"}


@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_is_refused_by_name(sandbox: Sandbox, gateway: Gateway, name: str) -> None:
    # C11: the gateway takes `mcp`, and the SDK kills the sandbox in which it cannot start the program.
    call, named = MISSING[name]
    before = {box.sandbox_id for box in Sandbox.list(**_api(gateway.sdk_options)).next_items()}
    with pytest.raises(Exception, match=named) as caught:
        call(sandbox, gateway.sdk_options)
    # The SDK's own kind of error, not a parser's that met something unexpected.
    assert type(caught.value).__module__.startswith("e2b."), repr(caught.value)
    assert {box.sandbox_id for box in Sandbox.list(**_api(gateway.sdk_options)).next_items()} == before
    assert sandbox.is_running()


RULES = {"allow_out": ["1.1.1.1"], "deny_out": ["0.0.0.0/0"]}


def test_rules_that_the_process_backend_cannot_keep_are_refused_by_name(gateway: Gateway, isolation: str) -> None:
    if isolation == "container":
        pytest.skip("an engine keeps them")
    box = Sandbox.create(**gateway.sdk_options)
    try:
        with pytest.raises(e2b.SandboxException, match="'process' does not offer network rules"):
            box.update_network(RULES)  # type: ignore[arg-type]
        # What changes nothing is no rule.
        box.update_network({"allow_internet_access": True})
        with pytest.raises(e2b.SandboxException, match="'process' does not offer network rules"):
            Sandbox.create(network=RULES, **gateway.sdk_options)  # type: ignore[arg-type]
    finally:
        box.kill()


def test_network_rules_are_checked_before_anything_is_made(gateway: Gateway) -> None:
    """C54."""
    for rules, named in (
        ({"deny_out": ["example.org"]}, "denyOut"),
        ({"allow_out": ["example.org"]}, "0.0.0.0/0"),
        ({"allow_out": ["http://x"], "deny_out": ["0.0.0.0/0"]}, "allowOut"),
    ):
        with pytest.raises(e2b.SandboxException, match=named):
            Sandbox.create(network=rules, **gateway.sdk_options)  # type: ignore[arg-type]


def test_denying_all_is_being_without_internet(gateway: Gateway, isolation: str) -> None:
    """C54: two ways to say it."""
    if isolation == "none":
        pytest.skip("without isolation the network is the machine's")
    box = Sandbox.create(network={"deny_out": ["0.0.0.0/0"]}, **gateway.sdk_options)
    try:
        assert box.commands.run("tail -n +3 /proc/net/dev | cut -d: -f1").stdout.split() == ["lo"]
        assert box.get_info().network == {"deny_out": ["0.0.0.0/0"]}
    finally:
        box.kill()


def test_a_snapshot_takes_the_place_of_one_with_its_name(gateway: Gateway, isolation: str) -> None:
    """C51, C52."""
    box = Sandbox.create(**gateway.sdk_options)
    name = f"compatibility-{uuid.uuid4().hex}"
    try:
        if isolation == "none":
            with pytest.raises(e2b.SandboxException, match="'process' does not offer snapshots"):
                box.create_snapshot()
            return
        box.files.write("mark", "1")
        first = box.create_snapshot(name)
        box.files.write("mark", "2")
        second = box.create_snapshot(name, mode="filesystem")
        assert (second.snapshot_id, second.names) == (first.snapshot_id, [f"default/{name}:default"])
        tagged = box.create_snapshot(f"{name}:old")
        assert tagged.snapshot_id != first.snapshot_id
        listed = Sandbox.list_snapshots(name=name, **_api(gateway.sdk_options)).next_items()
        assert {item.snapshot_id for item in listed} == {first.snapshot_id, tagged.snapshot_id}
        copy = Sandbox.create(f"default/{name}", **gateway.sdk_options)
        assert copy.files.read("mark") == "2"
        copy.kill()
        assert e2b.Template.exists(name, **_api(gateway.sdk_options)) is True
        # By a name with a slash and a tag as well as by id.
        assert Sandbox.delete_snapshot(f"default/{name}:old", **_api(gateway.sdk_options)) is True
        assert Sandbox.delete_snapshot(first.snapshot_id, **_api(gateway.sdk_options)) is True
        assert Sandbox.list_snapshots(name=name, **_api(gateway.sdk_options)).next_items() == []
    finally:
        box.kill()


def test_a_repeated_create_answers_with_the_same_sandbox(gateway: Gateway) -> None:
    key = uuid.uuid4().hex
    first = Sandbox.create(idempotency_key=key, **gateway.sdk_options)
    try:
        again = Sandbox.create(idempotency_key=key, **gateway.sdk_options)
        assert again.sandbox_id == first.sandbox_id
        with pytest.raises(e2b.SandboxException, match="422"):
            Sandbox.create(idempotency_key=key, metadata={"other": "request"}, **gateway.sdk_options)
    finally:
        first.kill()


def test_a_paused_sandbox_is_started_anew_when_asked(gateway: Gateway) -> None:
    box = Sandbox.create(**gateway.sdk_options)
    try:
        box.files.write("kept", "x")
        box.commands.run("sleep 1000", background=True, timeout=0)
        assert box.beta_pause() is True
        assert box.get_info().state.value == "paused"
        box.connect(on_resume="reboot")
        assert box.commands.list() == []
        assert box.files.read("kept") == "x"
        assert box.pause(strict=True) is True
        assert box.get_info().state.value == "paused"
    finally:
        box.kill()


def test_signed_urls_read_and_write(sandbox: Sandbox) -> None:
    """By a client that knows nothing but the URL, though the URL names no sandbox (S8)."""
    with httpx.Client(trust_env=False, timeout=60) as client:
        upload = sandbox.upload_url("signed é.txt", use_signature_expiration=60)
        assert client.post(upload, files={"file": ("x", b"by url")}).status_code == 200
        assert sandbox.files.read("signed é.txt") == "by url"
        download = sandbox.download_url("signed é.txt")
        assert client.get(download).content == b"by url"
        assert client.get(download.replace("signature=v1_", "signature=v1_x")).status_code == 401


def test_no_internet_is_kept(gateway: Gateway, isolation: str) -> None:
    if isolation == "none":
        pytest.skip("without isolation the network is the machine's")
    box = Sandbox.create(allow_internet_access=False, **gateway.sdk_options)
    try:
        # Not even the gateway's machine is there, only a loopback of its own.
        listing = box.commands.run("cat /proc/net/dev | tail -n +3 | cut -d: -f1").stdout.split()
        assert listing == ["lo"]
        reached = box.commands.run(f"exec 3<>/dev/tcp/127.0.0.1/{gateway.address[1]} && echo reached || echo refused")
        assert reached.stdout == "refused\n"
    finally:
        box.kill()


def test_input_is_streamed(sandbox: Sandbox) -> None:
    command = sandbox.commands.run("cat", background=True, stdin=True)
    sandbox.commands.stream_input(command.pid, iter([b"one\n", "zwei é\n"]))
    sandbox.commands.close_stdin(command.pid)
    assert command.wait().stdout == "one\nzwei é\n"


def test_terminals_work(sandbox: Sandbox) -> None:
    terminal = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=60)
    shown: list[bytes] = []
    sandbox.pty.resize(terminal.pid, PtySize(rows=30, cols=100))
    sandbox.pty.stream_input(terminal.pid, iter([b"stty ", b"size\n"]))
    sandbox.pty.send_stdin(terminal.pid, b"exit 3\n")
    with pytest.raises(CommandExitException) as ended:
        terminal.wait(on_pty=shown.append)
    assert ended.value.exit_code == 3
    assert b"30 100" in b"".join(shown)


def test_a_terminal_is_found_again_and_killed(sandbox: Sandbox) -> None:
    terminal = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=60)
    assert sandbox.pty.connect(terminal.pid).pid == terminal.pid
    assert sandbox.pty.kill(terminal.pid) is True
    with pytest.raises(CommandExitException):
        terminal.wait()
    assert sandbox.pty.kill(terminal.pid) is False


def test_git_runs_where_the_host_has_it(sandbox: Sandbox, isolation: str) -> None:
    if isolation == "container":
        pytest.skip("the image of these tests has no git")
    if shutil.which("git") is None:
        pytest.skip("no git on this machine")
    sandbox.git.init("repository", initial_branch="trunk")
    sandbox.files.write("repository/a.txt", "x")
    sandbox.git.add("repository")
    sandbox.git.commit("repository", "first", author_name="A", author_email="a@example.org")
    status = sandbox.git.status("repository")
    assert (status.current_branch, status.file_status) == ("trunk", [])
