"""Documented routes that this gateway does not offer yet: refused by name instead of "not found".

A client must be able to tell a gateway that lacks a feature (501) from one that does not know what was asked for (404);
``rest.md`` 2 is the list. The key is checked first, like everywhere.
"""

from __future__ import annotations

from typing import NoReturn

from aiohttp import web
from aiohttp.typedefs import Handler

from sandgate_edge.rest.api_key import authenticate
from sandgate_edge.rest.credentials import shaped
from sandgate_errors import Unimplemented

__all__ = ["ABSENT", "OF_TEMPLATES", "add_absent"]

# A template id may hold a slash, escaped or not (`team/name:tag`, ``rest.md`` 1.6).
_TEMPLATE = "/templates/{template:.+}"

Absent = dict[str, tuple[tuple[str, str], ...]]

#: What it is → its methods and paths.
OF_TEMPLATES: Absent = {
    "managing tags of templates": (
        ("POST", "/templates/tags"),
        ("DELETE", "/templates/tags"),
        ("GET", f"{_TEMPLATE}/tags"),
        ("GET", f"{_TEMPLATE}/tags/{{rest:.+}}"),
    ),
    "building templates": (
        ("POST", "/templates"),
        ("POST", "/v2/templates"),
        ("POST", "/v3/templates"),
        ("POST", _TEMPLATE),
        ("POST", f"/v2{_TEMPLATE}"),
        ("GET", f"{_TEMPLATE}/files/{{hash}}"),
        ("GET", f"{_TEMPLATE}/builds/{{build}}/status"),
        ("GET", f"{_TEMPLATE}/builds/{{build}}/logs"),
    ),
    "changing templates": (("PATCH", _TEMPLATE), ("PATCH", f"/v2{_TEMPLATE}")),
    "naming default templates": (("GET", "/default-templates"),),
}
ABSENT: Absent = {
    "managing volumes": (
        ("GET", "/volumes"),
        ("POST", "/volumes"),
        ("GET", "/volumes/{id}"),
        ("DELETE", "/volumes/{id}"),
        ("GET", "/volumecontent/{id}/dir"),
        ("POST", "/volumecontent/{id}/dir"),
        ("GET", "/volumecontent/{id}/path"),
        ("PATCH", "/volumecontent/{id}/path"),
        ("DELETE", "/volumecontent/{id}/path"),
        ("GET", "/volumecontent/{id}/file"),
        ("PUT", "/volumecontent/{id}/file"),
    ),
    "managing secrets": (
        ("GET", "/secrets"),
        ("POST", "/secrets"),
        # The name in the path is not escaped by every client, so it may hold a slash.
        ("GET", "/secrets/{name:.+}"),
        ("POST", "/secrets/{name:.+}"),
        ("DELETE", "/secrets/{name:.+}"),
    ),
}


def add_absent(routes: web.RouteTableDef, absent: Absent) -> None:
    """Put every route of ``absent`` into a table; before routes that match more than they should."""
    for what, places in absent.items():
        for method, path in places:
            # HEAD comes with GET by itself elsewhere; here the method is said and nothing else is.
            routes.route(method, path)(_refusing(what))


def _refusing(what: str) -> Handler:
    async def refuse(request: web.Request) -> NoReturn:
        await shaped(request)
        await authenticate(request)
        raise Unimplemented(f"{what} is not offered by this gateway version")

    return refuse
