"""Gateways under test that make their sandboxes on a container engine: what they are told, and what they leave on it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandgate_testing.engine import docker

__all__ = ["Containers", "agent_token_on_engine", "containers_of", "remains_on_engine", "remove_from_engine"]

_STATE = "backends/docker"
_LABEL = "sandgate.gateway"


@dataclass(frozen=True, kw_only=True)
class Containers:
    """Says what the template `base` is, and has the agent's bundle ready, as its making would take each gateway seconds."""

    image: str
    #: A folder that ``make_portable`` made with the backend's entrance.
    bundle: Path
    #: More lines of the table ``[backends.docker]``.
    settings: Sequence[str] = ()

    def prepare(self, state_dir: Path) -> None:
        """Put the bundle where the gateway will look for it, if it is not there."""
        target = state_dir / _STATE / self.bundle.name
        if not target.exists():
            state_dir.mkdir(mode=0o700, exist_ok=True)
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.copytree(self.bundle, target, copy_function=os.link)

    def options(self, folder: Path) -> list[str]:
        """Of ``sandgate serve``; the file that they name is written to ``folder``."""
        lines = ["[backends.docker]", 'pull = "never"', *self.settings]
        lines += ["[backends.docker.templates.base]", f'image = "{self.image}"']
        config = folder / "config.toml"
        config.write_text("\n".join(lines) + "\n")
        return ["--backend", "docker", "--config", str(config)]


def remains_on_engine(state_dir: Path) -> list[str]:
    """One line for each container, image and volume of the gateway. Its network stays, like its state directory."""
    return [f"{kind} {name}" for kind, name in _found(state_dir)]


def remove_from_engine(state_dir: Path) -> None:
    """By force. For the end of a test, whatever became of its gateway."""
    removals = {"container": ("rm", "-f", "-v"), "image": ("rmi", "-f"), "volume": ("volume", "rm", "-f")}
    for kind, name in _found(state_dir):
        docker(*removals[kind], name, check=False)
    for gateway in _ids(state_dir):
        for network in docker("network", "ls", "-q", "--filter", f"label={_LABEL}={gateway}").stdout.split():
            docker("network", "rm", network, check=False)


def containers_of(state_dir: Path) -> Mapping[str, str]:
    """Sandboxes to the names of their containers."""
    names = [name for kind, name in _found(state_dir) if kind == "container"]
    return {name.rpartition("-")[2]: name for name in names}


def agent_token_on_engine(state_dir: Path, sandbox_id: str) -> str:
    """What opens the agent of a sandbox; computed, as nothing holds it."""
    from sandgate_plugin_docker.boxes import Identity

    return Identity.of(state_dir / _STATE).token(sandbox_id)


def _found(state_dir: Path) -> Iterator[tuple[str, str]]:
    for gateway in _ids(state_dir):
        label = ("--filter", f"label={_LABEL}={gateway}")
        for kind, listing in {
            "container": ("ps", "-a", "--format", "{{.Names}}"),
            "image": ("image", "ls", "--format", "{{.ID}}"),
            "volume": ("volume", "ls", "--format", "{{.Name}}"),
        }.items():
            yield from ((kind, name) for name in docker(*listing, *label).stdout.split())


def _ids(state_dir: Path) -> Iterator[str]:
    """None for a gateway of another backend."""
    known = state_dir / _STATE / "gateway.json"
    if known.exists():
        yield json.loads(known.read_text())["id"]
