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
#: Of each backend whose sandboxes are containers: what it calls itself stands in its state directory, and in this label.
_LABELS = {_STATE: _LABEL, "backends/opensandbox": "sandgate-gateway"}


@dataclass(frozen=True, kw_only=True)
class Containers:
    """Says what the template `base` is, and has the agent's bundle ready, as its making would take each gateway seconds."""

    image: str
    #: A folder that ``make_portable`` made with the backend's entrance.
    bundle: Path
    #: More lines of the backend's table.
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
    for label in _labels(state_dir):
        for network in docker("network", "ls", "-q", "--filter", f"label={label}").stdout.split():
            docker("network", "rm", network, check=False)


def containers_of(state_dir: Path) -> Mapping[str, str]:
    """Sandboxes to the names of their containers, which end with the sandbox's where no label has it."""
    form = '{{.Names}} {{.Label "sandgate-sandbox"}}'
    found = {}
    for label in _labels(state_dir):
        for line in docker("ps", "-a", "--format", form, "--filter", f"label={label}").stdout.splitlines():
            name, _, sandbox = line.partition(" ")
            found[sandbox.strip() or name.rpartition("-")[2]] = name
    return found


def agent_token_on_engine(state_dir: Path, sandbox_id: str) -> str:
    """What opens the agent of a sandbox; computed, as nothing holds it."""
    from sandgate_plugin_docker.boxes import Identity

    return Identity.of(state_dir / _STATE).token(sandbox_id)


def _found(state_dir: Path) -> Iterator[tuple[str, str]]:
    for label in _labels(state_dir):
        for kind, listing in {
            "container": ("ps", "-a", "--format", "{{.Names}}"),
            "image": ("image", "ls", "--format", "{{.ID}}"),
            "volume": ("volume", "ls", "--format", "{{.Name}}"),
        }.items():
            yield from ((kind, name) for name in docker(*listing, "--filter", f"label={label}").stdout.split())


def _labels(state_dir: Path) -> Iterator[str]:
    """What marks all that the gateway has on the engine; none for one whose sandboxes are no containers."""
    for state, label in _LABELS.items():
        known = state_dir / state / "gateway.json"
        if known.exists():
            yield f"{label}={json.loads(known.read_text())['id']}"
