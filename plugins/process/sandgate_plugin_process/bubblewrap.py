"""Isolation by bubblewrap: namespaces of its own and a read-only system.

Two forms, by who runs the gateway:

* root: bubblewrap runs as real root and makes no user namespace; the entrance (``enter.py``) then moves into one with
  ids of its own. The namespaces stay the property of the host's root, so root of the sandbox cannot mount or unmount
  anything in them, and is nobody on the host.
* anybody else: bubblewrap makes a user namespace in which the gateway's user is root. There is one id only; the agent
  runs commands of `user` in a further namespace (`nested` identity). It keeps no CAP_SYS_ADMIN, so it cannot mount
  either.

Options: bwrap(1). Namespaces: user_namespaces(7), pid_namespaces(7).
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from sandgate_errors import FailedPrecondition, ResourceExhausted
from sandgate_plugin_process import rootfs
from sandgate_plugin_process.boxes import Box, Record
from sandgate_plugin_process.grounds import shown
from sandgate_plugin_process.isolation import interpreter
from sandgate_plugin_process.pids import ProcessId, end, end_all, marked_by, names_itself, tree
from sandgate_plugin_process.removal import remove_tree
from sandgate_plugin_process.starting import Descriptor, Joining, Program, Started, start

__all__ = ["Bubblewrap"]

# The range that systemd sets aside for containers, in pieces of 65536: 524288 to 1879048191. Below 2^31, which some
# programs still take for negative.
_FIRST_BASE = 524288
_IDS = 65536
_SLOTS = 28000

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_AGENT = "/run/sandgate/agent"
_PYTHON = "/run/sandgate/python"
_SOCKETS = "/run/sandgate/socket"
_SUDO = "/run/sandgate"

# As root: for the entrance's helper, which writes the id maps.
_ROOT_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID")
# In a user namespace: what root of a sandbox needs for files and accounts. Of these the kernel grants each only over
# what belongs to the namespace. Never CAP_SYS_ADMIN.
_USER_CAPABILITIES = (
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    # To read what a command's processes are known by.
    "CAP_SYS_NICE",
)
# What making, reaching and removing things of other ids takes, with the kernel's numbers (capability.h).
_NEEDED_AS_ROOT = {
    "CAP_CHOWN": 0,
    "CAP_DAC_OVERRIDE": 1,
    "CAP_FOWNER": 3,
    "CAP_KILL": 5,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_NET_ADMIN": 12,
    "CAP_SYS_ADMIN": 21,
}
_CHECK_LIMIT_SECONDS = 30.0
_OTHERWISE = "or start with `--isolation none`, which separates nothing"


class Bubblewrap:
    """See the module."""

    name = "bubblewrap"
    can_cut_network = True
    can_copy_files = True
    starts_in_group = True

    def __init__(self, program: str | None) -> None:
        self._wanted = program
        self._as_root = os.geteuid() == 0

    @property
    def identity(self) -> str:
        return "switch" if self._as_root else "nested"

    @cached_property
    def _program(self) -> str:
        found = shutil.which(self._wanted or "bwrap")
        if found is None:
            what = f"'{self._wanted}' is no program" if self._wanted else "bubblewrap is not installed"
            raise FailedPrecondition(f"{what}: `apt-get install bubblewrap`, {_OTHERWISE}")
        return os.path.realpath(found)

    def version(self) -> str:
        """What the program calls itself. Raises FailedPrecondition when there is none."""
        done = subprocess.run([self._program, "--version"], capture_output=True, text=True, timeout=10, check=False)
        return done.stdout.strip() or done.stderr.strip()

    def describe(self) -> str:
        """How sandboxes are kept apart here, for the operator."""
        if self._as_root:
            return "works as root: each sandbox has user ids of its own"
        return "works without privileges: sandboxes share the gateway's user id, in namespaces of their own"

    def check(self, bundle: Path, private: Sequence[Path]) -> None:
        if self._as_root:
            _check_root()
        _check_places(private)
        folder = bundle.parent / "check"
        # One that was interrupted.
        remove_tree(folder)
        box = Box("check", folder, folder / "run")
        record = Record.fresh(
            sandbox_id="", isolation=self.name, bundle=bundle.name, base=self.base_for(set()), internet=False
        )
        try:
            box.runtime.mkdir(parents=True)
            self.furnish(box, record)
            done = self._run_check(box, record, bundle)
        finally:
            remove_tree(folder)
        if '"ready": true' not in done.stdout:
            said = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
            raise FailedPrecondition(f"bubblewrap does not work here ({said}): {_hint(said)}, {_OTHERWISE}")

    def _run_check(self, box: Box, record: Record, bundle: Path) -> subprocess.CompletedProcess[str]:
        entrance = ["probe", *self._entrance(record)]
        try:
            return subprocess.run(
                [self._program, *self._options(box, record, bundle), "--die-with-parent", *_python(), *entrance],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_CHECK_LIMIT_SECONDS,
                cwd="/",
                env={},
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise FailedPrecondition(f"bubblewrap hangs here: {_hint('')}, {_OTHERWISE}") from None

    def base_for(self, taken: set[int]) -> int | None:
        if not self._as_root:
            return None
        # At random, so that two gateways on one machine hardly ever share: they cannot see one another's boxes.
        start = random.randrange(_SLOTS)  # noqa: S311 - nobody gains from guessing it
        for step in range(_SLOTS):
            base = _FIRST_BASE + (start + step) % _SLOTS * _IDS
            if base not in taken:
                return base
        raise ResourceExhausted(f"there are {_SLOTS} sandboxes already, which is all the ids of this machine")

    def furnish(self, box: Box, record: Record) -> None:
        owners = rootfs.Owners(record.base)
        rootfs.build(box.rootfs, owners, internet=record.internet, shared=_mount_points(record))
        self._boot(box, owners)

    def mend(self, box: Box, record: Record) -> None:
        owners = rootfs.Owners(record.base)
        rootfs.mend(box.rootfs, owners, shared=_mount_points(record))
        self._boot(box, owners)

    def connect(self, box: Box, record: Record) -> None:
        rootfs.give_resolver(box.rootfs, rootfs.Owners(record.base))

    def _boot(self, box: Box, owners: rootfs.Owners) -> None:
        box.inner_socket_folder.mkdir(mode=0o700)
        owners.give(box.inner_socket_folder, 0)
        # The kernel's own would be the same for all sandboxes, and over a new start (C40).
        box.boot_id.unlink(missing_ok=True)
        box.boot_id.write_text(f"{uuid.uuid4()}\n")
        box.boot_id.chmod(0o444)

    def root(self, box: Box) -> Path:
        return box.rootfs

    def members(self, record: Record) -> list[ProcessId]:
        # Whoever loses its parent becomes a child of the namespace's first process.
        return tree([record.init]) if record.init is not None else []

    def processes_by_rlimit(self) -> str:
        if self._as_root:
            return "those of each account of a sandbox"
        # From that version on the kernel counts each user namespace for itself; before, all of the gateway's user.
        return "those of each sandbox" if _kernel() >= (5, 14) else ""

    def start(self, box: Box, record: Record, *, bundle: Path, joining: Joining, processes: int | None) -> Started:
        how: Sequence[str | Descriptor]
        entrance: Sequence[str | Descriptor] = ["--groups", Descriptor.GROUPS, *self._entrance(record)]
        how = ["--args", Descriptor.OPTIONS, "--info-fd", Descriptor.INFO, *_python(), *entrance]
        return start(
            Program(
                executable=self._program,
                # Shown in the list of processes, inside and outside: the mark instead of the options, which hold paths.
                argv=[record.mark, *how],
                options=b"".join(os.fsencode(option) + b"\0" for option in self._options(box, record, bundle)),
            ),
            first_line={
                "listen": f"unix:{_SOCKETS}/agent.sock",
                "token": record.token,
                "identity": self.identity,
                "system_files": True,
                "sudo": _SUDO,
                "network": "shared" if record.internet else "own",
                "measured": {name: target for name, (_, target) in shown(record.groups).items()},
                "processes": processes,
            },
            log=box.log,
            joining=joining,
        )

    def agent_is_up(self, box: Box) -> None:
        box.show_socket(seal=self._as_root)

    def end(self, record: Record) -> None:
        if record.init is not None and record.main is not None:
            # Once the kernel reports the end of a pid namespace's first process, all others in it are gone.
            end(record.init)
            end(record.main)
        else:
            # Started but never recorded: bubblewrap and the first process of its namespace both bear the mark.
            end_all(lambda: marked_by(names_itself(record.mark)))

    def _entrance(self, record: Record) -> list[str]:
        return [] if record.base is None else ["own-ids", str(record.base)]

    def _options(self, box: Box, record: Record, bundle: Path) -> list[str]:
        return [*self._namespaces(record), *self._mounts(box, record, bundle), *_environment()]

    def _namespaces(self, record: Record) -> Iterator[str]:
        yield from ("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox")
        if not record.internet:
            yield "--unshare-net"
        if not self._as_root:
            yield from ("--unshare-user", "--uid", "0", "--gid", "0")
        # Real root would keep every capability otherwise.
        yield from ("--cap-drop", "ALL")
        for capability in _ROOT_CAPABILITIES if self._as_root else _USER_CAPABILITIES:
            yield from ("--cap-add", capability)

    def _mounts(self, box: Box, record: Record, bundle: Path) -> Iterator[str]:
        yield from ("--bind", str(box.rootfs), "/")
        for source, target in sorted(set(shown(record.groups).values())):
            yield from ("--ro-bind", source, target)
        for source, target in _shared():
            # What is taken from the host's /etc is there if the host has it; it may lose it any time.
            yield from ("--ro-bind-try" if target.startswith("/etc/") else "--ro-bind", source, target)
        yield from ("--ro-bind", str(bundle), _AGENT)
        yield from ("--bind", str(box.inner_socket_folder), _SOCKETS)
        yield from ("--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--tmpfs", "/dev/shm")  # noqa: S108
        yield from ("--ro-bind", str(box.boot_id), "/proc/sys/kernel/random/boot_id")
        yield from ("--chdir", "/")


def _environment() -> Iterator[str]:
    """What the agent is started with; only PATH goes on to commands (P12, P13)."""
    yield from ("--setenv", "PATH", _PATH, "--setenv", "LANG", "C.UTF-8")
    if _foreign_python() is not None:
        # Its own library is looked for at the host's path, which does not exist in the sandbox.
        yield from ("--setenv", "LD_LIBRARY_PATH", f"{_PYTHON}/lib")


def _shared() -> Sequence[tuple[str, str]]:
    """(host path, path in the sandbox) of all that every sandbox sees of the host."""
    home = _foreign_python()
    if home is None:
        return rootfs.binds()
    # Not its whole folder: an interpreter may have been installed right into somebody's home.
    program = interpreter()
    return (
        *rootfs.binds(),
        (str(program), f"{_PYTHON}/bin/{program.name}"),
        (str(home / "lib"), f"{_PYTHON}/lib"),
    )


def _mount_points(record: Record) -> Sequence[tuple[str, str]]:
    """The same with the box's own groups, which need not exist yet: folders, as that of the gateway is."""
    groups = {(str(Path(source).parent), target) for source, target in shown(record.groups).values()}
    return (*_shared(), *sorted(groups))


