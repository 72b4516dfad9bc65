"""The portable bundle in images of every kind: nothing of an image is needed, and nothing of it can get in the way."""

from __future__ import annotations

import asyncio

import pytest

from sandgate_bundle import MOUNT, UNSET
from sandgate_testing.agent_process import eventually
from sandgate_testing.engine import docker


@pytest.mark.parametrize("root", ["debian", "busybox", "musl"])
async def test_agent_runs_commands_in_an_image(root, images, contained):
    async with contained(getattr(images, root)()) as agent:
        output = await agent.sh("id -u; exit 7")
        assert (output.text, output.exit_code) == ("1000\n", 7)


async def test_agent_runs_in_an_image_that_has_no_file_at_all(images, contained, bundle):
    """The one program there is then is the bundle's own."""
    program, *arguments = bundle.command()[:-1]
    async with contained(images.empty()) as agent:
        output = await agent.run(program, *arguments, "-c", "import os; print(os.getuid(), os.listdir('/'))")
        assert output.exit_code == 0, output.stderr
        assert output.text.startswith("1000 [")


async def test_missing_shell_is_exit_status_127_and_says_so(images, contained):
    """P4: what the image does not have is what a shell would say of it."""
    async with contained(images.busybox()) as agent:
        output = await agent.run("/bin/bash", "-l", "-c", "true")
        assert output.exit_code == 127
        assert output.stderr == b"/bin/bash: No such file or directory\n"


async def test_commands_see_nothing_of_how_the_agent_is_started(images, contained):
    async with contained(images.busybox()) as agent:
        output = await agent.sh("env; cat /proc/self/maps")
        assert "LD_" not in output.text
        assert "PYTHON" not in output.text
        assert MOUNT not in output.text


async def test_variables_of_an_image_do_not_reach_the_agents_loader(images, contained):
    """A library that cannot be loaded would be complained about, or end the agent, before it could say anything."""
    changes = ["ENV LD_PRELOAD=/bin/busybox", "ENV LD_LIBRARY_PATH=/bin", "ENV LD_DEBUG=all", "ENV PYTHONHOME=/tmp"]
    async with contained(images.busybox(*changes)) as agent:
        environment = (await agent.sh("tr '\\0' '\\n' </proc/1/environ", user="root")).text
        assert not {line.partition("=")[0] for line in environment.splitlines()} & set(UNSET)
        assert "LD_" not in agent.log_text()
        assert agent.log_text().count("preload") == 0


async def test_image_with_another_user_and_a_closed_root_file_system(images, contained):
    image = images.busybox("USER 1234:1234", "WORKDIR /tmp")
    async with contained(image, "--read-only") as agent:
        output = await agent.sh("id -u; touch /file || echo closed")
        assert output.text == "1000\nclosed\n"


async def test_bundle_cannot_be_changed_by_root_of_the_sandbox(images, contained):
    async with contained(images.busybox()) as agent:
        output = await agent.sh(
            f"touch {MOUNT}/new; rm -f {MOUNT}/bin/python3; cp /bin/sh {MOUNT}/bin/python3; true", user="root"
        )
        assert output.stderr.count(b"Read-only file system") == 3


async def test_first_process_reaps_what_others_leave_to_it(images, contained):
    """The engine starts programs beside the agent's; nobody but process 1 is there for their orphans."""
    async with contained(images.busybox()) as agent:
        docker("exec", agent.container, "/bin/sh", "-c", "(sleep 0.2 &) ; (sleep 0.3 &)")
        await asyncio.sleep(0.4)
        assert (await agent.sh("ps -o stat,args | grep -c '^Z' || true")).text == "0\n"
        output = await agent.sh("exit 5")
        assert output.exit_code == 5, "the agent's own programs are not reaped away from it"


async def test_first_process_cannot_be_killed_or_stopped_from_inside(images, contained):
    async with contained(images.busybox()) as agent:
        assert (await agent.sh("kill -KILL 1; kill -STOP 1; sleep 0.2; echo on", user="root")).text == "on\n"


async def test_end_of_the_agent_ends_the_container(images, contained):
    async with contained(images.busybox()) as agent:
        docker("kill", "-s", "TERM", agent.container)
        assert await asyncio.to_thread(agent.process.wait, 30) == 0
        await eventually(lambda: not docker("ps", "-aq", "--filter", f"name={agent.container}").stdout)


async def test_sudo_starts_the_bundles_interpreter(images, contained):
    """U9, where the image has neither an interpreter nor a sudo, and its variables would mislead the loader."""
    async with contained(images.busybox()) as agent:
        output = await agent.sh("LD_PRELOAD=/none sudo sh -c 'id -u; env'")
        assert (output.exit_code, output.stderr) == (0, b"")
        assert output.text.startswith("0\n")
        assert "LD_" not in output.text
