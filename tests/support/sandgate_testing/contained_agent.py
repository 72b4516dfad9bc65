"""An agent in a container of its own, started from a portable bundle as a backend would; reached by its address."""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path

from sandgate_bundle import MOUNT, UNSET, Bundle
from sandgate_testing.agent_process import TOKEN, Agent
from sandgate_testing.engine import docker

__all__ = ["ContainedAgent"]

_PORT = 7777
_PASSWD = "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/:/bin/sh\n"
_GROUP = "root:x:0:\nuser:x:1000:\n"


class ContainedAgent(Agent):
    """``options`` go to ``docker run``. The image gets two accounts, `root` and `user`, by a mount."""

    def __init__(self, folder: Path, *, bundle: Bundle, image: str, options: Sequence[str] = ()) -> None:
        super().__init__("switch", folder, sudo=True)
        self.user = "user"
        self.home = Path("/")
        self.container = f"sandgate-test-{uuid.uuid4().hex[:12]}"
        self._bundle = bundle
        self._image = image
        self._options = options

    def _start(self) -> bytes:
        # A container's first process has no process above it that could give it a folder; so all is mounted.
        (self.folder / "passwd").write_text(_PASSWD)
        (self.folder / "group").write_text(_GROUP)
        program, *arguments = self._bundle.command()
        mounts = {
            str(self._bundle.path): MOUNT,
            f"{self.folder}/passwd": "/etc/passwd",
            f"{self.folder}/group": "/etc/group",
        }
        with open(self.folder / "log", "wb") as log:
            self.process = subprocess.Popen(
                [
                    *("docker", "run", "--rm", "-i", "--name", self.container, "--user", "0:0", "--workdir", "/"),
                    *(word for source, target in mounts.items() for word in ("-v", f"{source}:{target}:ro")),
                    *(word for name in UNSET for word in ("-e", name)),
                    *("--tmpfs", "/run/sandgate/sudo:exec,mode=755", *self._options),
                    *("--entrypoint", program, self._image, *arguments),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        settings = {"listen": f"0.0.0.0:{_PORT}", "token": TOKEN, "identity": "switch", "sudo": "/run/sandgate/sudo"}
        self.process.stdin.write(json.dumps(settings).encode() + b"\n")
        self.process.stdin.close()
        line = self.process.stdout.readline()
        address = docker("inspect", "-f", "{{.NetworkSettings.IPAddress}}", self.container, check=False).stdout.strip()
        self.target = f"{address}:{_PORT}"
        return line

    async def close(self) -> None:
        docker("rm", "-f", "-v", self.container, check=False)
        await super().close()
