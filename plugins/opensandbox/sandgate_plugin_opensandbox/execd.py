"""execd, OpenSandbox's own program in every sandbox: only what it takes to get our agent started by it.

Spoken to at the endpoint that the server reports. Its event streams call themselves SSE and are not: JSON objects with empty
lines between, with or without ``data:`` in front, and the stream stays open for a while after its last event.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from sandgate_errors import Internal, SandboxUnreachable, Unavailable
from sandgate_plugin_opensandbox.server import Endpoint

__all__ = ["EGRESS_PORT", "EXECD_PORT", "Execd", "Outcome"]

_log = logging.getLogger(__name__)

EXECD_PORT = 44772
#: Of the sidecar that keeps rules, in the same network.
EGRESS_PORT = 18080
_TOKEN_HEADER = "X-EXECD-ACCESS-TOKEN"  # noqa: S105 - a name
#: Seconds.
_CALL_LIMIT = 20.0
_UPLOAD_LIMIT = 300.0
_PING_INTERVAL = 0.05
_SLOWEST_PING_INTERVAL = 0.5
_LAST_WORDS = 2000
#: Bytes. A sandbox that starts anew on its files has what its last user left there in place of a shell: what is said in it
#: is kept in this process only as far as it helps.
_LONGEST_ANSWER = 64 * 1024
_LONGEST_STREAM = 1024 * 1024


@dataclass
class Outcome:
    """What a command's stream has told."""

    id: str = ""
    #: None: it has not ended, or was only started.
    exit_code: int | None = None
    output: list[str] = field(default_factory=list)

    def add(self, event: Mapping[str, Any]) -> bool:
        """Whether this was its last event. Unknown ones are nothing to us."""
        match event.get("type"):
            case "init":
                self.id = str(event.get("text", ""))
            case "stdout" | "stderr":
                self.output.append(str(event.get("text", "")))
            case "execution_complete":
                self.exit_code = 0
                return True
            case "error":
                about = event.get("error") or {}
                value = str(about.get("evalue", ""))
                self.output.append(f"{about.get('ename', 'error')} {value}")
                # The exit code comes as a text, and a reason in its place where nothing was started.
                self.exit_code = int(value) if value.lstrip("-").isdigit() else -1
                return True
        return False

    @property
    def words(self) -> str:
        return " | ".join(line.strip() for line in self.output if line.strip())[-_LAST_WORDS:]


class Execd:
    """execd of one sandbox."""

    def __init__(self, session: aiohttp.ClientSession, endpoint: Endpoint, token: str) -> None:
        self._session = session
        self._endpoint = endpoint
        self._headers = {**endpoint.headers, _TOKEN_HEADER: token}

    async def answers(self, *, seconds: float) -> bool:
        """Whether it does within this time."""
        pause = _PING_INTERVAL
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not await self._pings():
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _SLOWEST_PING_INTERVAL)
                return True
        return False

    async def _pings(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            # A paused or half-started sandbox takes connections and then says nothing.
            async with asyncio.timeout(5), self._get("ping") as response:
                if response.status == 401:
                    raise Internal("the sandbox's execd does not know its token")
                status: int = response.status
                return status == 200
        return False

    async def is_open(self) -> bool:
        """Whether anybody may give it commands: whoever reaches it is root of the sandbox."""
        headers = {name: value for name, value in self._headers.items() if name != _TOKEN_HEADER}
        async with _calls("say who may use it", _CALL_LIMIT):
            url = self._endpoint.url("command/status/none")
            async with self._session.get(url, headers=headers) as response:
                return bool(response.status != 401)

    def _get(self, path: str) -> Any:
        return self._session.get(self._endpoint.url(path), headers=self._headers)

    async def write(self, path: str, content: bytes | Path, *, mode: int) -> None:
        """A file of root's. ``mode`` is written with the digits that it is read with: 600 is 0600."""
        about = json.dumps({"path": path, "owner": "root", "group": "root", "mode": mode})
        with contextlib.ExitStack() as closing:
            body = closing.enter_context(content.open("rb")) if isinstance(content, Path) else content
            form = aiohttp.FormData()
            # Both parts have to look like files.
            form.add_field("metadata", about.encode(), filename="metadata", content_type="application/json")
            form.add_field("file", body, filename="file", content_type="application/octet-stream")
            async with _calls("take a file", _UPLOAD_LIMIT):
                url = self._endpoint.url("files/upload")
                async with self._session.post(url, data=form, headers=self._headers) as response:
                    await _check(response, "take a file")

    async def run(
        self, command: str, *, background: bool = False, seconds: float = _CALL_LIMIT, uid: int | None = 0
    ) -> Outcome:
        """As root, or with no ``uid`` as execd's own. With ``background`` return once it is started; else when it has ended."""
        outcome = Outcome()
        body: dict[str, object] = {"command": command, "background": background, "cwd": "/"}
        if uid is not None:
            body |= {"uid": uid, "gid": uid}
        if not background:
            body["timeout"] = round(1000 * seconds)
        async with _calls("run a command", seconds + 5):
            url = self._endpoint.url("command")
            async with self._session.post(url, json=body, headers=self._headers) as response:
                await _check(response, "run a command")
                async for event in _events(response.content):
                    if outcome.add(event):
                        break
                # What else it may have to say comes a second later, and nobody waits for it.
                response.close()
        return outcome

    async def end_of(self, command: str) -> str | None:
        """What a command in the background said before it ended; None while it runs."""
        async with _calls("tell of a command", _CALL_LIMIT):
            async with self._get(f"command/status/{command}") as response:
                status = _parsed(await _beginning(response)) if response.status == 200 else None
            if not isinstance(status, dict) or status.get("running") is not False:
                return None
            async with self._get(f"command/{command}/logs") as response:
                words = await _beginning(response) if response.status == 200 else ""
        return f"it ended with {status.get('exit_code')}: {words.strip()[-_LAST_WORDS:]}"


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[Mapping[str, Any]]:
    async for line in _lines(stream):
        event = _parsed(line.strip().removeprefix(b"data:").strip())
        if isinstance(event, dict):
            yield event


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """However long each is; raises Internal when they are too long together."""
    read, rest = 0, b""
    async for piece in stream.iter_any():
        read += len(piece)
        if read > _LONGEST_STREAM:
            _log.error("a command that starts the agent says more than anybody could read")
            raise Internal("the sandbox could not be started")
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line
    yield rest


def _parsed(text: bytes | str) -> object:
    """None for what is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


async def _beginning(response: aiohttp.ClientResponse) -> str:
    found = bytearray()
    async for piece in response.content.iter_any():
        found += piece
        if len(found) >= _LONGEST_ANSWER:
            # The rest is not even read.
            response.close()
            break
    return bytes(found[:_LONGEST_ANSWER]).decode(errors="replace")


async def _check(response: aiohttp.ClientResponse, what: str) -> None:
    if response.status >= 300:
        words = (await _beginning(response))[:500]
        _log.error("execd does not %s: %d %s", what, response.status, words)
        raise Internal("the sandbox could not be started")


@contextlib.asynccontextmanager
async def _calls(what: str, limit: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(limit):
            yield
    except TimeoutError as error:
        raise Unavailable(f"the sandbox's execd does not {what} in time") from error
    except (aiohttp.ClientError, OSError) as error:
        _log.warning("execd does not %s: %s", what, error)
        raise SandboxUnreachable("the sandbox's execd cannot be reached", retry_after=1) from error
