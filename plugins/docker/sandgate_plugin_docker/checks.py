"""Whether an engine can do what the configuration asks, found out before the first sandbox; and what ``doctor`` says."""

from __future__ import annotations

import asyncio
import grp
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from sandgate_errors import FailedPrecondition, SandgateError
from sandgate_plugin_docker.engine import Details, Engine, Refused
from sandgate_plugin_docker.firewall import Firewall
from sandgate_plugin_docker.images import full_reference
from sandgate_plugin_docker.settings import DockerSettings, TemplateSettings
from sandgate_plugin_docker.templates import configured

__all__ = ["cannot_limit_disks", "check_engine", "check_templates", "diagnose", "how_to_reach"]

_DOCTOR_LIMIT = 5.0
#: What the engine and Python call the same processor.
_PROCESSORS = {"amd64": "x86_64", "arm64": "aarch64"}


def how_to_reach(address: str) -> str:
    """What an operator can do about an engine that does not answer; empty where that cannot be seen from here."""
    path = Path(address.removeprefix("unix://"))
    if not address.startswith("unix://"):
        return ""
    if not path.exists():
        return ": nothing is there, start the engine or give its address as 'host'"
    if not os.access(path, os.R_OK | os.W_OK):
        try:
            group = grp.getgrgid(path.stat().st_gid).gr_name
        except (KeyError, OSError):
            group = "docker"
        return f": this user may not use it, make it a member of the group '{group}'"
    return ""


def check_engine(info: Details) -> None:
    """Raises FailedPrecondition for an engine on which no agent could run."""
    if info.get("OSType") != "linux":
        raise FailedPrecondition("the container engine does not run Linux containers")
    theirs = _PROCESSORS.get(str(info.get("Architecture")), str(info.get("Architecture")))
    if theirs != platform.machine():
        raise FailedPrecondition(
            f"the engine's host is {theirs} and the gateway's {platform.machine()}: agents run the gateway's own interpreter"
        )


def check_templates(info: Details, templates: Mapping[str, TemplateSettings]) -> None:
    """Raises FailedPrecondition for a template whose limits or runtime the engine cannot keep."""
    for name, settings in templates.items():
        runtimes = info.get("Runtimes") or {}
        if settings.runtime is not None and settings.runtime not in runtimes:
            raise FailedPrecondition(
                f"template '{name}': the engine has no runtime '{settings.runtime}'; it has {', '.join(sorted(runtimes))}"
            )
        for key, able in (("memory_mb", "MemoryLimit"), ("cpu_count", "CpuCfsQuota"), ("pids", "PidsLimit")):
            if getattr(settings, key) is not None and info.get(able) is False:
                raise FailedPrecondition(f"template '{name}': the kernel of the engine's host cannot keep '{key}'")
        if settings.cpu_count is not None and settings.cpu_count > int(info["NCPU"]):
            raise FailedPrecondition(f"template '{name}': the engine's host has {info['NCPU']} CPUs only")
        if settings.disk_size_mb is not None and not _may_limit_disks(info):
            raise FailedPrecondition(f"template '{name}': {cannot_limit_disks(info)}")


def _may_limit_disks(info: Details) -> bool:
    """Whether it is worth a try: on xfs the mount option decides, which shows at the first container only."""
    driver = str(info.get("Driver"))
    if driver in {"overlay2", "vfs", "fuse-overlayfs"}:
        return ["Backing Filesystem", "xfs"] in [list(pair) for pair in info.get("DriverStatus") or ()]
    return driver in {"btrfs", "zfs", "devicemapper"}


def cannot_limit_disks(info: Details) -> str:
    """One line that says what it takes."""
    return (
        f"the engine's storage driver '{info.get('Driver')}' cannot keep 'disk_size_mb': "
        "it takes overlay2 on xfs mounted with pquota, btrfs or zfs"
    )


def diagnose(settings: DockerSettings) -> Sequence[tuple[str, bool, str]]:
    """The rows of ``sandgate doctor``. Blocks."""
    return asyncio.run(_diagnose(settings))


async def _diagnose(settings: DockerSettings) -> Sequence[tuple[str, bool, str]]:
    try:
        engine = Engine.connect(settings)
    except FailedPrecondition as error:
        return (("engine", False, error.message),)
    try:
        async with asyncio.timeout(_DOCTOR_LIMIT):
            info = await engine.info()
            check_engine(info)
            templates = await _templates(settings, engine, info)
    except (SandgateError, Refused, TimeoutError) as error:
        how = error.message if isinstance(error, SandgateError | Refused) else "it does not answer"
        return (("engine", False, f"{engine.address}: {how}{how_to_reach(engine.address)}"),)
    finally:
        await engine.close()
    about = f"{info.get('ServerVersion')} at {engine.address}, {info.get('Driver')}, control groups {info.get('CgroupVersion', '1')}"
    reason = Firewall.why_not(engine.is_local) if settings.firewall else "switched off by 'firewall'"
    rules = "sandboxes are kept from private networks and this host" if reason is None else f"not kept: {reason}"
    return (
        ("engine", True, about),
        ("agents", True, _agents(settings, engine)),
        ("private networks", True, rules),
        *templates,
    )


async def _templates(settings: DockerSettings, engine: Engine, info: Details) -> Sequence[tuple[str, bool, str]]:
    rows = []
    for name, template in configured(settings).items():
        try:
            check_templates(info, {name: template})
        except FailedPrecondition as error:
            rows.append((f"template '{name}'", False, error.message.removeprefix(f"template '{name}': ")))
            continue
        here = await engine.image(full_reference(template.image)) is not None
        able = here or settings.pull != "never"
        state = "is here" if here else "is fetched at its first use" if able else "is not here, and 'pull' is \"never\""
        rows.append((f"template '{name}'", able, f"the image {template.image} {state}"))
    return rows


def _agents(settings: DockerSettings, engine: Engine) -> str:
    if settings.agents == "port" or not engine.is_local:
        return f"reached by ports of {settings.agent_host or engine.host}, by TLS"
    return "reached by sockets of this machine"