def _kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])


def _foreign_python() -> Path | None:
    """The installation of the interpreter when the sandbox does not see it as part of /usr."""
    home = interpreter().parent.parent
    return None if home.is_relative_to("/usr") else home


def _python() -> list[str]:
    program = interpreter()
    inner = str(program) if _foreign_python() is None else f"{_PYTHON}/bin/{program.name}"
    return [inner, "-I", "-S", "-X", "utf8", _AGENT]


def _check_places(private: Sequence[Path]) -> None:
    """Raises FailedPrecondition when a folder of the gateway lies in what sandboxes see of the host.

    Without ids of its own a sandbox could read there whatever the gateway can: other sandboxes and their tokens.
    """
    for place in private:
        for source, _ in _shared():
            if place.resolve().is_relative_to(source):
                raise FailedPrecondition(f"{place} is in {source}, which every sandbox can see: choose another place")


def _check_root() -> None:
    """Raises FailedPrecondition when this root cannot give a sandbox ids of its own."""
    effective = next(
        int(line.split()[1], 16)
        for line in Path("/proc/self/status").read_text("ascii").splitlines()
        if line.startswith("CapEff:")
    )
    missing = [name for name, bit in _NEEDED_AS_ROOT.items() if not effective >> bit & 1]
    if missing:
        raise FailedPrecondition(
            f"root lacks {', '.join(missing)} here: run the gateway as an ordinary user, {_OTHERWISE}"
        )
    ends = _FIRST_BASE + _SLOTS * _IDS
    for kind in ("uid_map", "gid_map"):
        ranges = [tuple(map(int, line.split())) for line in Path(f"/proc/self/{kind}").read_text("ascii").splitlines()]
        if not any(first <= _FIRST_BASE and ends <= first + count for first, _, count in ranges):
            raise FailedPrecondition(
                f"root may not use the ids {_FIRST_BASE} to {ends - 1} here: "
                f"run the gateway as an ordinary user, {_OTHERWISE}"
            )


def _hint(said: str) -> str:
    """How to allow what failed."""
    if os.geteuid() == 0:
        if "namespace" in said:
            return "allow root to make namespaces (a container's seccomp profile often forbids it)"
        return "see docs/backends/process.md"
    switches = {
        "/proc/sys/kernel/unprivileged_userns_clone": ("0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        "/proc/sys/user/max_user_namespaces": ("0", "sysctl -w user.max_user_namespaces=15000"),
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
            "1",
            "give bwrap an AppArmor profile with `userns`, or sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    }
    for path, (off, mend) in switches.items():
        try:
            if Path(path).read_text("ascii").strip() == off:
                return mend
        except OSError:
            continue
    if "namespace" in said:
        return "allow unprivileged user namespaces (a container's seccomp profile often forbids them)"
    return "see docs/backends/process.md"
