"""Whether a sandbox may be made: the request against the rules, the template and what its backend offers.

Everything here is decided before anything is written or made. What the backend or this version of the gateway cannot do
is refused by name; nothing is accepted and ignored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from sandgate_core import clock
from sandgate_core.records import NetworkRules
from sandgate_errors import CapabilityMissing, InvalidArgument, NotFound, Unavailable, Unimplemented
from sandgate_plugin_api import Backend, Capability, Template

__all__ = ["Admission", "Admitted", "CreateSpec"]

_SHORTEST_LIFE = clock.MICROSECONDS
_LONGEST_TEMPLATE_NAME = 256
#: Metadata stays in memory for a sandbox's life and comes with every answer about it, a hundred times in one page of a list.
_MOST_METADATA_PAIRS = 256
_MOST_METADATA_BYTES = 64 * 1024
#: Bytes of `name=value`. The kernel starts no program with a longer one, the NUL at its end included.
_LONGEST_ENV = 128 * 1024 - 1
#: Half of what the kernel takes for a program's arguments and variables together, by its own count: of each variable also
#: the `=`, the NUL and a pointer.
_MOST_ENV_BYTES = 1024 * 1024
_BYTES_BESIDE_ENV = 10
#: Seconds. Listing templates is meant to be cheap.
_TEMPLATES_PATIENCE = 10.0
#: What the core has a way to pass on to a backend.
_OFFERED = frozenset({Capability.NO_INTERNET, Capability.PAUSE, Capability.PAUSE_FILESYSTEM})


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
    template: Template
    alias: str


class Admission:
    """The rules of one deployment."""

    def __init__(self, backends: Mapping[str, Backend], *, default_backend: str) -> None:
        self._backend = backends[default_backend]

    async def admit(self, spec: CreateSpec, *, longest_life: int) -> Admitted:
        """``longest_life`` in microseconds. Raises InvalidArgument, CapabilityMissing, Unimplemented or NotFound."""
        _check_request(spec, max_timeout=longest_life)
        _check_metadata(spec.metadata)
        _check_envs(spec.envs)
        template = await self.template(spec.template)
        for capability in _needed(spec):
            _check_capability(self._backend, capability)
        alias = spec.template if spec.template in template.aliases else next(iter(template.aliases), "")
        return Admitted(spec=spec, backend=self._backend, template=template, alias=alias)

    async def names_of(self, template: str) -> frozenset[str]:
        """The template ids that ``template``, an id or a name, may stand for in a list."""
        found = _find(await self._templates(), template)
        return frozenset({template} if found is None else {template, found.id})

    async def template(self, name: str) -> Template:
        """The template of an id or a name. Raises InvalidArgument, NotFound."""
        if not name:
            raise InvalidArgument("a template must be named")
        if len(name) > _LONGEST_TEMPLATE_NAME:
            raise InvalidArgument(f"a template's name is at most {_LONGEST_TEMPLATE_NAME} characters")
        found = _find(await self._templates(), name)
        if found is None:
            raise NotFound(f"template '{name}' not found")
        return found

    async def _templates(self) -> list[Template]:
        try:
            async with asyncio.timeout(_TEMPLATES_PATIENCE):
                return list(await self._backend.templates())
        except TimeoutError:
            raise Unavailable(f"backend '{self._backend.name}' does not say which templates exist") from None


def _find(templates: list[Template], name: str) -> Template | None:
    by_id = (template for template in templates if template.id == name)
    by_alias = (template for template in templates if name in template.aliases)
    return next(by_id, None) or next(by_alias, None)


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
    if spec.network is not None and spec.network.allow_public_traffic is False and not spec.secure:
        raise InvalidArgument("allowPublicTraffic false needs a secured sandbox")


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


def _needed(spec: CreateSpec) -> list[Capability]:
    needed: list[Capability] = []
    if not spec.allow_internet_access:
        needed.append(Capability.NO_INTERNET)
    if spec.network is not None:
        needed.append(Capability.NETWORK_RULES)
    if spec.pause_on_timeout:
        needed.append(Capability.PAUSE if spec.pause_memory else Capability.PAUSE_FILESYSTEM)
    if spec.auto_resume:
        needed.append(Capability.PAUSE)
    return needed


def _check_capability(backend: Backend, capability: Capability) -> None:
    if capability not in backend.capabilities:
        raise CapabilityMissing.of(backend.name, capability.value)
    if capability not in _OFFERED:
        raise Unimplemented(f"this version of the gateway does not offer {capability.value}")
