"""Calls and settings of the kernel by which containers have been left before, as `user` and as root of a sandbox.

Each call is made for real, by its number or through the C library, and must be refused: with EPERM or EACCES where the kernel
has the way, with ENOSYS, EINVAL or ENODEV where it has not.
"""

from __future__ import annotations

import json
import platform

import pytest

#: Name to what a Python program evaluates; -1 or an exception is a refusal, and ``errno`` then tells which.
CALLS = {
    # A mount, and a namespace in which one would be root.
    "mount": 'libc.mount(b"none", b"/mnt", b"tmpfs", 0, None)',
    "mount of cgroups": 'libc.mount(b"cgroup", b"/mnt", b"cgroup", 0, b"memory")',
    "mount of proc": 'libc.mount(b"proc", b"/mnt", b"proc", 0, None)',
    "umount": 'libc.umount2(b"/proc/sys", 2)',
    "remount of /proc/sys": 'libc.mount(None, b"/proc/sys", None, 32 | 4096, None)',
    "pivot_root": 'libc.syscall(PIVOT_ROOT, b"/", b"/tmp")',
    "a user namespace": "libc.unshare(0x10000000)",
    "a mount namespace": "libc.unshare(0x20000)",
    "a network namespace": "libc.unshare(0x40000000)",
    "entering a namespace": 'libc.setns(os.open("/proc/1/ns/mnt", os.O_RDONLY), 0)',
    # What needs no path: file handles, keys of others, programs in the kernel.
    "a file by its handle": "libc.open_by_handle_at(os.open('/', os.O_RDONLY), handle, 0)",
    "a key": 'libc.syscall(ADD_KEY, b"user", b"x", b"y", 1, -2)',
    "a keyring": "libc.syscall(KEYCTL, 0, -4, 1)",
    "bpf": "libc.syscall(BPF, 5, bytes(128), 128)",
    "perf events": "libc.syscall(PERF_EVENT_OPEN, bytes(128), 0, -1, -1, 0)",
    "a kernel module": "libc.syscall(INIT_MODULE, b'', 0, b'')",
    "another kernel": "libc.syscall(KEXEC_LOAD, 0, 0, 0, 0)",
    "page faults": "libc.syscall(USERFAULTFD, 0)",
    # The machine as a whole.
    "reboot": "libc.reboot(0x89ABCDEF)",
    "swap": 'libc.swapon(b"/tmp/x", 0)',
    "the clock": "libc.settimeofday(bytes(16), None)",
    "the host's name": 'libc.sethostname(b"x", 1)',
    "accounting": 'libc.acct(b"/tmp/x")',
    "the kernel's log": "libc.klogctl(3, bytes(16), 16)",
    # Networks below the protocols that are filtered.
    "raw packets": "socket.socket(17, 3)",
    "raw IP": "socket.socket(2, 3, 1)",
    "the host's hypervisor": "socket.socket(40, 1).connect((2, 1024))",
    # Devices.
    "a disk": "os.mknod('/tmp/disk', 0o60666, os.makedev(254, 0))",
    "the memory": "os.mknod('/tmp/mem', 0o20666, os.makedev(1, 1))",
}
NUMBERS = {
    "x86_64": {
        "PIVOT_ROOT": 155, "ADD_KEY": 248, "KEYCTL": 250, "BPF": 321, "PERF_EVENT_OPEN": 298, "INIT_MODULE": 175,
        "KEXEC_LOAD": 246, "USERFAULTFD": 323,
    },
    "aarch64": {
        "PIVOT_ROOT": 41, "ADD_KEY": 217, "KEYCTL": 219, "BPF": 280, "PERF_EVENT_OPEN": 241, "INIT_MODULE": 105,
        "KEXEC_LOAD": 104, "USERFAULTFD": 282,
    },
}  # fmt: skip
PROGRAM = """
import ctypes, errno, json, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
handle = ctypes.create_string_buffer(bytes([8, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]))
calls, numbers = json.loads(sys.argv[1])
for name, call in calls.items():
    child = os.fork()
    if child == 0:
        try:
            outcome = "done" if eval(call, {**globals(), **numbers}) != -1 else errno.errorcode[ctypes.get_errno()]
        except OSError as error:
            outcome = errno.errorcode[error.errno]
        print(json.dumps([name, outcome]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
REFUSALS = {"EPERM", "EACCES", "ENOSYS", "EINVAL", "ENODEV", "EAFNOSUPPORT", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT"}

#: Settings of the whole machine, and what reaches into it.
FILES = (
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/modprobe",
    "/proc/sys/kernel/sysrq",
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/yama/ptrace_scope",
    "/proc/sys/fs/binfmt_misc/register",
    "/proc/sys/vm/overcommit_memory",
    "/proc/sys/net/ipv4/ip_forward",
    "/proc/sysrq-trigger",
    "/proc/irq/default_smp_affinity",
    "/proc/bus/pci/devices",
    "/sys/kernel/uevent_helper",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/fs/cgroup/release_agent",
    "/sys/fs/cgroup/memory/release_agent",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    "/sys/fs/cgroup/pids/pids.max",
    "/sys/fs/cgroup/pids.max",
    "/sys/fs/cgroup/cgroup.procs",
    "/sys/power/state",
)


def test_no_call_leads_out(attack) -> None:
    numbers = NUMBERS.get(platform.machine())
    if numbers is None:
        pytest.skip(f"the numbers of calls are not written down for {platform.machine()}")
    code, text = attack(
        'python3 -c "$PROGRAM" "$CALLS"', envs={"PROGRAM": PROGRAM, "CALLS": json.dumps([CALLS, numbers])}
    )
    outcomes = dict(map(json.loads, text.splitlines()))
    assert code == 0
    assert outcomes.keys() == CALLS.keys()
    assert {name: outcome for name, outcome in outcomes.items() if outcome not in REFUSALS} == {}


def test_no_setting_of_the_machine_can_be_written(attack) -> None:
    written = []
    for path in FILES:
        # A file that the kernel has not put there is only a file.
        code, _ = attack(f"test -e {path} && echo 1 >{path}")
        if code == 0:
            written.append(path)
    assert written == []


def test_memory_and_keys_of_the_kernel_are_covered(attack) -> None:
    for path in ("/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/sched_debug", "/proc/acpi", "/sys/firmware"):
        assert attack(f"cat {path} 2>/dev/null | head -c 1; ls -A {path} 2>/dev/null | grep -v '^{path}$'")[1] == "", (
            path
        )


def test_program_of_root_does_not_make_root(attacker, attack, account) -> None:
    """No gain of privileges by set-user-id files, also when root of the sandbox made them."""
    attacker.commands.run("cp /usr/bin/id /tmp/id && chmod 6755 /tmp/id", user="root")
    assert attack("/tmp/id -u")[1] == ("1000\n" if account == "user" else "0\n")


def test_processes_of_the_machine_are_not_there(target, attack) -> None:
    _, text = attack("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "sandgate_core" not in text
    assert "dockerd" not in text
    # The number is somebody else's inside, or nobody's.
    attack(f"kill -9 {target.pid}; kill -9 {target.child('sandgate_core')}")
    assert target.rest("GET", "/v2/sandboxes").status == 200
