"""The container engine: each call bounded in time, each failure told in our terms.

Between the backend and aiodocker, which speaks the engine's API. An engine that is down or silent is ``Unavailable``: the
sandboxes are not lost for that. What the engine refuses is :class:`Refused`, for the caller to judge by its status.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib.util
import io
import json
import logging
import os
import re
import ssl
import tarfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiodocker
import aiohttp
from aiodocker.containers import DockerContainer
from aiodocker.exceptions import DockerError
from aiodocker.jsonstream import json_stream_stream
from aiodocker.networks import DockerNetwork
from aiodocker.stream import Stream
from aiodocker.volumes import DockerVolume

from sandgate_errors import Conflict, FailedPrecondition, Internal, NoSpace, NotFound, ResourceExhausted, Unavailable
from sandgate_plugin_docker.settings import DockerSettings

__all__ = ["Details", "Engine", "Refused", "told"]

_log = logging.getLogger(__name__)

T = TypeVar("T")
#: What the engine says of something: its API is the type.
Details = Mapping[str, Any]

_SOCKETS = ("/run/docker.sock", "/var/run/docker.sock")
#: Seconds. What only looks something up takes milliseconds; twenty starts at once take seconds on a small machine.
_LOOK_LIMIT = 15.0
_CHANGE_LIMIT = 60.0
#: Copying gigabytes to or from a layer.
_COPY_LIMIT = 600.0
#: What a client is told to wait when the engine is down: a restart of it takes a few seconds.
_RETRY_AFTER = 5.0
#: aiodocker's status for an engine that cannot be reached.
_UNREACHABLE = 900
_NO_ROOM = re.compile(r"no space left|disk quota exceeded", re.IGNORECASE)
_NO_MORE = re.compile(
    r"cannot allocate memory|too many open files|resource temporarily unavailable|exchange full|available, non-?overlapping"
    r"|no available ip",
    re.IGNORECASE,
)


class Refused(Exception):
    """The engine answered, with an error. The text is for the log."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message} ({status})")
        self.status = status
        self.message = message


@contextlib.contextmanager
def told(subject: str = "the sandbox") -> Iterator[None]:
    """What a client hears of a refusal that nobody has judged; the log hears more."""
    try:
        yield
    except Refused as refused:
        if refused.status == 404:
            raise NotFound(f"{subject} does not exist any more") from refused
        _log.error("the container engine refused: %s", refused)
        if _NO_ROOM.search(refused.message):
            raise NoSpace("no disk space is left for it") from refused
        if _NO_MORE.search(refused.message):
            raise ResourceExhausted("the container engine has no room for it") from refused
        if refused.status == 409:
            raise Conflict(f"{subject} is busy with something else") from refused
        raise Internal(f"the container engine refused what {subject} needs") from refused


