"""What hostile code in a sandbox behind bubblewrap must not reach (``docs/backends/process.md``)."""

import json
import os
import socket
from pathlib import Path

import pytest

pytestmark = pytest.mark.parametrize("isolation", ["bubblewrap"], indirect=True)


@pytest.fixture
async def sandbox(gateway, backend):
    return await gateway.create(backend)


@pytest.mark.parametrize("user", ["user", "root"])
async def test_host_files_are_invisible(gateway, sandbox, run, user):
    home = Path(os.path.expanduser("~"))
    secret = gateway.folder / "secret"
    secret.write_text("secret")
    secret.chmod(0o644)
    for path in (secret, gateway.state, gateway.runtime, home / ".bashrc", Path(__file__)):
        if str(path).startswith(("/usr/", "/root/.bashrc")):
            continue
        # Also by way of other processes' links to their roots, the first of the namespace included.
        code, output = await run(sandbox, f"ls -d '{path}' /proc/[0-9]*/root'{path}' /proc/[0-9]*/cwd'{path}'", user)
        assert code != 0
        assert "No such file" in output
        assert not [line for line in output.splitlines() if not line.startswith("ls:")], output
    for path in ("/etc/shadow", "/etc/gshadow", "/etc/ssh", "/etc/machine-id", "/etc/sudoers", "/sys/kernel", "/boot"):
        code, output = await run(sandbox, f"ls -d {path}", user)
        assert code != 0, output


@pytest.mark.parametrize("user", ["user", "root"])
async def test_other_sandboxes_are_invisible(gateway, backend, sandbox, run, user):
    other = await gateway.create(backend)
    await run(other, "echo other > /tmp/mine; echo other > ~/mine; (sleep 4000 >/dev/null 2>&1 &)")
    code, output = await run(sandbox, "cat /tmp/mine ~/mine; pgrep -a sleep; true", user)
    assert code == 0
    assert "other" not in output
    assert "4000" not in output


_TAKE_QUEUES = """
import ctypes
libc = ctypes.CDLL(None)
print(sum(libc.inotify_init() >= 0 for _ in range(1000)))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="without privileges there is one id, whose limits are the gateway's own")
async def test_programs_of_one_sandbox_leave_queues_of_the_kernel_to_others(gateway, backend, sandbox, run):
    """All sandboxes count as one user's outside; one program took all 128 queues for file events."""
    most = int(Path("/proc/sys/user/max_inotify_instances").read_text())
    if most > 1000:
        pytest.skip("this system's limit is too high to be reached here")
    code, output = await run(sandbox, f"python3 -c '{_TAKE_QUEUES}'")
    assert code == 0
    assert 0 < int(output) <= most // 4
    _, watches = await run(sandbox, "cat /proc/sys/user/max_inotify_watches")
    assert int(watches) == int(Path("/proc/sys/user/max_inotify_watches").read_text()) // 2


@pytest.mark.parametrize("user", ["user", "root"])
async def test_host_processes_are_invisible(sandbox, run, user):
    _, output = await run(sandbox, "ls /proc", user)
    seen = {int(name) for name in output.split() if name.isdecimal()}
    assert 1 in seen
    assert max(seen) < 1000
    code, _ = await run(sandbox, "kill -9 1; sleep 0.1; kill -0 $$", user)
    assert code == 0


async def test_processes_do_not_show_host_paths(gateway, sandbox, run):
    _, output = await run(sandbox, "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'", "root")
    assert str(gateway.folder) not in output
    assert ".venv" not in output


@pytest.mark.parametrize("user", ["user", "root"])
async def test_system_is_read_only(sandbox, run, user):
    for target in ("/usr/bin/x", "/usr/lib/x", "/run/sandgate/agent/x", "/etc/alternatives/x"):
        code, output = await run(sandbox, f"touch {target}", user)
        assert code != 0, output
    code, _ = await run(sandbox, "rm -f /usr/bin/true || true; /usr/bin/true", user)
    assert code == 0


@pytest.mark.parametrize("user", ["user", "root"])
@pytest.mark.parametrize(
    "command",
    [
        "mount -o remount,rw /usr",
        "mount -o remount,rw,bind /usr",
        "umount /usr",
        "umount -l /usr",
        "umount /proc",
        "mount -t tmpfs none /mnt",
        "mount --bind /tmp /usr",
        "unshare -Urm mount -o remount,rw,bind /usr",
        "unshare -Urm umount /usr",
        "unshare -Urm umount /etc/alternatives",
        "mknod /tmp/disk b 8 0",
        "nsenter -t 1 -m true",
    ],
)
async def test_mounts_and_devices_are_out_of_reach(sandbox, run, user, command):
    code, output = await run(sandbox, command, user)
    assert code != 0, output


async def test_root_may_make_directories_anywhere(sandbox, run):
    """F1."""
    code, output = await run(sandbox, "mkdir -p /data/x && touch /data/x/y && rmdir /srv && stat -c %U /data", "root")
    assert (code, output) == (0, "root\n")


