"""Programs have no sockets that lead to the hypervisor below their machine, by whichever way a processor can ask for one."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from sandgate_testing.agent_process import Agent

_AS_A_PROGRAM = """
import ctypes, errno, mmap, socket, sys
from sandgate_agent.hypervisor import close_hypervisor
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)  # no new privileges, as in sandboxes
close_hypervisor()

def attempt(call):
    try:
        call()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"

def in_32_bits(*registers):
    load = b"".join(code + number.to_bytes(4, "little") for code, number in zip((b"\\xb8", b"\\xbb", b"\\xb9"), registers))
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(b"\\x53" + load + b"\\x31\\xd2\\xcd\\x80\\x5b\\xc3")
    result = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))()
    return "done" if result >= 0 else errno.errorcode[-result]

def by_number(*words):
    return "done" if libc.syscall(*map(ctypes.c_long, words)) >= 0 else errno.errorcode[ctypes.get_errno()]
"""


def _asked(*questions: str) -> list[str]:
    program = _AS_A_PROGRAM + "\n".join(f"print({question})" for question in questions)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


def test_no_socket_leads_to_the_hypervisor() -> None:
    kinds = ("SOCK_STREAM", "SOCK_DGRAM", "SOCK_SEQPACKET")
    questions = [f"attempt(lambda: socket.socket(40, socket.{kind}))" for kind in kinds]
    assert _asked(*questions) == ["EAFNOSUPPORT"] * 3


def test_all_other_sockets_are_there() -> None:
    families = ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK")
    questions = [f"attempt(lambda: socket.socket(socket.{family}, socket.SOCK_DGRAM))" for family in families]
    assert _asked(*questions, "attempt(socket.socketpair)") == ["done"] * 5


@pytest.mark.skipif(platform.machine() != "x86_64", reason="made of instructions of x86-64")
def test_other_kinds_of_calls_are_no_way_around() -> None:
    """The family's upper half means nothing to the kernel; x32; 32 bits, also by `socketcall`."""
    questions = (
        "by_number(41, 40 | 1 << 32, 1, 0)",
        "by_number(41 | 0x40000000, 40, 1, 0)",
        "in_32_bits(359, 40, 1)",
        "in_32_bits(102, 1, 0)",
        "in_32_bits(359, 1, 1)",
    )
    upper, x32, direct, in_memory, allowed = _asked(*questions)
    assert (upper, direct, in_memory) == ("EAFNOSUPPORT", "EAFNOSUPPORT", "ENOSYS")
    assert x32 in {"EAFNOSUPPORT", "ENOSYS"}
    assert allowed in {"done", "ENOSYS"}


@pytest.mark.skipif(os.geteuid() != 0, reason="agents of tests may gain privileges, so only root may filter calls")
async def test_programs_of_every_identity_have_the_filter(any_agent: Agent) -> None:
    done = await any_agent.sh("grep Seccomp: /proc/self/status")
    assert done.text.split() == ["Seccomp:", "2"]
