"""What e2b 2.34.0 makes of a gateway: one line of JSON for each step, read by ``test_client.py``.

Runs in the environment of the SDK and imports nothing else. The same script runs on a gateway with the profile and on one
without it; what it reports is compared there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from e2b import Sandbox, SandboxQuery

Step = Callable[[], Any]


def report(name: str, step: Step) -> Any:
    """The outcome of a step; an exception is told by its class."""
    try:
        outcome = step()
    except Exception as error:
        outcome = type(error).__name__
    print(json.dumps({"step": name, "outcome": outcome}), flush=True)
    return outcome


def create(**options: Any) -> Sandbox:
    return Sandbox.create("base", timeout=600, metadata={"made-by": "client é"}, envs={"A": "create"}, **options)


sandbox = create()
files, commands = sandbox.files, sandbox.commands

report("version", lambda: sandbox._envd_version.base_version)
report("token is the key", lambda: sandbox._envd_access_token == os.environ["E2B_API_KEY"])
report("domain", lambda: sandbox.sandbox_domain)
report("where it is", lambda: sandbox.get_info().metadata.get("e2b.agents.kruise.io/sandbox-ip"))
report("metadata", lambda: sandbox.get_info().metadata["made-by"])
report("state", lambda: sandbox.get_info().state.value)
report("is running", sandbox.is_running)


def found(query: SandboxQuery | None) -> bool:
    return sandbox.sandbox_id in {each.sandbox_id for each in Sandbox.list(query).next_items()}


report("list without a filter", lambda: found(None))
report("list by metadata", lambda: found(SandboxQuery(metadata={"made-by": "client é"})))
report("list by other metadata", lambda: found(SandboxQuery(metadata={"made-by": "client"})))

report("command", lambda: commands.run("echo $A; id -un; pwd").stdout)
report("command's variables", lambda: commands.run("echo $A", envs={"A": "request"}).stdout)
report("command of root", lambda: commands.run("id -un", user="root").stdout)
report("command without a limit", lambda: commands.run("echo ran", timeout=0).stdout)
report("command with a long limit", lambda: commands.run("echo ran", timeout=120).stdout)
report("command with input", lambda: commands.run("echo ran", stdin=True, background=True).wait().stdout)
report("command that fails", lambda: commands.run("exit 3"))
report("command past its limit", lambda: commands.run("sleep 20", timeout=1))
report("command in the background", lambda: commands.run("echo ran", background=True).wait().stdout)
report("command that is left", lambda: commands.run("sleep 1", background=True).disconnect())
report("command of git", lambda: sandbox.git.init("/tmp/repository", timeout=60).exit_code)
report("command in no folder", lambda: commands.run("true", cwd="/none"))
report("callbacks", lambda: (lines := [], commands.run("echo out", on_stdout=lines.append), lines)[2])

report("write", lambda: files.write("d/../hello.txt", "text").path)
report("write several", lambda: [i.name for i in files.write_files([{"path": p, "data": "x"} for p in ("a/b", "a/c")])])
report("write as root", lambda: files.write("root.txt", "text", user="root").path)
report("write with compression", lambda: files.write("zipped", "text", gzip=True).name)
report("write with metadata", lambda: files.write("m", "text", metadata={"a": "b"}).metadata)
report("read bytes", lambda: files.read("hello.txt", format="bytes").decode())
report("read a stream", lambda: b"".join(files.read("hello.txt", format="stream")).decode())
report("read", lambda: files.read("~/hello.txt"))
report("read nothing", lambda: files.read("none"))
report("read a folder", lambda: files.read("/tmp"))
report("exists", lambda: [files.exists("hello.txt"), files.exists("none")])
report("info", lambda: [files.get_info("hello.txt").path, files.get_info("hello.txt").metadata])
report("list", lambda: [entry.path for entry in files.list("/home/user/a")])
report("list nothing", lambda: files.list("none"))
report("list too deep", lambda: len(files.list("a", depth=101)))
report("make a folder", lambda: [files.make_dir("made/it"), files.make_dir("made/it")])

report("set timeout", lambda: sandbox.set_timeout(61))
report("set timeout of nothing", lambda: Sandbox.set_timeout("i00000000000000000000", 60))
report("other lifecycle", lambda: create(lifecycle={"on_timeout": "pause"}).kill())
report("network rules", lambda: create(network={"deny_out": ["0.0.0.0/0"]}).kill())

report("kill", sandbox.kill)
report("kill again", sandbox.kill)
report("is running when gone", sandbox.is_running)
report("info when gone", sandbox.get_info)
report("read when gone", lambda: files.read("hello.txt"))
report("command when gone", lambda: commands.run("true"))


foreign = os.environ["FOREIGN_KEY"]


def with_foreign_key() -> list[Any]:
    made = Sandbox.create("base", api_key=foreign, validate_api_key=False)
    try:
        return [made._envd_access_token == foreign, made.commands.run("echo ran").stdout, made.kill()]
    finally:
        made.kill()


report("key of another form", with_foreign_key)
