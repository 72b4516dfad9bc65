"""Any image becomes a sandbox: what it has is used, what it lacks is made, and it stays as it was."""

import pytest

from sandgate_testing.engine import docker


@pytest.fixture
def over(gateway):
    """A backend whose template is made over an image."""

    def over(image: str, **settings: object):
        return gateway.backend(templates={"base": {"image": image, **settings}})

    return over


async def test_busybox_without_accounts_or_profile_becomes_a_sandbox(gateway, over, run):
    image = gateway.images.busybox()
    async with over(image) as backend:
        placement = await gateway.create(backend)
        assert await run(placement, "id -un; id -u; pwd; ls -ld /tmp | cut -c1-10", shell="/bin/sh") == (
            0,
            "user\n1000\n/home/user\ndrwxrwxrwt\n",
        )
        assert await run(placement, "echo $HOME", "root", shell="/bin/sh") == (0, "/root\n")
        code, text = await run(placement, "true")
        # The 127 of a shell that is not there, and why.
        assert code == 127
        assert "/bin/bash" in text
    assert docker("run", "--rm", image, "/bin/ls", "/home", check=False).returncode != 0


async def test_musl_image_whose_uid_1000_is_another_account(gateway, over, run):
    async with over(gateway.images.musl()) as backend:
        placement = await gateway.create(backend)
        code, text = await run(placement, "id -un; id -u; grep -c :1000: /etc/passwd", shell="/bin/sh")
        assert (code, text) == (0, "user\n1001\n1\n")


async def test_empty_image_has_an_agent_that_serves_files(gateway, over, run):
    async with over(gateway.images.empty()) as backend:
        placement = await gateway.create(backend)
        assert (await run(placement, "true"))[0] == 127


async def test_env_workdir_and_user_of_an_image_hold(gateway, over, run):
    image = gateway.images.busybox(
        'ENV GREETING="hello world"',
        "ENV PATH=/opt/tool/bin:/bin",
        "ENV LD_PRELOAD=/none.so",
        "WORKDIR /srv",
        "USER 4321",
    )
    async with over(image, envs={"MORE": "1"}) as backend:
        template = await backend.find_template("base")
        assert template.workdir == "/srv"
        assert template.envs == {"GREETING": "hello world", "LD_PRELOAD": "/none.so", "MORE": "1"}
        placement = await gateway.create(backend)
        code, text = await run(placement, "id -u; pwd; echo $GREETING $MORE; echo $PATH", shell="/bin/sh")
        assert code == 0
        assert text.endswith("4321\n/srv\nhello world 1\n/run/sandgate/sudo/bin:/opt/tool/bin:/bin\n")


async def test_named_user_of_an_image_is_the_default_one(gateway, over, run):
    async with over(gateway.images.musl("USER other")) as backend:
        template = await backend.find_template("base")
        assert template.default_user == "other"
        placement = await gateway.create(backend)
        # Its home is not in the image.
        assert await run(placement, "id -un; pwd; touch f", shell="/bin/sh") == (0, "other\n/home/other\n")
    async with over(gateway.images.musl("USER other"), user="root") as backend:
        assert (await backend.find_template("base")).default_user == "root"


async def test_login_shell_keeps_the_path_of_image_and_call(gateway, over, run):
    """B17: additions survive for both users, a call's PATH is honoured, a talking profile stays out of the output."""
    image = gateway.images.debian("ENV PATH=/opt/tool/bin:/usr/local/bin:/usr/bin:/bin")
    async with over(image) as backend:
        placement = await gateway.create(backend)
        assert await run(placement, "echo 'echo noise from the profile' > /etc/profile.d/noise.sh", "root") == (0, "")
        for user in ("user", "root"):
            assert await run(placement, "echo $PATH", user) == (
                0,
                "/run/sandgate/sudo/bin:/opt/tool/bin:/usr/local/bin:/usr/bin:/bin\n",
            )
            assert await run(placement, "echo $PATH", user, PATH="/opt/z:/usr/bin:/bin") == (
                0,
                "/opt/z:/usr/bin:/bin\n",
            )
        # A second start on the files finds the profile as it is.
        handle = await backend.pause(placement.handle, memory=False)
        await backend.resume(handle)
        assert await run(placement, "grep -c _given_path= /etc/profile", "root") == (0, "1\n")


async def test_read_only_root_has_accounts_a_home_and_room_for_files(gateway, over, run):
    async with over(gateway.images.debian(), read_only=True) as backend:
        placement = await gateway.create(backend)
        assert await run(placement, "id -un; touch f /tmp/x && echo made; touch /usr/x 2>&1 || echo closed") == (
            0,
            "user\nmade\ntouch: cannot touch '/usr/x': Read-only file system\nclosed\n",
        )
        assert (await run(placement, "touch /etc/x", "root"))[0] == 1
        assert await run(placement, "echo $PATH | cut -d: -f1", "root") == (0, "/run/sandgate/sudo/bin\n")
        handle = await backend.pause(placement.handle, memory=False)
        resumed = await backend.resume(handle)
        assert await run(resumed, "ls /home/user", "user") == (0, "f\n")


async def test_sudo_is_the_agents_own_and_can_be_left_out(gateway, over, run):
    image = gateway.images.debian()
    async with over(image) as backend:
        placement = await gateway.create(backend)
        assert await run(placement, "sudo id -u") == (0, "0\n")
    async with over(image, sudo=False) as backend:
        placement = await gateway.create(backend)
        assert (await run(placement, "sudo id -u"))[0] == 127


async def test_set_user_id_programs_gain_nothing_unless_asked_for(gateway, over, run):
    image = gateway.images.debian()
    command = "cp /usr/bin/id /tmp/sid && chmod u+s /tmp/sid"
    for allowed, uid in ((False, "1000"), (True, "0")):
        async with over(image, set_user_id=allowed) as backend:
            placement = await gateway.create(backend)
            assert await run(placement, command, "root") == (0, "")
            assert await run(placement, "/tmp/sid | grep -o 'euid=0' | wc -l") == (0, "1\n" if uid == "0" else "0\n")


async def test_mounts_are_read_only_unless_told_otherwise(gateway, over, run, tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "data").write_text("of the host\n")
    mounts = [{"source": str(tmp_path / "shared"), "target": "/data"}]
    async with over(gateway.images.debian(), mounts=mounts) as backend:
        placement = await gateway.create(backend)
        assert await run(placement, "cat /data/data; touch /data/x 2>/dev/null || echo closed", "root") == (
            0,
            "of the host\nclosed\n",
        )


async def test_limits_of_a_template_hold(gateway, over, run):
    async with over(gateway.images.debian(), memory_mb=64, pids=64, cpu_count=1) as backend:
        placement = await gateway.create(backend)
        code, _ = await run(placement, "python3 -c 'b = bytearray(200 << 20); print(len(b))'")
        # Killed.
        assert code == -1
        _, text = await run(placement, "for i in $(seq 100); do sleep 5 & done 2>&1 | grep -c -i 'resource' ; true")
        assert "0" not in text.split()
        host = docker("inspect", "-f", "{{.HostConfig.NanoCpus}}", str(placement.handle["container"])).stdout
        assert host == "1000000000\n"
