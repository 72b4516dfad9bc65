"""Whether a sandbox may be made: the request against the rules, the template and what its backend offers.

Everything here is decided before anything is written or made. What the backend cannot do is refused by name; nothing is
accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sandgate_core import clock
from sandgate_core.egress import check_rules, egress_of, needed_for
from sandgate_core.ingress import check_ingress
from sandgate_core.records import NetworkRules
from sandgate_core.templates import Templates
from sandgate_errors import CapabilityMissing, InvalidArgument
from sandgate_plugin_api import Backend, Capability, Template

__all__ = ["Admission", "Admitted", "CreateSpec"]

_SHORTEST_LIFE = clock.MICROSECONDS
#: Metadata stays in memory for a sandbox's life and comes with every answer about it, a hundred times in one page of a list.
_MOST_METADATA_PAIRS = 256
_MOST_METADATA_BYTES = 64 * 1024
#: Bytes of `name=value`. The kernel starts no program with a longer one, the NUL at its end included.
_LONGEST_ENV = 128 * 1024 - 1
#: Half of what the kernel takes for a program's arguments and variables together, by its own count: of each variable also
#: the `=`, the NUL and a pointer.
_MOST_ENV_BYTES = 1024 * 1024
_BYTES_BESIDE_ENV = 10


@dataclass(frozen=True, kw_only=True)
class CreateSpec:
    """What a caller asked for."""

    template: str
    #: Microseconds.
    timeout: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    envs: Mapping[str, str] = field(default_factory=dict, repr=False)
    secure: bool = False
    allow_internet_access: bool = True
    pause_on_timeout: bool = False
    pause_memory: bool = True
    auto_resume: bool = False
    network: NetworkRules | None = None
    #: The client's key, by which a repeated request is known; None: every request is another one (C60).
    idempotency_key: str | None = None
    #: What the whole request was, for a comparison with a repeated one.
    digest: str | None = None


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """A request that may go through, and with what."""

    spec: CreateSpec
    backend: Backend
    #: As the backend knows it.
    template: Template
    #: As clients know it.
    template_id: str
    alias: str
    #: What to start from instead of the template's files.
    snapshot: Mapping[str, object] | None = None
    #: What policy calls it, for the backend; see :attr:`sandgate_plugin_api.SandboxRequest.name`.
    name: str = ""
    #: Seconds that the backend and its agent may take at most; None: what is left of the create's time.
    start_timeout: float | None = None


class Admission:
    """The rules of one deployment."""

    def __init__(self, templates: Templates) -> None:
        self._templates = templates

    async def admit(self, spec: CreateSpec, *, owner: str, longest_life: int, patience: float) -> Admitted:
        """``longest_life`` in microseconds, ``patience`` in seconds.

        Raises InvalidArgument, CapabilityMissing, Unimplemented, NotFound, FailedPrecondition or Unavailable.
        """
        _check_request(spec, max_timeout=longest_life)
        _check_metadata(spec.metadata)
        _check_envs(spec.envs)
        found = await self._templates.find(spec.template, owner=owner, patience=patience)
        for capability in _needed(spec, from_snapshot=found.snapshot is not None):
            _check_capability(found.backend, capability)
        return Admitted(
            spec=spec,
            backend=found.backend,
            template=found.template,
            template_id=found.id,
            alias=found.alias,
            snapshot=found.snapshot,
        )


def _check_request(spec: CreateSpec, *, max_timeout: int) -> None:
    if spec.timeout < _SHORTEST_LIFE:
        raise InvalidArgument("timeout must be at least one second")
    if spec.timeout > max_timeout:
        raise InvalidArgument(f"timeout must be at most {max_timeout // clock.MICROSECONDS} seconds")
    if not spec.pause_memory and not spec.pause_on_timeout:
        raise InvalidArgument(
            "a pause without memory (autoPauseMemory) needs the sandbox to pause at its end (autoPause)"
        )
    if not spec.pause_memory and spec.auto_resume:
        raise InvalidArgument("a pause without memory (autoPauseMemory) cannot be combined with autoResume")
    rules = spec.network or NetworkRules()
    check_rules(allow=rules.allow_out, deny=rules.deny_out, internet=spec.allow_internet_access)
    check_ingress(rules, secure=spec.secure)


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > _MOST_METADATA_PAIRS:
        raise InvalidArgument(f"metadata may have at most {_MOST_METADATA_PAIRS} pairs")
    if sum(_bytes_of(key) + _bytes_of(value) for key, value in metadata.items()) > _MOST_METADATA_BYTES:
        raise InvalidArgument(
            f"metadata may have at most {_MOST_METADATA_BYTES} bytes in all, keys and values together"
        )


def _check_envs(envs: Mapping[str, str]) -> None:
    for name, value in envs.items():
        if not name or "=" in name or "\0" in name:
            raise InvalidArgument(
                "the name of an environment variable must not be empty or hold '=' or a NUL character"
            )
        if "\0" in value:
            raise InvalidArgument("the value of an environment variable must not hold a NUL character")
    sizes = [_bytes_of(name) + _bytes_of(value) for name, value in envs.items()]
    if max(sizes, default=0) + len("=") > _LONGEST_ENV:
        raise InvalidArgument(f"an environment variable (envs) may have at most {_LONGEST_ENV} bytes as name=value")
    if sum(sizes) + _BYTES_BESIDE_ENV * len(sizes) > _MOST_ENV_BYTES:
        raise InvalidArgument(
            f"environment variables (envs) may have at most {_MOST_ENV_BYTES} bytes in all, "
            f"with {_BYTES_BESIDE_ENV} more counted for each"
        )


def _bytes_of(text: str) -> int:
    return len(text.encode())


def _needed(spec: CreateSpec, *, from_snapshot: bool) -> list[Capability]:
    needed: list[Capability] = []
    if from_snapshot:
        needed.append(Capability.SNAPSHOT)
    if (of_rules := needed_for(egress_of(spec.network, internet=spec.allow_internet_access))) is not None:
        needed.append(of_rules)
    if spec.pause_on_timeout:
        needed.append(Capability.PAUSE if spec.pause_memory else Capability.PAUSE_FILESYSTEM)
    if spec.auto_resume:
        needed.append(Capability.PAUSE)
    return needed


def _check_capability(backend: Backend, capability: Capability) -> None:
    if capability not in backend.capabilities:
        raise CapabilityMissing.of(backend.name, capability.value)
