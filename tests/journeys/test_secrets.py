"""No secret ever stands in a log, whatever was asked, by whom, and how it went."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import e2b
from e2b import Sandbox

from sandgate_testing.containers import agent_token_on_engine
from sandgate_testing.gateway import Gateway
from sandgate_testing.leftovers import sandboxes_of

ENV_SECRET = "s3cr3t-of-the-environment"
FILE_SECRET = "s3cr3t-of-a-file"
WRONG_KEY = "e2b_" + "f" * 40


def strings_of(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in strings_of(item)]
    return [value] if isinstance(value, str) else []


def agent_tokens(gateway: Gateway, isolation: str) -> list[str]:
    """What opens the agents of all sandboxes."""
    if isolation == "container":
        return [agent_token_on_engine(gateway.state_dir, name) for name in gateway.boxes()]
    return [token for box in sandboxes_of(gateway.state_dir).values() for token in tokens_in(box)]


def tokens_in(box: Path) -> list[str]:
    """From its record: the one long string that names no path."""
    record = json.loads((box / "record.json").read_text())
    return [text for text in strings_of(record) if len(text) >= 32 and "/" not in text and " " not in text]


def test_log_of_a_whole_journey_holds_no_secret(make_gateway: Callable[..., Gateway], isolation: str) -> None:
    gateway = make_gateway(options=("--log-level", "debug"))
    gateway.start()
    sandbox = Sandbox.create(envs={"PASSWORD": ENV_SECRET}, **gateway.sdk_options)
    other = Sandbox.create(**gateway.sdk_options)
    sandbox.commands.run("echo $PASSWORD", envs={"TOKEN": ENV_SECRET})
    with suppress(e2b.CommandExitException):
        sandbox.commands.run("echo $PASSWORD >&2; exit 3")
    sandbox.files.write("secret.txt", FILE_SECRET)
    assert sandbox.files.read("secret.txt") == FILE_SECRET
    url = sandbox.download_url("secret.txt", use_signature_expiration=300)
    sandbox.get_info()
    with suppress(e2b.SandboxException, e2b.AuthenticationException):
        Sandbox.create(**{**gateway.sdk_options, "api_key": WRONG_KEY})
    headers = {
        "E2b-Sandbox-Id": other.sandbox_id,
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": sandbox._envd_access_token,
    }
    for target in (gateway.url + "/files?path=secret.txt", url, url + "x"):
        with suppress(HTTPError):
            urlopen(Request(target, headers=headers if target is not url else {}), timeout=30).read()
    signature = url.split("signature=")[1].split("&")[0]
    tokens = agent_tokens(gateway, isolation)
    secrets = {
        "API key": gateway.api_key,
        "wrong key": WRONG_KEY,
        "access token": sandbox._envd_access_token,
        "other access token": other._envd_access_token,
        "internal token": (gateway.state_dir / "internal.token").read_text().strip(),
        "seed": (gateway.state_dir / "seed").read_text().strip(),
        "signature": signature,
        "environment": ENV_SECRET,
        "file": FILE_SECRET,
        **{f"agent token {number}": token for number, token in enumerate(tokens)},
    }
    assert len(tokens) >= 2
    assert sandbox.kill() is True
    assert other.kill() is True
    gateway.stop()
    log = gateway.log()
    assert log.count("\n") > 20
    assert [name for name, secret in secrets.items() if secret in log] == []
