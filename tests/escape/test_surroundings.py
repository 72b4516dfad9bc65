"""What is around a sandbox: the gateway's files and API, the engine, the agent's socket, neighbours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2b import Sandbox, SandboxException

from sandgate_testing.engine import engine_socket

#: Tries every unix socket that the kernel shows, by path and by abstract name, and what usually is where.
SOCKETS = """
import json, os, socket
names = {line.split()[-1] for line in open("/proc/net/unix") if len(line.split()) == 8}
names |= {os.environ["ENGINE"], "/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock", "/run/sandgate/meet/start"}
names |= {f"/proc/1/fd/{n}/agent" for n in range(64)} | {f"/proc/self/fd/{n}/agent" for n in range(64)}
found = []
for name in names:
    for address in (name, "\\0" + name[1:]):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(2)
            try:
                sock.connect(address)
                found.append(name)
            except (OSError, ValueError):
                pass
print(json.dumps(found))
"""


def test_no_socket_leads_to_an_agent_or_to_the_engine(attack) -> None:
    """But that of the sandbox's own sudo, which is for everybody in it."""
    code, text = attack('python3 -c "$PROGRAM"', envs={"PROGRAM": SOCKETS, "ENGINE": str(engine_socket())})
    assert code == 0, text
    assert set(json.loads(text)) <= {"/run/sandgate/sudo/sudo.sock"}


def test_only_names_for_the_network_are_mounted_from_the_host(attack, target) -> None:
    _, text = attack("cat /proc/self/mountinfo")
    mounts = {fields[4]: fields for line in text.splitlines() if (fields := line.split())}
    from_disk = {place for place, fields in mounts.items() if fields[fields.index("-") + 1] in {"ext4", "xfs", "btrfs"}}
    names = {"/etc/hosts", "/etc/hostname", "/etc/resolv.conf"}
    assert from_disk - names <= {"/run/sandgate/bundle", "/run/sandgate/meet"}
    assert all("ro" in mounts[place][5].split(",") for place in from_disk - names)
    assert str(target.state_dir / "seed") not in text


def test_secrets_of_the_gateway_are_nowhere(attack, target) -> None:
    secrets = [
        target.api_key,
        (target.state_dir / "internal.token").read_text().strip(),
        (target.state_dir / "seed").read_text().strip(),
        json.loads((target.state_dir / "backends/docker/gateway.json").read_text())["secret"],
    ]
    # What this search is started with must not be what it finds.
    patterns = "\n".join(f"[{secret[0]}]{secret[1:]}" for secret in secrets)
    look = "grep -raslE -f /tmp/patterns /proc/[0-9]*/environ /proc/[0-9]*/cmdline /etc /run /home /root /tmp /var 2>/dev/null"
    attack("printf '%s' \"$PATTERNS\" >/tmp/patterns", envs={"PATTERNS": patterns})
    assert attack(f"{look} | grep -v /tmp/patterns")[1] == ""


def test_gateway_is_not_reached_through_its_host(attack, target) -> None:
    """It listens on the loopback address of its host, which is not that of a sandbox."""
    port = target.address[1]
    gateway = (
        "$(awk '$2 == \"00000000\" {print $3}' /proc/net/route | sed 's/../0x& /g' | awk '{print $4, $3, $2, $1}')"
    )
    address = f"printf '%d.%d.%d.%d' {gateway}"
    for host in ("127.0.0.1", f"$({address})", "169.254.169.254", "host.docker.internal"):
        code, _ = attack(f'timeout 3 bash -c ": </dev/tcp/{host}/{port}"')
        assert code != 0, host


def test_key_that_was_given_into_a_sandbox_is_worth_what_it_is_worth_outside(
    attack, target, neighbour: Sandbox
) -> None:
    """A token of one sandbox opens no other, wherever it is used."""
    headers = {
        "E2b-Sandbox-Id": neighbour.sandbox_id,
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": Sandbox.create(**target.sdk_options)._envd_access_token or "",
    }
    assert target.call("GET", "/files?path=/etc/hostname", headers=headers).status in {401, 403}


def test_neighbours_share_no_file_process_or_network(attack, attacker: Sandbox, neighbour: Sandbox) -> None:
    neighbour.files.write("/tmp/mine", "of the neighbour")
    neighbour.commands.run("exec python3 -m http.server 8000 --directory /tmp", background=True, timeout=0)
    neighbour.commands.run("for i in $(seq 100); do curl -s localhost:8000 >/dev/null && exit; sleep 0.1; done; exit 1")
    address = neighbour.commands.run("hostname -i").stdout.split()[0]
    assert attack("cat /tmp/mine")[0] == 1
    assert attack(f"curl -sm 3 http://{address}:8000/mine")[0] != 0
    assert attack("pgrep -f http.server")[0] == 1
    assert attack("ls -d /run/sandgate/meet/*")[0] != 0
    assert attacker.commands.run("hostname -i").stdout.split()[0] != address


def test_links_in_a_sandbox_lead_to_its_own_files(attacker: Sandbox, target) -> None:
    """The files API follows them inside, never outside."""
    outside = Path(target.state_dir) / "outside"
    outside.write_text("of the host")
    attacker.commands.run(f"ln -sfn {outside} ~/a; ln -sfn /proc/1/root{outside} ~/b; ln -sfn / ~/c", user="user")
    for path in ("a", "b", f"c{outside}", f"/proc/1/root{outside}", f"/proc/1/cwd{outside}"):
        with pytest.raises(SandboxException):
            attacker.files.read(path)
