"""What the first program of a container makes of the accounts and the profile of an image; no engine is needed."""

import subprocess

import pytest

from sandgate_plugin_docker.enter import accounts_with_user, profile_around

ROOT = "root:x:0:0:root:/root:/bin/bash\n"


@pytest.mark.parametrize(
    ("users", "groups", "wanted", "new_users", "new_groups"),
    [
        # Nothing at all.
        (
            "",
            "",
            {},
            "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n",
            "root:x:0:\nuser:x:1000:\n",
        ),
        # It is there already, whatever its number.
        (ROOT + "user:x:7:8::/u:/bin/x\n", "root:x:0:\n", {}, ROOT + "user:x:7:8::/u:/bin/x\n", "root:x:0:\n"),
        # The last line has no end.
        (
            ROOT.rstrip(),
            "root:x:0:",
            {},
            ROOT + "user:x:1000:1000::/home/user:/bin/sh\n",
            "root:x:0:\nuser:x:1000:\n",
        ),
        # Its number is another account's, and its group's is another's again.
        (
            ROOT + "node:x:1000:1000::/home/node:/bin/sh\n",
            "root:x:0:\nnode:x:1000:\nx:x:1001:\n",
            {},
            ROOT + "node:x:1000:1000::/home/node:/bin/sh\nuser:x:1001:1002::/home/user:/bin/sh\n",
            "root:x:0:\nnode:x:1000:\nx:x:1001:\nuser:x:1002:\n",
        ),
        # The image asks for numbers.
        (
            ROOT,
            "root:x:0:\nstaff:x:50:\n",
            {"uid": 4321, "gid": 50},
            ROOT + "user:x:4321:50::/home/user:/bin/sh\n",
            "root:x:0:\nstaff:x:50:\nuser:x:50:\n",
        ),
        # A group of the name, and lines that are none.
        (
            ROOT + "# a comment\n+::::::\n",
            "root:x:0:\nuser:x:77:\n",
            {},
            ROOT + "# a comment\n+::::::\nuser:x:1000:77::/home/user:/bin/sh\n",
            "root:x:0:\nuser:x:77:\n",
        ),
    ],
)
def test_user_is_put_behind_what_an_image_has(users, groups, wanted, new_users, new_groups):
    assert accounts_with_user(users, groups, wanted=wanted, shell="/bin/sh") == (new_users, new_groups)


@pytest.mark.parametrize(
    "profile",
    [
        "PATH=/usr/bin\nexport PATH KIND=image\n",
        "export KIND=image; echo noise; echo noise >&2",
        "cat <<END\nnoise\nEND\nKIND=image; export KIND\n",
        "export KIND=image\nreturn 3\n",
    ],
)
@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
def test_profile_sets_what_it_sets_except_for_path_and_says_nothing(tmp_path, profile, shell):
    """B17."""
    file = tmp_path / "profile"
    file.write_text(profile_around(profile))
    script = f'. {file}; echo "$PATH $KIND ${{_given_path-unset}}"'
    done = subprocess.run(
        [shell, "-c", script], env={"PATH": "/opt/x:/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    assert done.stdout + done.stderr == "/opt/x:/usr/bin:/bin image unset\n"


def test_profile_is_put_around_once():
    once = profile_around("x=1\n")
    assert profile_around(once) == once


def test_empty_profile_is_one_too(tmp_path):
    file = tmp_path / "profile"
    file.write_text(profile_around(""))
    assert subprocess.run(["/bin/sh", "-c", f". {file}"], check=True, capture_output=True).stdout == b""
