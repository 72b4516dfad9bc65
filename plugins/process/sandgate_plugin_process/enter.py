"""The first program of a sandbox: takes the ids that the sandbox has, then becomes the agent in the same interpreter.

The backend starts ``python <bundle> [how]``; this file is the bundle's ``__main__.py``. ``how`` is one of:

``own-ids BASE``
    The gateway runs as root. This process is real root with CAP_SETUID and CAP_SETGID in namespaces that the host's
    root owns. It moves into a user namespace of 65536 ids of its own that begin at BASE outside, and becomes id 0
    there: root of the sandbox is nobody on the host, and the mount namespace stays out of its reach, as that belongs
    to the user namespace it has left.
``keep``
    There is no pid namespace. This process adopts whatever the agent's processes leave behind and ends it all when
    the agent ends.
(nothing)
    bubblewrap has made a user namespace already.

``probe`` in front of it does all that, loads gRPC and ends before the agent would start.

Before any of these may stand options with descriptors, separated by commas, of files that move whoever writes to them into
a control group: ``--join`` has this process move before it forks, ``--groups`` are the agent's.

Runs before anything of the sandbox's user, with nothing but the standard library, and forks only before gRPC is loaded.
"""

from __future__ import annotations

import os
import sys

__all__: list[str] = []

_CLONE_NEWUSER = 0x10000000
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_IDS = 65536
# Limits of the present user namespace (namespaces(7)), and into how many parts one account's share divides the host's. They
# count for whoever started the sandboxes, over all of them: without a share, one program could leave nothing for others.
_LIMITS = "/proc/sys/user"
_SHARED_OUT = {"max_inotify_instances": 4, "max_inotify_watches": 2}
# keyctl(2) has no wrapper in the C library.
_SYS_KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219, "ppc64le": 271, "s390x": 280}
_KEYCTL_JOIN_SESSION_KEYRING = 1


def main() -> None:
    how = sys.argv[1:]
    _join(_descriptors(how, "--join"))
    # But for those: the pipe on which bubblewrap reported, and whatever else it may have left open.
    _close_all_but(_descriptors(how, "--groups"))
    probe = how[:1] == ["probe"]
    if probe:
        del how[0]
    if how[:1] == ["own-ids"]:
        _leave_keyring()
        _take_ids(int(how[1]))
    elif how == ["keep"]:
        _keep()
    else:
        _leave_keyring()
        if probe:
            _try_nested_user()
    if probe:
        # Of all that the agent needs, the part that can fail for want of a library of the system.
        import grpc.aio  # noqa: F401

        sys.stdout.write('{"ready": true}\n')
        return
    del sys.argv[1:]
    from sandgate_agent.__main__ import main as run_agent

    sys.exit(run_agent())


def _descriptors(how: list[str], option: str) -> list[int]:
    """Take an option out of the arguments."""
    if how[:1] != [option]:
        return []
    numbers = [int(number) for number in how[1].split(",") if number]
    del how[:2]
    return numbers


def _join(descriptors: list[int]) -> None:
    """Move this process into control groups. Fails with an OSError, which ends it: it must not run outside of them."""
    for descriptor in descriptors:
        os.write(descriptor, b"0")


def _close_all_but(descriptors: list[int]) -> None:
    first = 3
    for descriptor in sorted(descriptors):
        os.set_inheritable(descriptor, False)
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def _take_ids(base: int) -> None:
    """Move into a user namespace whose ids 0 to 65535 are BASE and following outside.

    The map of more than one id can only be written by somebody with CAP_SETUID outside, which the mover no longer
    has: a helper forked before the move does it.
    """
    mover = os.getpid()
    wait, go = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(go)
        _map_ids(mover, base, wait)
    os.close(wait)
    allowed = _allowed_by_host()
    _unshare_user()
    os.write(go, b"1")
    os.close(go)
    _, status = os.waitpid(helper, 0)
    if status != 0:
        sys.exit(f"the ids from {base} cannot be mapped")
    os.setresgid(0, 0, 0)
    os.setgroups([])
    os.setresuid(0, 0, 0)
    _show_itself()
    _limit_accounts(allowed)


def _allowed_by_host() -> dict[str, int]:
    """What one account of the sandbox may have. To be asked outside: the new namespace says nothing of the host's limits."""
    allowed = {}
    for name, parts in _SHARED_OUT.items():
        try:
            with open(f"{_LIMITS}/{name}") as file:
                allowed[name] = int(file.read()) // parts
        except (OSError, ValueError):
            # Of a kernel without it.
            continue
    return allowed


def _limit_accounts(allowed: dict[str, int]) -> None:
    """In the namespace of this process. No border against root in it, who may set it anew: it keeps programs modest."""
    for name, number in allowed.items():
        try:
            _write(f"{_LIMITS}/{name}", f"{number}\n")
        except OSError as error:
            sys.stderr.write(f"accounts may have any number of {name}: {error}\n")


def _show_itself() -> None:
    """A change of ids takes a process's own files in /proc away from it, and the agent writes to some of them."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def _map_ids(mover: int, base: int, wait: int) -> None:
    """The helper; does not return. Nothing is mapped when the mover has died before its move."""
    try:
        if os.read(wait, 1):
            for kind in ("gid_map", "uid_map"):
                _write(f"/proc/{mover}/{kind}", f"0 {base} {_IDS}\n")
            os._exit(0)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
    finally:
        os._exit(1)


def _try_nested_user() -> None:
    """What the agent does to run a command as `user`, in a child that is thrown away."""
    child = os.fork()
    if child == 0:
        try:
            _unshare_user()
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", "1000 0 1\n")
            os._exit(0)
        except OSError as error:
            sys.stderr.write(f"a second user namespace inside the first: {error}\n")
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if status != 0:
        sys.exit("the account of commands cannot be made")


def _keep() -> None:
    """Fork; the child goes on to become the agent, the parent stays and never returns."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    agent = os.fork()
    if agent == 0:
        return
    # The pipes are the agent's: their ends must be seen when the agent closes them.
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)
    status, agent_ended = 0, False
    while True:
        try:
            pid, ended = os.wait()
        except ChildProcessError:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        if pid == agent:
            status, agent_ended = ended, True
        if agent_ended:
            _kill_children()


def _kill_children() -> None:
    """The agent's orphans arrive here one generation after the other: each one waited for has left its children."""
    import signal

    this = str(os.getpid()).encode()
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = file.read().rpartition(b")")[2].split()[1]
        except OSError:
            continue
        if parent == this:
            # A child keeps its number until this process has waited for it.
            os.kill(int(name), signal.SIGKILL)


def _leave_keyring() -> None:
    """A session keyring of the sandbox's own: the inherited one may hold keys of the gateway's session."""
    import ctypes

    number = _SYS_KEYCTL.get(os.uname().machine)
    if number is not None:
        # Fails where the kernel has no keyrings or the system forbids the call: then there is nothing to leave.
        ctypes.CDLL(None).syscall(number, _KEYCTL_JOIN_SESSION_KEYRING, None)


def _unshare_user() -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUSER) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"unshare: {os.strerror(code)}")


def _write(path: str, text: str) -> None:
    """In one write, as the id maps demand."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main()