class Engine:
    """One engine. Objects of it are named by id or name, and handed on as the engine describes them."""

    def __init__(self, docker: aiodocker.Docker, address: str) -> None:
        self._docker = docker
        self.address = address

    @classmethod
    def connect(cls, settings: DockerSettings) -> Engine:
        """To be called in the loop that is going to use it; asks nothing yet. Raises FailedPrecondition."""
        address = cls.address_of(settings)
        scheme = urlsplit(address).scheme
        if scheme == "unix":
            # No connection is kept: one that the engine closed at its restart would cost the next request.
            connector = aiohttp.UnixConnector(address.removeprefix("unix://"), force_close=True, limit=0)
            return cls(
                aiodocker.Docker(url="unix://localhost", connector=connector, session=_session(connector)), address
            )
        if scheme == "ssh":
            return cls(_over_ssh(address), address)
        context = _tls(settings)
        secure = re.sub("^tcp://", "http://" if context is None else "https://", address)
        return cls(aiodocker.Docker(url=secure, ssl_context=context, timeout=_bounds()), address)

    @staticmethod
    def address_of(settings: DockerSettings) -> str:
        """Where the engine is. Raises FailedPrecondition."""
        address = settings.host or os.environ.get("DOCKER_HOST")
        if address is None:
            found = next((path for path in _SOCKETS if Path(path).is_socket()), None)
            if found is None:
                raise FailedPrecondition("no container engine is here: install one, or give its address as 'host'")
            return f"unix://{found}"
        if urlsplit(address).scheme not in {"unix", "tcp", "http", "https", "ssh"}:
            raise FailedPrecondition(f"the engine's address '{address}' is none of unix://, tcp:// and ssh://")
        return address

    @property
    def is_local(self) -> bool:
        """Whether it is reached by a socket of this machine, so that both see the same files."""
        return self.address.startswith("unix://")

    @property
    def host(self) -> str:
        """The name of its machine, as this one knows it."""
        return "127.0.0.1" if self.is_local else urlsplit(self.address).hostname or "127.0.0.1"

    async def close(self) -> None:
        session = self._docker.session
        await self._docker.close()
        # Of a session that was given to it, aiodocker closes nothing.
        await session.close()

    async def info(self) -> Details:
        return await self._ask(self._docker.system.info())

    # Containers.

    async def create(self, config: Mapping[str, Any], *, name: str) -> str:
        """The id of a new container, not started."""
        container = await self._ask(self._docker.containers.create(dict(config), name=name), limit=_CHANGE_LIMIT)
        return container.id

    async def start(self, container: str) -> None:
        await self._ask(self._container(container).start(), limit=_CHANGE_LIMIT)

    async def inspect(self, container: str) -> Details | None:
        """None: there is no such container."""
        return await self._or_none(self._container(container).show())

    async def list(self, *labels: str) -> Sequence[Details]:
        """Every container with all these labels, running or not."""
        filters = json.dumps({"label": list(labels)})
        containers = await self._ask(self._docker.containers.list(all=1, filters=filters))
        return [{key: container[key] for key in ("Id", "Names", "Labels", "State")} for container in containers]

    async def rename(self, container: str, name: str) -> None:
        await self._ask(self._container(container).rename(name))

    async def kill(self, container: str) -> None:
        """Return when it has ended; success also when it had before."""
        try:
            await self._ask(self._container(container).kill(signal="SIGKILL"), limit=_CHANGE_LIMIT)
        except Refused as refused:
            if refused.status != 409:
                raise
        await self._ask(self._container(container).wait(), limit=_CHANGE_LIMIT)

    async def pause(self, container: str) -> None:
        await self._ask(self._container(container).pause(), limit=_CHANGE_LIMIT)

    async def unpause(self, container: str) -> None:
        await self._ask(self._container(container).unpause(), limit=_CHANGE_LIMIT)

    async def remove(self, container: str) -> None:
        """Return when nothing is left of it, its anonymous volumes included; success also when nothing was."""
        async with _bounded(_CHANGE_LIMIT):
            while True:
                try:
                    await self._ask(self._container(container).delete(force=True, v=True), limit=_CHANGE_LIMIT)
                except Refused as refused:
                    if refused.status == 404:
                        return
                    if refused.status != 409:
                        raise
                    # Somebody else is removing it: gone when that has ended.
                    await asyncio.sleep(0.1)
                else:
                    return

    async def last_words(self, container: str) -> str:
        """The end of its log, on one line; empty when there is none."""
        try:
            lines = await self._ask(self._container(container).log(stdout=True, stderr=True, tail=20))
        except (Refused, Unavailable):
            return ""
        return " | ".join(line.strip() for line in lines)[-2000:]

    async def stats(self, container: str) -> Details | None:
        """Two samples, a second apart; None: there is no such container, or it does not run."""
        found = await self._or_none(self._container(container).stats(stream=False))
        return found[0] if found else None

    @contextlib.asynccontextmanager
    async def attached(self, container: str) -> AsyncIterator[Stream]:
        """Its standard input and output, from before its start."""
        stream = self._container(container).attach(stdin=True, stdout=True)
        await self._ask(stream.__aenter__())
        try:
            yield stream
        finally:
            await stream.close()

    async def read_file(self, container: str, path: str) -> bytes | None:
        """None: there is no such file."""
        archive: tarfile.TarFile | None = await self._or_none(self._container(container).get_archive(path))
        if archive is None:
            return None
        with archive:
            member = next((entry for entry in archive if entry.isfile()), None)
            file = archive.extractfile(member) if member is not None else None
            return file.read() if file is not None else None

    async def put_archive(self, container: str, path: str, data: bytes) -> None:
        untyped: Any = self._container(container)
        await self._ask(untyped.put_archive(path, io.BytesIO(data)), limit=_COPY_LIMIT)

    async def commit(self, container: str, *, repository: str, tag: str, labels: Mapping[str, str]) -> None:
        """An image of its files; it stands still meanwhile."""
        changes = [f'LABEL {name}="{value}"' for name, value in labels.items()]
        container_ = self._container(container)
        await self._ask(container_.commit(repository=repository, tag=tag, changes=changes), limit=_COPY_LIMIT)

    def _container(self, container: str) -> DockerContainer:
        return self._docker.containers.container(container)

    # Images.

    async def image(self, reference: str) -> Details | None:
        """None: it is not here."""
        return await self._or_none(self._docker.images.inspect(reference))

    async def remove_image(self, reference: str, *, force: bool) -> None:
        """Success also when it is not there; not forced, also when something needs it."""
        try:
            await self._ask(self._docker.images.delete(reference, force=force), limit=_COPY_LIMIT)
        except Refused as refused:
            if refused.status != 404 and (force or refused.status != 409):
                raise

    async def pull(
        self, reference: str, *, auth: Mapping[str, str] | None, stall: float
    ) -> AsyncGenerator[Details, None]:
        """Its progress, message by message. Raises Refused; Unavailable when nothing comes for ``stall`` seconds."""
        headers = {}
        if auth is not None:
            headers["X-Registry-Auth"] = base64.urlsafe_b64encode(json.dumps(dict(auth)).encode()).decode()
        # Not its own method for this: that leaves the connection open when the pull is given up, and so the pull.
        query = self._docker._query(  # noqa: SLF001
            "images/create", "POST", params={"fromImage": reference}, headers=headers, timeout=None
        )
        response = await self._ask(query.__aenter__(), limit=stall)
        try:
            messages = aiter(json_stream_stream(response))
            while (message := await self._ask(anext(messages, None), limit=stall)) is not None:
                yield message
        finally:
            response.close()

    # Networks and volumes.

    async def network(self, name: str) -> Details | None:
        return await self._or_none(self._network(name).show())

    async def create_network(self, config: Mapping[str, object]) -> None:
        await self._ask(self._docker.networks.create(dict(config)), limit=_CHANGE_LIMIT)

    async def remove_network(self, name: str) -> None:
        await self._or_none(self._network(name).delete())

    async def join(self, network: str, container: str) -> None:
        await self._ask(self._network(network).connect({"Container": container}), limit=_CHANGE_LIMIT)

    async def leave(self, network: str, container: str) -> None:
        order = {"Container": container, "Force": True}
        await self._ask(self._network(network).disconnect(order), limit=_CHANGE_LIMIT)

    def _network(self, name: str) -> DockerNetwork:
        # Not by ``networks.get``, which asks the engine for all that is on it first.
        untyped: Any = DockerNetwork
        network: DockerNetwork = untyped(self._docker, name)
        return network

    async def create_volume(self, name: str, labels: Mapping[str, str]) -> None:
        """Success also when it is there."""
        untyped: Any = self._docker.volumes
        await self._ask(untyped.create({"Name": name, "Labels": dict(labels)}), limit=_CHANGE_LIMIT)

    async def volumes(self, label: str) -> Sequence[str]:
        """The names of all with this label."""
        untyped: Any = self._docker.volumes
        found = await self._ask(untyped.list(filters={"label": [label]}))
        return [str(volume["Name"]) for volume in found["Volumes"] or ()]

    async def remove_volume(self, name: str) -> None:
        """Success also when it is not there, or something uses it."""
        untyped: Any = DockerVolume
        try:
            await self._ask(untyped(self._docker, name).delete(), limit=_CHANGE_LIMIT)
        except Refused as refused:
            if refused.status not in {404, 409}:
                raise

    # What all calls have in common.

    async def _or_none(self, call: Awaitable[T]) -> T | None:
        try:
            return await self._ask(call)
        except Refused as refused:
            if refused.status != 404:
                raise
            return None

    async def _ask(self, call: Awaitable[T], *, limit: float = _LOOK_LIMIT) -> T:
        try:
            async with _bounded(limit):
                return await call
        except DockerError as error:
            if error.status == _UNREACHABLE:
                raise _down(error) from error
            raise Refused(error.status, error.message) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _down(error) from error


