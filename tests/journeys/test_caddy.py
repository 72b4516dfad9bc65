"""The proxy in front as docs/Caddyfile sets it up: TLS, one name for each port of each sandbox, nothing held back."""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox

from sandgate_testing.gateway import Gateway, wait_until
from sandgate_testing.requirements import need

CADDYFILE = Path(__file__).resolve().parents[2] / "docs/Caddyfile"
DOMAIN = "box.localhost"
EVENTS = """
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    peer, _ = server.accept()
    head = peer.recv(65536)
    if b"/events" in head:
        peer.sendall(b"HTTP/1.1 200 OK\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n5\\r\\nfirst\\r\\n")
        continue
    peer.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n%b" % (len(head), head))
    peer.close()
"""


@dataclass(kw_only=True)
class Front:
    """Caddy, and the gateway behind it."""

    gateway: Gateway
    port: int
    trust: ssl.SSLContext

    def client(self, host: str) -> httpx.Client:
        """As one whose DNS knows the host: no test can make that so."""

        def name(request: httpx.Request) -> None:
            request.extensions["sni_hostname"] = host

        return httpx.Client(
            verify=self.trust,
            timeout=30,
            base_url=f"https://127.0.0.1:{self.port}",
            headers={"Host": host},
            event_hooks={"request": [name]},
        )


@pytest.fixture
def front(make_gateway: Callable[..., Gateway], tmp_path: Path, reserve_port: Callable[[], int]) -> Iterator[Front]:
    need("caddy")
    config = tmp_path / "sandgate.toml"
    config.write_text('trusted_proxies = ["127.0.0.1"]\n')
    gateway = make_gateway(options=("--domain", DOMAIN, "--config", str(config)))
    gateway.start()
    port = reserve_port()
    environment = {
        "PATH": os.environ["PATH"],
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "SANDGATE_DOMAIN": DOMAIN,
        "SANDGATE_HTTPS_PORT": str(port),
        "SANDGATE_GATEWAY": gateway.url.removeprefix("http://"),
    }
    command = [shutil.which("caddy") or "caddy", "run", "--adapter", "caddyfile", "--config", str(CADDYFILE)]
    with (tmp_path / "log").open("wb") as log:
        caddy = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    authority = tmp_path / "data/caddy/pki/authorities/local/root.crt"
    try:
        wait_until(authority.is_file)
        trust = ssl.create_default_context(cafile=str(authority))
        # It makes its certificates while it accepts connections already.
        wait_until(lambda: all(shows_certificate(port, name, trust) for name in (DOMAIN, f"1-i.{DOMAIN}")))
        yield Front(gateway=gateway, port=port, trust=trust)
    finally:
        caddy.terminate()
        try:
            caddy.wait(30)
        finally:
            caddy.kill()
            caddy.wait()
    gateway.stop()
    assert gateway.remains() == []


def shows_certificate(port: int, name: str, trust: ssl.SSLContext) -> bool:
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=5) as plain,
            trust.wrap_socket(plain, server_hostname=name),
        ):
            return True
    except OSError:
        return False


@pytest.fixture
def served(front: Front, reserve_port: Callable[[], int]) -> tuple[Sandbox, str]:
    """A sandbox with a server, and the server's host."""
    sandbox = Sandbox.create(timeout=120, **front.gateway.sdk_options)
    number = reserve_port()
    sandbox.files.write("/tmp/events.py", EVENTS)
    sandbox.commands.run(f"python3 /tmp/events.py {number}", background=True, timeout=0)
    return sandbox, f"{number}-{sandbox.sandbox_id}.{DOMAIN}"


def test_ports_are_reached_by_https(front: Front, served: tuple[Sandbox, str]) -> None:
    _, host = served
    with front.client(host) as client:
        head = client.get("/a%2Fb?c").text
        assert head.startswith("GET /a%2Fb?c HTTP/1.1\r\n")
        assert f"Host: {host}\r\n" in head
        assert "X-Forwarded-Proto: https\r\n" in head
        assert "X-Forwarded-For: 127.0.0.1, 127.0.0.1\r\n" in head
        with client.stream("GET", "/events") as stream:
            assert next(stream.iter_raw()) == b"first", "the proxy holds events back"


def test_kill_cuts_a_stream_through_the_proxy(front: Front, served: tuple[Sandbox, str]) -> None:
    """R13."""
    version = subprocess.run(["caddy", "version"], capture_output=True, text=True, check=True, timeout=20).stdout
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < (2, 8):
        pytest.skip(f"Caddy {version.strip()} passes an answer that was cut off as a whole one")
    sandbox, host = served
    with front.client(host) as client:
        with client.stream("GET", "/events") as stream:
            pieces = stream.iter_raw()
            assert next(pieces) == b"first"
            sandbox.kill()
            with pytest.raises(httpx.TransportError):
                list(pieces)
        gone = client.get("/")
        assert (gone.status_code, gone.json()["message"]) == (502, "The sandbox was not found")


def test_control_plane_answers_on_the_domain_itself(front: Front) -> None:
    with front.client(DOMAIN) as client:
        reply = client.get("/v2/sandboxes", headers={"X-API-Key": front.gateway.api_key})
        assert (reply.status_code, reply.json()) == (200, [])
