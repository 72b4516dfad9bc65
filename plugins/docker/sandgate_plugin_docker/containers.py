"""How a container is furnished, and what it may not do: the configuration that the engine makes it from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sandgate_bundle import MOUNT, UNSET, Bundle
from sandgate_plugin_docker.templates import Model

__all__ = ["AGENT_PORT", "HELPER_LABEL", "LABEL", "NAME_LABEL", "READ_ONLY_FOLDERS", "Way", "configuration", "labels"]

#: In front of the name of each label.
LABEL = "sandgate."
#: The name that was asked for.
NAME_LABEL = f"{LABEL}name"
#: Of containers that are made to read an image or to fill a volume, and never started: whose they are.
HELPER_LABEL = f"{LABEL}helper"
#: What agents listen on where they are reached by a port; the same number as E2B's.
AGENT_PORT = 49983
#: What the agent needs to act for several accounts, and what root of a usual system expects. Not among them: NET_RAW
#: (forged packets on the network), MKNOD (devices), SETPCAP and AUDIT_WRITE.
_CAPABILITIES = (
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "NET_BIND_SERVICE",
    "SETGID",
    "SETUID",
    "SYS_CHROOT",
)
#: For programs of the image that change who they are, as its own sudo.
_MORE_CAPABILITIES = ("AUDIT_WRITE", "SETPCAP")
#: Where a root file system that cannot be written has memory instead: folder -> options.
READ_ONLY_FOLDERS = {
    "/tmp": "rw,nosuid,nodev,exec,mode=1777",  # noqa: S108 - the sandbox's own
    "/var/tmp": "rw,nosuid,nodev,exec,mode=1777",  # noqa: S108 - the sandbox's own
    "/run": "rw,nosuid,nodev,exec,mode=755",
}
#: Where it has a disk all the same, which stays when the container is stopped and goes with it.
_READ_ONLY_DISK = "/home/user"
#: What agent and first program write, kept by the engine: bounded, as nobody reads much of it.
_LOG = {"Type": "json-file", "Config": {"max-size": "1m", "max-file": "1"}}


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the agent of a container is reached."""

    #: Arguments of its first program.
    arguments: tuple[str, ...] = ()
    #: (source, place in the container): folders and files of the engine's host, read-only.
    binds: tuple[tuple[str, str], ...] = ()
    #: (volume, place), read-only.
    volumes: tuple[tuple[str, str], ...] = ()
    #: The address of the engine's host on which the agent's port is opened; None: it has none.
    port_on: str | None = None


def labels(*, gateway: str, template: str, box: str, name: str) -> dict[str, str]:
    """What makes a container ours, and known again after a crash. The sandbox's id is in its name, which can change.

    ``name``: one that was asked for; the box of such a container is named after its sandbox. Empty: its name is ours.
    """
    found = {f"{LABEL}gateway": gateway, f"{LABEL}template": template, f"{LABEL}box": box}
    return {**found, NAME_LABEL: name} if name else found


def configuration(
    model: Model, *, image: str, bundle: Bundle, way: Way, network: str, labels: Mapping[str, str]
) -> dict[str, Any]:
    """The body of the engine's request to make a container."""
    by_port = way.port_on is not None
    config: dict[str, Any] = {
        "Image": image,
        "Entrypoint": bundle.command(*way.arguments),
        "Cmd": [],
        # Root of the container only: it acts for several accounts.
        "User": "0:0",
        "WorkingDir": "/",
        # A name without a value is taken away. The agent keeps of the image's variables only the PATH, so that none of
        # them reaches into its interpreter or loader; commands get them all by way of the template.
        "Env": sorted({*UNSET, *model.image.envs} - {"PATH"}),
        "Labels": dict(labels),
        "Hostname": "sandbox",
        # The image's idea of health is about what would run in it otherwise.
        "Healthcheck": {"Test": ["NONE"]},
        "StopSignal": "SIGTERM",
        "OpenStdin": by_port,
        "StdinOnce": by_port,
        "AttachStdin": by_port,
        "HostConfig": _host_config(model, way=way, network=network),
    }
    if by_port:
        config["ExposedPorts"] = {f"{AGENT_PORT}/tcp": {}}
    return config


def _host_config(model: Model, *, way: Way, network: str) -> dict[str, Any]:
    settings = model.settings
    given = [
        _mount(mount.source, mount.target, volume=not mount.source.startswith("/"), read_only=mount.read_only)
        for mount in settings.mounts
    ]
    host: dict[str, Any] = {
        "NetworkMode": network,
        "Mounts": [*_read_only(way.binds, volume=False), *_read_only(way.volumes, volume=True), *given],
        "ReadonlyRootfs": settings.read_only,
        "CapDrop": ["ALL"],
        "CapAdd": [*_CAPABILITIES, *(_MORE_CAPABILITIES if settings.set_user_id else ())],
        # The engine's own seccomp profile holds besides, as nothing here says otherwise.
        "SecurityOpt": [] if settings.set_user_id else ["no-new-privileges"],
        "RestartPolicy": {"Name": "no"},
        "LogConfig": _LOG,
        "IpcMode": "private",
        "PidsLimit": settings.pids,
    }
    if settings.cpu_count is not None:
        host["NanoCpus"] = settings.cpu_count * 10**9
    if settings.memory_mb is not None:
        host["Memory"] = host["MemorySwap"] = settings.memory_mb * 2**20
    if settings.disk_size_mb is not None:
        host["StorageOpt"] = {"size": f"{settings.disk_size_mb}m"}
    if settings.runtime is not None:
        host["Runtime"] = settings.runtime
    if settings.read_only:
        host["Tmpfs"] = READ_ONLY_FOLDERS
        host["Mounts"].append({"Type": "volume", "Target": _READ_ONLY_DISK})
    if way.port_on is not None:
        host["PortBindings"] = {f"{AGENT_PORT}/tcp": [{"HostIp": way.port_on, "HostPort": ""}]}
    return host


def _read_only(pairs: Iterable[tuple[str, str]], *, volume: bool) -> list[dict[str, Any]]:
    return [_mount(source, target, volume=volume, read_only=True) for source, target in pairs]


def _mount(source: str, target: str, *, volume: bool, read_only: bool) -> dict[str, Any]:
    mount: dict[str, Any] = {
        "Type": "volume" if volume else "bind",
        "Source": source,
        "Target": target,
        "ReadOnly": read_only,
    }
    if volume:
        # What the image has in that place is not to be copied into it.
        mount["VolumeOptions"] = {"NoCopy": True}
    return mount


assert MOUNT.startswith("/run/sandgate/"), "settings keep mounts of templates away from there"  # noqa: S101