async def test_accounts_are_those_of_the_contract(sandbox, run):
    """U2, U8, P22."""
    assert await run(sandbox, "id -u; id -un; pwd; echo $HOME", "user") == (0, "1000\nuser\n/home/user\n/home/user\n")
    assert await run(sandbox, "id -u; id -un; pwd; echo $HOME", "root") == (0, "0\nroot\n/root\n/root\n")


async def test_user_owns_its_home_and_may_use_the_shared_places(sandbox, run):
    command = "touch ~/a /tmp/a /var/tmp/a /dev/shm/a && stat -c %U ~ ~/a /tmp/a && echo x > /dev/null"
    assert await run(sandbox, command) == (0, "user\nuser\nuser\n")


async def test_login_shell_keeps_its_path(sandbox, run):
    """P12, trap B17; in front the folder of the sandbox's own `sudo`."""
    for user in ("user", "root"):
        code, path = await run(sandbox, "echo $PATH", user)
        assert (code, path.removeprefix("/run/sandgate/bin:")) == (
            0,
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n",
        )


async def test_user_becomes_root_by_sudo(sandbox, run):
    """U9; the real one of the host gains nothing here."""
    assert await run(sandbox, "id -u; sudo id -u; command -v sudo") == (0, "1000\n0\n/run/sandgate/bin/sudo\n")
    _, output = await run(sandbox, "sudo grep -h CapEff /proc/self/status; grep CapEff /proc/self/status")
    assert output.split()[1] != output.split()[3] == "0000000000000000"


async def test_usual_programs_work(sandbox, run):
    code, output = await run(
        sandbox,
        "set -e; python3 -c 'import ssl, json, ctypes; print(ssl.OPENSSL_VERSION_NUMBER > 0)'; getent passwd user >/dev/null;"
        " getent hosts localhost >/dev/null; hostname; bash -ic true 2>/dev/null; python3 -c 'import os; os.openpty()'",
    )
    assert (code, output) == (0, "True\nsandbox\n")


async def test_root_of_a_sandbox_is_nobody_outside(gateway, sandbox, run):
    _, inside = await run(sandbox, "touch /made; cat /proc/self/uid_map", "root")
    inner, outer, _ = map(int, inside.split()[:3])
    assert inner == 0
    owner = (gateway.state / "boxes" / sandbox.handle["box"] / "rootfs" / "made").stat().st_uid
    assert owner == outer
    assert owner != 0
    if os.geteuid() == 0:
        assert 524288 <= owner < 2**31


async def test_no_process_of_a_sandbox_could_mount(sandbox, run):
    """Neither the agent nor bubblewrap's own first process: root of the sandbox could make either do its will."""
    _, output = await run(sandbox, "grep -h -e CapPrm -e CapEff /proc/1/status /proc/2/status", "root")
    held = [int(word, 16) for word in output.split() if len(word) == 16]
    assert len(held) == 4
    sys_admin = 1 << 21
    assert not (held[0] | held[1]) & sys_admin
    if os.geteuid() != 0:
        # Its user namespace is the one that the mounts belong to.
        assert not (held[2] | held[3]) & sys_admin


async def test_no_capability_holds_outside_and_nothing_gains_any(sandbox, run):
    _, output = await run(sandbox, "grep NoNewPrivs /proc/self/status; grep CapEff /proc/self/status")
    assert output.split() == ["NoNewPrivs:", "1", "CapEff:", "0000000000000000"]


async def test_sandbox_inherits_no_descriptor_and_no_variable(sandbox, run, monkeypatch):
    code, output = await run(sandbox, "ls /proc/self/fd | wc -l; env | cut -d= -f1 | sort | tr '\\n' ' '")
    lines = output.splitlines()
    assert code == 0
    assert int(lines[0]) <= 4
    assert not {"SANDGATE_BOX", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH"} & set(lines[1].split())


async def test_link_in_place_of_the_socket_leads_nowhere(gateway, backend, sandbox, run):
    """Root of a sandbox cannot make the gateway dial another socket of the host."""
    precious = gateway.folder / "precious.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(precious))
        listener.listen()
        await run(sandbox, f"cd /run/sandgate/socket; rm -f agent.sock; ln -s {precious} agent.sock; true", "root")
        assert await run(sandbox, "echo still mine") == (0, "still mine\n")
        assert Path(sandbox.agent.target.removeprefix("unix:")).is_socket()
        assert not Path(sandbox.agent.target.removeprefix("unix:")).is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="without ids of its own a sandbox has the gateway's")
async def test_socket_folder_cannot_be_filled(sandbox, run):
    code, output = await run(sandbox, "touch /run/sandgate/socket/x", "root")
    assert code != 0, output


@pytest.mark.skipif(os.geteuid() != 0, reason="without ids of its own a sandbox has the gateway's")
async def test_every_sandbox_has_ids_of_its_own(gateway, backend):
    bases = set()
    for _ in range(3):
        placement = await gateway.create(backend)
        file = gateway.state / "boxes" / placement.handle["box"] / "record.json"
        bases.add(json.loads(file.read_text())["base"])
    assert len(bases) == 3
