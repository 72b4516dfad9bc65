"""The ROCK profile: ``sandgate serve --profile rock`` behaves as a ROCK service does to the E2B SDK 2.34.0.

The plugin implements public hooks and nothing else. Each hook hands on to the module that holds its rules, which go by
their ids K1 to K36: :mod:`~sandgate_plugin_rock.creates`, :mod:`~sandgate_plugin_rock.lists`,
:mod:`~sandgate_plugin_rock.lives` and :mod:`~sandgate_plugin_rock.replies` on the control plane,
:mod:`~sandgate_plugin_rock.commands` and :mod:`~sandgate_plugin_rock.files` on the data plane.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sandgate_api.envd.v1 import process_pb2
from sandgate_errors import SandgateError
from sandgate_plugin_api import (
    Activity,
    AgentRequest,
    Change,
    Credentials,
    ListQuery,
    NewLife,
    NewSandbox,
    PolicyContext,
    Reply,
    RestRequest,
    SandboxInfo,
    hookimpl,
)
from sandgate_plugin_rock import commands, creates, files, lists, replies
from sandgate_plugin_rock.commands import Places
from sandgate_plugin_rock.keys import Keys
from sandgate_plugin_rock.lives import Lives
from sandgate_plugin_rock.settings import RockSettings

__all__ = ["RockPlugin", "plugin"]

_AGENT_PORT = "49983"
_CREATES = frozenset({"POST /sandboxes", "POST /v2/sandboxes"})
_LISTS = frozenset({"GET /sandboxes", "GET /v2/sandboxes"})
#: States with which what a set-timeout asked for is over; a resume says itself how long the sandbox is to live.
_FORGOTTEN_IN = frozenset({"killed", "failed", "paused"})
_ACTING_USER = "Basic " + base64.b64encode(f"{files.USER}:".encode()).decode()


class RockPlugin:
    """An object and not the module holds the hooks, because it has settings and counts commands."""

    def __init__(self) -> None:
        self._settings = RockSettings()
        self._keys = Keys()
        self._places = Places(self._settings.max_commands)
        self._lives: Lives | None = None

    @hookimpl
    def sandgate_defaults(self) -> Mapping[str, object]:
        return {
            "envd_version": replies.ENVD_VERSION,
            # The bound is each create's own (K5).
            "create_timeout": 3600,
            "max_rpc_request_bytes": 1024 * 1024,
            "max_upload_files": 256,
            "max_list_depth": 100,
            "max_list_entries": 10_000,
        }

    @hookimpl
    async def sandgate_configure(self, context: PolicyContext) -> None:
        self._settings = RockSettings.read(context.settings)
        self._places = Places(self._settings.max_commands)
        if self._settings.keys_file is not None:
            self._keys = await asyncio.to_thread(Keys, self._settings.keys_file)
        if context.state_dir is not None:
            self._lives = Lives(context.state_dir / "lives")
            await self._lives.load()

    # The core

    @hookimpl
    async def sandgate_create_request(self, request: NewSandbox) -> NewSandbox:
        return creates.new_sandbox(request, at_deadline=self._settings.at_deadline)

    @hookimpl
    async def sandgate_new_life(self, sandbox: SandboxInfo, request: NewLife) -> NewLife | None:
        life = creates.whole_minutes(request.timeout)
        if self._lives is not None and not request.extend_only:
            await self._lives.keep(sandbox, life)
        return replace(request, timeout=life)

    @hookimpl
    async def sandgate_activity(self, sandbox: SandboxInfo, activity: Activity) -> float | None:
        return sandbox.life if self._lives is None else self._lives.of(sandbox)

    @hookimpl
    async def sandgate_lifecycle(self, sandbox: SandboxInfo, change: Change) -> None:
        if self._lives is not None and change.to_state in _FORGOTTEN_IN:
            await self._lives.forget(sandbox)

    @hookimpl
    async def sandgate_list_query(self, query: ListQuery) -> ListQuery | None:
        return lists.whole_list(query)

    # The edge

    @hookimpl
    async def sandgate_rest_request(self, request: RestRequest) -> RestRequest:
        headers = {name: value for name, value in request.headers.items() if name.lower() != "x-api-key"}
        key = next((value for name, value in request.headers.items() if name.lower() == "x-api-key"), "")
        request = replace(
            request,
            headers={
                **{name: value for name, value in headers.items() if name.lower() != replies.KEY_HEADER.lower()},
                "X-API-KEY": self._keys.ours(key),
                replies.KEY_HEADER: key,
            },
        )
        if request.route in _CREATES:
            return replace(request, body=creates.accepted_body(request.body))
        if request.route in _LISTS:
            return replace(request, query=lists.accepted_query(request.query))
        return request

    @hookimpl
    async def sandgate_describe(self, sandbox: SandboxInfo, reply: Reply) -> Mapping[str, object]:
        return replies.described(sandbox, reply, address=self._settings.address)

    @hookimpl
    async def sandgate_agent_request(self, request: AgentRequest) -> AgentRequest:
        changed = {"authorization": ("Authorization", _ACTING_USER)}
        if request.named_by == "headers":
            changed["e2b-sandbox-port"] = ("E2b-Sandbox-Port", _AGENT_PORT)
        kept = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in changed and not name.lower().startswith("x-metadata-")
        }
        request = replace(request, headers={**kept, **dict(changed.values())})
        if request.route in {"GET /files", "POST /files"}:
            if request.route == "POST /files":
                files.check_upload(request)
            return replace(request, query=files.accepted_query(request))
        return request

    @hookimpl
    async def sandgate_access(self, request: AgentRequest, sandbox_id: str, credentials: Credentials) -> bool | None:
        # None: E2B's rule, for the sandbox's own token and for signed URLs.
        if credentials.token is not None and await credentials.opened_by(self._keys.ours(credentials.token)):
            return True
        return None

    @hookimpl
    async def sandgate_message(self, request: AgentRequest, message: Any) -> Any:
        if isinstance(message, process_pb2.StartRequest) and not message.HasField("pty"):
            limit = commands.accepted_command(request, message)
            self._places.take(request, limit=limit)
        return files.clean_message(message) if files.is_about_files(request) else message

    @hookimpl
    async def sandgate_answer(self, request: AgentRequest, message: Any) -> Any:
        return files.plain_answer(message) if files.is_about_files(request) else message

    @hookimpl
    async def sandgate_command_ended(self, request: AgentRequest) -> None:
        self._places.free(request)

    @hookimpl
    async def sandgate_error(self, request: RestRequest | AgentRequest, error: SandgateError) -> SandgateError | None:
        return replies.told(request, error)


#: What the entry point names.
plugin = RockPlugin()
