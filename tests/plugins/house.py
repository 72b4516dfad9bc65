"""A plugin with every policy hook, as a test installs it. What it does is small and can be seen from outside."""

from __future__ import annotations

import dataclasses
import json

from sandgate_api.envd.v1 import process_pb2
from sandgate_errors import FailedPrecondition, InvalidArgument, NotFound, PermissionDenied, Unimplemented
from sandgate_plugin_api import Egress, hookimpl

notes = None
deployment = None


@hookimpl
def sandgate_defaults():
    return {"envd_version": "0.3.0", "max_timeout": 7200}


@hookimpl
async def sandgate_configure(context):
    global notes, deployment  # noqa: PLW0603 - a module is what an entry point names
    if unknown := context.settings.keys() - {"greeting"}:
        raise FailedPrecondition(f"house has no setting '{min(unknown)}'")
    if context.process == "core":
        assert set(context.deployment.backends) == {"process"}
        notes = context.state_dir / "notes"
        deployment = context.deployment


def note(**what):
    with notes.open("a") as file:
        file.write(json.dumps(what) + "\n")


@hookimpl
async def sandgate_create_request(request):
    if request.template == "forbidden":
        raise PermissionDenied("the house does not make these")
    if request.template == "broken":
        raise ZeroDivisionError("secret text")
    if request.template == "wrong type":
        return "no request"
    if request.template == "thief":
        return dataclasses.replace(request, owner="somebody else")
    if request.template == "elsewhere":
        return dataclasses.replace(request, template="base", backends=("nowhere",))
    if request.template.startswith("first of "):
        listed = await deployment.ready_templates(request.template.removeprefix("first of "))
        request = dataclasses.replace(request, template=listed[0].id)
    minutes = -(-request.timeout // 60)
    return dataclasses.replace(
        request,
        template={"house": "base"}.get(request.template, request.template),
        timeout=minutes * 60,
        envs={**request.envs, "HOUSE": "yes"},
        secure=True,
        egress=Egress(),
    )


@hookimpl
async def sandgate_new_life(sandbox, request):
    return dataclasses.replace(request, timeout=-(-request.timeout // 60) * 60)


@hookimpl
async def sandgate_list_query(query):
    if "refused" in query.metadata:
        raise InvalidArgument("the house does not list these")
    return dataclasses.replace(query, where=(*query.where, lambda sandbox: sandbox.metadata.get("hidden") != "yes"))


@hookimpl
async def sandgate_activity(sandbox, activity):
    note(activity=activity, sandbox=sandbox.id)
    return sandbox.life if "sliding" in sandbox.metadata else None


@hookimpl
async def sandgate_lifecycle(sandbox, change):
    note(sandbox=sandbox.id, came_from=change.from_state, to=change.to_state)


@hookimpl
async def sandgate_rest_request(request):
    if request.route == "POST /sandboxes/{id}/pause":
        raise Unimplemented("the house does not pause")
    if request.body.get("mcp"):
        raise InvalidArgument("the house has no mcp")
    if request.route == "GET /v2/sandboxes" and "short" in request.query:
        kept = {name: values for name, values in request.query.items() if name != "short"}
        return dataclasses.replace(request, query={**kept, "metadata": [f"kind={request.query['short'][0]}"]})
    if "inner" in request.body:
        return dataclasses.replace(request, body=request.body["inner"])
    return None


@hookimpl
async def sandgate_describe(sandbox, reply):
    body = {**reply.body, "clientID": "house", "seen": reply.kind.value}
    if sandbox.metadata.get("odd"):
        body["odd"] = object()
    if reply.kind == "sandbox":
        body["asked"] = reply.request.body.get("templateID")
        body["envdAccessToken"] = reply.request.headers.get("X-API-Key", "")
        body.pop("domain", None)
    return body


@hookimpl
async def sandgate_agent_request(request):
    changed = dict(request.headers)
    if request.header("E2b-Sandbox-Id") and not request.header("E2b-Sandbox-Port"):
        changed["E2b-Sandbox-Port"] = "49983"
    if request.query.get("username"):
        raise InvalidArgument("the house knows no users")
    path = request.query.get("path", [""])[0]
    query = {**request.query, "path": [path.replace("/./", "/")]} if path else request.query
    return dataclasses.replace(request, headers=changed, query=query)


@hookimpl
async def sandgate_access(request, sandbox_id, credentials):
    return credentials.token is not None and await credentials.opened_by(credentials.token)


@hookimpl
async def sandgate_message(request, message):
    if isinstance(message, process_pb2.StartRequest):
        if message.stdin:
            raise Unimplemented("the house gives no input")
        message.process.envs["FROM_HOOK"] = "yes"
    return message


@hookimpl
async def sandgate_answer(request, message):
    if isinstance(message, list):
        return [{**item, "by": "house"} for item in message]
    if isinstance(message, process_pb2.StartResponse) and message.event.data.stdout:
        message.event.data.stdout = message.event.data.stdout.upper()
    return message


@hookimpl
async def sandgate_error(request, error):
    if request.route == "GET /files" and isinstance(error, NotFound):
        return InvalidArgument("the house says: no such file")
    return None


@hookimpl
async def sandgate_command_ended(request):
    pass


@hookimpl
async def sandgate_ended(request, complete):
    pass
