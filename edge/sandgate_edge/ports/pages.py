"""What the gateway itself says about a port: JSON for programs, a page for people (envd.md 1.3; behaviour.md R4 to R6)."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from http import HTTPStatus

from aiohttp import web
from multidict import CIMultiDictProxy

from sandgate_edge.ports.exchange import NoAnswer
from sandgate_edge.responses import files_error
from sandgate_edge.routing import PortClosed, SandboxGone
from sandgate_errors import SandgateError

__all__ = ["refusal", "wants_page"]

_TITLES: Mapping[type[SandgateError], str] = {
    SandboxGone: "Sandbox Not Found",
    # Programs that probe a preview look for this one in the page, as E2B's has it.
    PortClosed: "Closed Port Error",
}
_HINTS: Mapping[type[SandgateError], str] = {
    SandboxGone: "It may have been stopped, or have reached the end of its life.",
    PortClosed: "Start a server on this port in the sandbox, then load this page again.",
    NoAnswer: "It may speak another protocol than HTTP, or have ended while it was asked.",
}
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 36rem; margin: 15vh auto 0; padding: 0 1rem; color: #222; }}
h1 {{ font-size: 1.4rem; }}
dt {{ color: #666; }}
dd {{ margin: 0 0 .5rem; font-family: ui-monospace, monospace; overflow-wrap: anywhere; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #181818; color: #ddd; }} dt {{ color: #999; }} }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{message}</p>
<p>{hint}</p>
<dl>{facts}</dl>
</body>
</html>
"""


def refusal(request: web.Request, error: SandgateError, *, sandbox_id: str, port: int) -> web.Response:
    """The answer to a request that did not reach the server in the sandbox."""
    response = files_error(error)
    if isinstance(error, NoAnswer):
        body = {"sandboxId": sandbox_id, "message": error.message, "port": port, "code": response.status}
        response.body = json.dumps(body, separators=(",", ":")).encode()
    if wants_page(request.headers):
        response = _page(error, response, {"Sandbox": sandbox_id, "Port": str(port), "Status": str(response.status)})
    response.headers["Cache-Control"] = "no-store"
    # The address is the same, whoever asks.
    response.headers["Vary"] = "Accept, Sec-Fetch-Mode, User-Agent, X-Requested-With"
    return response


def wants_page(headers: CIMultiDictProxy[str]) -> bool:
    """Whether a person looks at the answer: a browser that goes to a page, and no script in one (R6)."""
    accept = headers.get("Accept", "").lower()
    if "application/json" in accept or "X-Requested-With" in headers:
        return False
    if "Mozilla/" not in headers.get("User-Agent", ""):
        return False
    mode = headers.get("Sec-Fetch-Mode")
    return mode == "navigate" if mode is not None else "text/html" in accept


def _page(error: SandgateError, plain: web.Response, facts: Mapping[str, str]) -> web.Response:
    shown = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in facts.items())
    page = _PAGE.format(
        title=html.escape(_TITLES.get(type(error), HTTPStatus(plain.status).phrase)),
        message=html.escape(error.message),
        hint=html.escape(_HINTS.get(type(error), "")),
        facts=shown,
    )
    headers = {
        "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors *",
        "X-Content-Type-Options": "nosniff",
    }
    if "Retry-After" in plain.headers:
        headers["Retry-After"] = plain.headers["Retry-After"]
    return web.Response(status=plain.status, text=page, content_type="text/html", headers=headers)
