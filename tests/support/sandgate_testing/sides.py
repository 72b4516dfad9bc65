"""The two gateways that every rule is tried on, and how a rule is written down: a probe, with what each side answers.

A probe is a function of one side. What it returns is compared with the pair that stands beside its rule: first what a ROCK
client may rely on, then what E2B's own rules say.
"""

from __future__ import annotations

import base64
import json
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sandgate_testing.gateway import Answer, Gateway

#: A key of a client that is not of E2B's form, as the file of the rock gateway has it.
FOREIGN_KEY = "rock/tenant-7:Zm9v+bar=="
#: Commands that the rock gateway has at a time; the profile's own number would take a thousand processes to reach.
COMMANDS = 6

Frames = list[dict[str, Any]]


@dataclass
class Side:
    """One gateway, spoken to as ROCK's clients do."""

    gateway: Gateway
    is_rock: bool
    _shared: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def shared(self) -> dict[str, Any]:
        """A sandbox for probes that leave it as it is."""
        if self._shared is None:
            self._shared = self.create(timeout=3600)
        return self._shared

    # Control plane

    def asked(self, body: Mapping[str, object], **headers: str) -> Answer:
        given = {"templateID": "base", "timeout": 300, **body}
        return self.gateway.rest("POST", "/sandboxes", given, headers=headers or None)

    def create(self, **body: object) -> dict[str, Any]:
        """As the SDK asks for one: secured, unless said otherwise."""
        answer = self.asked({"secure": True, **body})
        assert answer.status == 201, answer.body
        made: dict[str, Any] = answer.json()
        return made

    def detail(self, sandbox: Mapping[str, Any]) -> dict[str, Any]:
        answer = self.gateway.rest("GET", f"/sandboxes/{sandbox['sandboxID']}")
        assert answer.status == 200, answer.body
        found: dict[str, Any] = answer.json()
        return found

    def status_of(self, sandbox: Mapping[str, Any]) -> int:
        return self.gateway.rest("GET", f"/sandboxes/{sandbox['sandboxID']}").status

    def life(self, sandbox: Mapping[str, Any]) -> int:
        """Whole seconds from its start to its deadline."""
        detail = self.detail(sandbox)
        return round((moment(detail["endAt"]) - moment(detail["startedAt"])).total_seconds())

    def end_of(self, sandbox: Mapping[str, Any]) -> datetime:
        return moment(self.detail(sandbox)["endAt"])

    def set_timeout(self, sandbox: Mapping[str, Any], seconds: object) -> Answer:
        return self.gateway.rest("POST", f"/sandboxes/{sandbox['sandboxID']}/timeout", {"timeout": seconds})

    def kill(self, sandbox: Mapping[str, Any]) -> int:
        return self.gateway.rest("DELETE", f"/sandboxes/{sandbox['sandboxID']}").status

    def listed(self, query: str) -> list[str] | int:
        """Ids, sorted; or the status of a refusal."""
        answer = self.gateway.rest("GET", f"/v2/sandboxes{query}")
        return sorted(item["sandboxID"] for item in answer.json()) if answer.status == 200 else answer.status

    # Data plane

    def headers(self, sandbox: Mapping[str, Any], **more: str | None) -> dict[str, str]:
        given = {
            "E2b-Sandbox-Id": sandbox["sandboxID"],
            "E2b-Sandbox-Port": "49983",
            "X-Access-Token": sandbox.get("envdAccessToken", ""),
            **{name.replace("_", "-"): value for name, value in more.items()},
        }
        return {name: value for name, value in given.items() if value is not None}

    def agent(
        self, sandbox: Mapping[str, Any], method: str, path: str, body: bytes | None = None, **headers: str | None
    ) -> Answer:
        return self.gateway.call(method, path, body, headers=self.headers(sandbox, **headers))

    def rpc(self, sandbox: Mapping[str, Any], method: str, message: object, **headers: str | None) -> Any:
        """The reply's JSON, or the code of the error."""
        answer = self.agent(
            sandbox,
            "POST",
            f"/filesystem.Filesystem/{method}",
            json.dumps(message).encode(),
            **{"Content_Type": "application/json", **headers},
        )
        reply = answer.json()
        return reply if answer.status == 200 else reply["code"]

    def start(self, sandbox: Mapping[str, Any], command: str, **fields: Any) -> Frames | str:
        """The messages of a command; or the code of the error that its stream ended with."""
        frames, error = self.stream(sandbox, command, **fields)
        return error or frames

    def stream(
        self,
        sandbox: Mapping[str, Any],
        command: str,
        *,
        limit: str | None = "60000",
        process: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
        **fields: object,
    ) -> tuple[Frames, str | None]:
        answer = self.agent(
            sandbox,
            "POST",
            "/process.Process/Start",
            start_body(command, process=process, **fields),
            Content_Type="application/connect+json",
            Connect_Timeout_Ms=limit,
            **(headers or {}),
        )
        if answer.status != 200:
            return [], answer.json()["code"]
        *frames, end = envelopes(answer.body)
        return frames, end.get("error", {}).get("code")

    def output(self, sandbox: Mapping[str, Any], command: str, **fields: Any) -> str:
        frames, error = self.stream(sandbox, command, **fields)
        assert error is None, error
        pieces = [frame["event"]["data"].get("stdout", "") for frame in frames if "data" in frame["event"]]
        return b"".join(map(base64.b64decode, pieces)).decode()

    def upload(
        self, sandbox: Mapping[str, Any], *names: str, query: str = "", content: str = "x", **headers: str | None
    ) -> Answer:
        parts = "".join(
            f'--b\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n{content}\r\n'
            for name in names
        )
        return self.agent(
            sandbox,
            "POST",
            f"/files{query}",
            f"{parts}--b--\r\n".encode(),
            **{"Content_Type": "multipart/form-data; boundary=b", **headers},
        )


def start_body(command: str, *, process: Mapping[str, object] | None = None, **fields: object) -> bytes:
    """One Connect envelope with what the SDK sends for a command."""
    shell = {"cmd": "/bin/bash", "args": ["-l", "-c", command], **(process or {})}
    content = json.dumps({"process": shell, "stdin": False, **fields}).encode()
    return struct.pack(">BI", 0, len(content)) + content


def envelopes(body: bytes) -> Frames:
    found = []
    while body:
        (size,) = struct.unpack(">I", body[1:5])
        found.append(json.loads(body[5 : 5 + size]))
        body = body[5 + size :]
    return found


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def changes(probe: Callable[[], bool], *, patience: float) -> bool:
    """Whether it becomes true within ``patience`` seconds."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if probe():
            return True
        time.sleep(0.05)
    return False


@dataclass(frozen=True)
class Probe:
    """One promise of one rule."""

    rule: str
    promise: str
    run: Callable[[Side], Any]
    rock: Any
    plain: Any

    @property
    def name(self) -> str:
        return f"{self.rule}-{self.promise}"


PROBES: list[Probe] = []


def rule(
    number: int, promise: str, *, rock: Any, plain: Any
) -> Callable[[Callable[[Side], Any]], Callable[[Side], Any]]:
    """Writes a probe down with what it must return on each side."""

    def note(run: Callable[[Side], Any]) -> Callable[[Side], Any]:
        PROBES.append(Probe(f"K{number}", promise, run, rock, plain))
        return run

    return note


def same(number: int, promise: str, expected: Any) -> Callable[[Callable[[Side], Any]], Callable[[Side], Any]]:
    """A rule in which ROCK and E2B agree."""
    return rule(number, promise, rock=expected, plain=expected)
