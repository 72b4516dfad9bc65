"""Images: what one says of itself, and fetching those that are missing.

One pull for each reference, however many sandboxes wait for it. It belongs to the backend and not to the request that
began it: a client that gives up, or whose limit passes, finds the image there when it comes again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sandgate_errors import NotFound, SandgateError, Unavailable
from sandgate_plugin_docker.credentials import credentials_for
from sandgate_plugin_docker.engine import Engine, Refused
from sandgate_plugin_docker.settings import DockerSettings

__all__ = ["ImageFacts", "Images", "full_reference", "is_reference"]

_log = logging.getLogger(__name__)

#: Seconds for which an answer of the engine holds: a create asks twice, and an operator who builds anew does not notice.
_FRESH_SECONDS = 3.0
#: How long a request waits for a pull. A create has sixty seconds for everything.
_WAIT_SECONDS = 50.0
_RETRY_AFTER = 10.0
_LOG_INTERVAL = 5.0
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]+)?/)?"
_REFERENCE = re.compile(
    rf"(?P<name>{_HOST}{_COMPONENT}(?:/{_COMPONENT})*)(?P<tag>:[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?"
    r"(?P<digest>@sha256:[0-9a-f]{64})?"
)
_LONGEST_REFERENCE = 255
#: Snapshots, of whichever gateway; the engine takes the usual registry's name in front of one for nothing at all.
_OURS = re.compile(r"(?:^|/)sandgate-[0-9a-f]{8}/")
_MISSING = re.compile(
    r"not found|does not exist|manifest unknown|no such image|invalid reference|repository name", re.IGNORECASE
)


def is_reference(name: str) -> bool:
    """Whether it can be the reference of an image that anybody may name.

    Not the id of an image, with which the engine would answer for images that are none of the client's, and none of the
    images that the gateway makes itself.
    """
    match = _REFERENCE.fullmatch(name) if len(name) <= _LONGEST_REFERENCE else None
    return match is not None and match["name"] != "sha256" and _OURS.search(match["name"]) is None


def full_reference(reference: str) -> str:
    """With its tag, so that it cannot be taken for an image's id."""
    match = _REFERENCE.fullmatch(reference)
    return f"{reference}:latest" if match is not None and not match["tag"] and not match["digest"] else reference


@dataclass(frozen=True, kw_only=True)
class ImageFacts:
    """What an image says of itself."""

    id: str
    envs: Mapping[str, str]
    workdir: str
    #: As USER has it: a name or number, perhaps with a group.
    user: str
    #: ENTRYPOINT and CMD as one command.
    command: tuple[str, ...]

    @classmethod
    def of(cls, details: Mapping[str, Any]) -> ImageFacts:
        config = details.get("Config") or {}
        pairs = (entry.partition("=") for entry in config.get("Env") or ())
        return cls(
            id=details["Id"],
            envs={name: value for name, sign, value in pairs if name and sign},
            workdir=config.get("WorkingDir") or "",
            user=config.get("User") or "",
            command=(*(config.get("Entrypoint") or ()), *(config.get("Cmd") or ())),
        )


class Images:
    """The images of one engine."""

    def __init__(self, engine: Engine, settings: DockerSettings) -> None:
        self._engine = engine
        self._pull_policy = settings.pull
        self._stall = float(settings.pull_stall)
        self._known: dict[str, tuple[float, ImageFacts]] = {}
        #: References that were pulled since the start, for the policy ``always``.
        self._fetched: set[str] = set()
        self._pulls: dict[str, asyncio.Task[None]] = {}

    async def close(self) -> None:
        """Give up pulls that are under way."""
        pulls = list(self._pulls.values())
        for pull in pulls:
            pull.cancel()
        if pulls:
            await asyncio.wait(pulls)

    def known(self, reference: str) -> ImageFacts | None:
        """What was last heard of it, without asking."""
        entry = self._known.get(full_reference(reference))
        return entry[1] if entry is not None else None

    async def find(self, reference: str) -> ImageFacts:
        """What the image says of itself; it is fetched first if need be.

        Raises NotFound (there is no such image, or it may not be had), Unavailable (it could not be fetched now).
        """
        reference = full_reference(reference)
        heard, facts = self._known.get(reference, (-_FRESH_SECONDS, None))
        if facts is not None and time.monotonic() - heard < _FRESH_SECONDS:
            return facts
        details = await self._engine.image(reference)
        if self._must_pull(reference, present=details is not None):
            await self._wait_for_pull(reference)
            details = await self._engine.image(reference)
        if details is None:
            self._known.pop(reference, None)
            raise NotFound(f"there is no image '{reference}' on the container engine")
        facts = ImageFacts.of(details)
        self._known[reference] = time.monotonic(), facts
        return facts

    def forget(self, reference: str) -> None:
        """What was heard of it does not hold any more."""
        self._known.pop(full_reference(reference), None)

    def _must_pull(self, reference: str, *, present: bool) -> bool:
        if self._pull_policy == "never":
            return False
        return not present or (self._pull_policy == "always" and reference not in self._fetched)

    async def _wait_for_pull(self, reference: str) -> None:
        pull = self._pulls.get(reference)
        if pull is None:
            pull = asyncio.create_task(self._pull(reference), name=f"pull of {reference}")
            self._pulls[reference] = pull
            pull.add_done_callback(lambda _: self._pulls.pop(reference, None))
        # Not awaited itself: it goes on when this call is cancelled.
        await asyncio.wait({pull}, timeout=_WAIT_SECONDS)
        if not pull.done():
            raise Unavailable(f"the image '{reference}' is still being fetched: try again", retry_after=_RETRY_AFTER)
        if pull.cancelled():
            raise Unavailable("the gateway is ending")
        pull.result()

    async def _pull(self, reference: str) -> None:
        _log.info("fetching the image %s", reference)
        auth = await credentials_for(reference)
        progress = _Progress(reference)
        try:
            async with contextlib.aclosing(self._engine.pull(reference, auth=auth, stall=self._stall)) as messages:
                async for message in messages:
                    progress.note(message)
        except Refused as refused:
            raise _told(reference, refused) from refused
        except Unavailable as error:
            _log.warning("the image %s could not be fetched: %s", reference, error.message)
            raise Unavailable(
                f"the image '{reference}' could not be fetched: {error.message}", retry_after=_RETRY_AFTER
            ) from error
        self._fetched.add(reference)
        _log.info("the image %s is here", reference)


def _told(reference: str, refused: Refused) -> SandgateError:
    _log.warning("the image %s could not be fetched: %s", reference, refused)
    if refused.status == 404 or _MISSING.search(refused.message):
        return NotFound(f"there is no image '{reference}', or this gateway may not fetch it")
    return Unavailable(
        f"the image '{reference}' could not be fetched: its registry does not give it", retry_after=_RETRY_AFTER
    )


class _Progress:
    """What a pull reports layer by layer, as a line in the log now and then."""

    def __init__(self, reference: str) -> None:
        self._reference = reference
        self._layers: dict[str, tuple[int, int]] = {}
        self._next = time.monotonic() + _LOG_INTERVAL

    def note(self, message: Mapping[str, Any]) -> None:
        detail = message.get("progressDetail") or {}
        if message.get("id") and detail.get("total"):
            self._layers[message["id"]] = int(detail.get("current") or 0), int(detail["total"])
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _LOG_INTERVAL
        done, total = (sum(column) for column in zip(*self._layers.values(), strict=True)) if self._layers else (0, 0)
        _log.info("fetching the image %s: %d of %d MiB", self._reference, done // 2**20, total // 2**20)