@contextlib.asynccontextmanager
async def _bounded(limit: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(limit):
            yield
    except TimeoutError as error:
        raise Unavailable(
            f"the container engine has not answered for {limit:g} seconds", retry_after=_RETRY_AFTER
        ) from error


def _down(error: Exception) -> Unavailable:
    _log.warning("the container engine cannot be reached: %s", error)
    return Unavailable("the container engine does not answer", retry_after=_RETRY_AFTER)


def _bounds() -> aiohttp.ClientTimeout:
    # The whole of a call is bounded where it is made; this is for a machine that swallows packets.
    return aiohttp.ClientTimeout(total=None, sock_connect=10)


def _session(connector: aiohttp.BaseConnector) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=connector, timeout=_bounds())


def _over_ssh(address: str) -> aiodocker.Docker:
    if importlib.util.find_spec("asyncssh") is None:
        raise FailedPrecondition(
            "an engine behind ssh:// needs another library: pip install 'sandgate-plugin-docker[ssh]'"
        )
    try:
        return aiodocker.Docker(url=address, timeout=_bounds())
    except (DockerError, ValueError) as error:
        raise FailedPrecondition(f"the engine's address '{address}' cannot be used: {error}") from error


def _tls(settings: DockerSettings) -> ssl.SSLContext | None:
    """As the docker command does: a folder with ``ca.pem``, and ``cert.pem`` with ``key.pem`` where it has them."""
    folder = settings.certificates
    if folder is None and os.environ.get("DOCKER_TLS_VERIFY"):
        folder = os.environ.get("DOCKER_CERT_PATH") or str(Path.home() / ".docker")
    if folder is None:
        return None
    try:
        context = ssl.create_default_context(cafile=f"{folder}/ca.pem")
        if Path(folder, "cert.pem").exists():
            context.load_cert_chain(f"{folder}/cert.pem", f"{folder}/key.pem")
    except (OSError, ssl.SSLError) as error:
        raise FailedPrecondition(f"the engine's certificates in {folder} cannot be used: {error}") from error
    return context
