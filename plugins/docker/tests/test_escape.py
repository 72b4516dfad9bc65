"""Hostile code in a sandbox, as `user` and as root: what it finds and what it cannot reach."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from sandgate_testing.engine import docker, engine_socket

USERS = ("user", "root")


@pytest.fixture
async def placement(gateway, backend):
    return await gateway.create(backend)


@pytest.mark.parametrize("user", USERS)
async def test_nothing_of_the_host_is_mounted_that_can_be_written(placement, run, user):
    _, mounts = await run(placement, "cat /proc/self/mountinfo", user)
    ours = [line.split() for line in mounts.splitlines() if " /run/sandgate" in line]
    assert len(ours) == 2
    assert all("ro" in fields[5].split(",") for fields in ours)
    for path in ("/run/sandgate/bundle/x", "/run/sandgate/meet/x"):
        assert (await run(placement, f"touch {path}", user))[0] == 1
    assert (await run(placement, "mount -o remount,rw /run/sandgate/meet", user))[0] != 0
    assert (await run(placement, "umount -l /run/sandgate/meet", user))[0] != 0


@pytest.mark.parametrize("user", USERS)
async def test_no_process_of_a_sandbox_has_the_folder_of_the_agents_socket(placement, run, user):
    look = "for d in /proc/[0-9]*/fd/*; do readlink $d; done 2>/dev/null | grep -e sgd- -e /s$ ; true"
    assert await run(placement, look, user) == (0, "")
    code, text = await run(placement, "ls /run/sandgate/meet; find / -xdev -name agent -type s 2>/dev/null; true", user)
    assert (code, text) == (0, "")


@pytest.mark.parametrize("user", USERS)
async def test_token_of_the_agent_is_nowhere_to_be_read(placement, run, user):
    token = placement.agent.token
    for place in ("/proc/1/environ", "/proc/1/cmdline", "/proc/self/environ"):
        assert token not in (await run(placement, f"cat {place} 2>/dev/null | tr '\\0' '\\n'", user))[1]
    assert (await run(placement, "cat /proc/1/mem 2>/dev/null | head -c 1", user))[1] == ""
    assert token not in docker("inspect", str(placement.handle["container"])).stdout


@pytest.mark.parametrize("user", USERS)
async def test_devices_kernel_and_engine_are_out_of_reach(placement, run, user):
    refused = (
        "mknod /tmp/disk b 254 0",
        "mount -t tmpfs none /mnt",
        "mount --bind / /mnt",
        "sh -c 'echo 1 > /proc/sys/kernel/sysrq'",
        "sh -c 'echo b > /proc/sysrq-trigger'",
        "sh -c 'echo x > /sys/kernel/uevent_helper'",
        "dmesg",
        "unshare -m true",
        "chroot /proc/1/root /bin/sh -c 'test -e /work'",
        f"ls {engine_socket()} /var/run/docker.sock /run/docker.sock /run/containerd | grep .",
        "test -r /proc/kcore -a -s /proc/kcore",
    )
    for command in refused:
        assert (await run(placement, f"{command} 2>/dev/null", user))[0] != 0, command
    devices = (await run(placement, "find /dev -type b", user))[1]
    assert devices == ""


async def test_agent_can_neither_be_killed_nor_stopped_nor_traced(placement, run):
    for command in ("kill -9 1", "kill -STOP 1"):
        await run(placement, command, "root")
        await run(placement, command, "user")
    # Root may end its own sandbox by killing all that is in it; user may not.
    await run(placement, "kill -9 -1", "user")
    assert await run(placement, "echo here") == (0, "here\n")
    trace = "python3 -c 'import ctypes; print(ctypes.CDLL(None).ptrace(16, 1, 0, 0))'"
    assert await run(placement, trace, "user") == (0, "-1\n")


async def test_root_holds_no_capability_that_leads_out(placement, run):
    _, text = await run(placement, "grep -e CapEff -e CapBnd -e NoNewPrivs -e Seccomp: /proc/self/status", "root")
    fields = dict(line.split(":\t") for line in text.splitlines())
    # SYS_ADMIN 21, SYS_PTRACE 19, NET_RAW 13, NET_ADMIN 12, SYS_MODULE 16, MKNOD 27, DAC_READ_SEARCH 2
    for number in (2, 12, 13, 16, 19, 21, 27):
        assert not int(fields["CapBnd"], 16) >> number & 1, number
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"


async def test_neighbours_reach_neither_each_other_nor_their_agents(gateway, backend, run):
    first, second = await asyncio.gather(gateway.create(backend), gateway.create(backend))
    _, address = await run(second, "hostname -i", "root")
    await run(second, "python3 -m http.server 8000 >/dev/null 2>&1 &")
    assert (await run(second, "for i in $(seq 50); do : < /dev/tcp/127.0.0.1/8000 && break; sleep 0.1; done"))[0] == 0
    code, _ = await run(first, f"timeout 3 bash -c ': < /dev/tcp/{address.split()[0]}/8000' 2>/dev/null", "root")
    assert code != 0
    assert (await run(first, "ps -e -o args | grep -c '[h]ttp.server'", "root"))[1] == "0\n"
    assert first.agent.token != second.agent.token


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sets packet filter rules")
async def test_the_host_itself_is_out_of_reach(placement, run):
    """Also by addresses that are not in a private range: what listens on all of them, as a gateway may."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        code, route = await run(placement, "awk '$2 == \"00000000\" {print $3}' /proc/net/route")
        assert code == 0
        octets = [str(int(route.strip()[index : index + 2], 16)) for index in (6, 4, 2, 0)]
        here = socket.gethostbyname(socket.gethostname())
        for address in (".".join(octets), here, "169.254.169.254"):
            if address.startswith("127."):
                continue
            code, _ = await run(placement, f"timeout 3 bash -c ': < /dev/tcp/{address}/{port}' 2>/dev/null", "root")
            assert code != 0, address
