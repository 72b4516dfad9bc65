"""A first program with the official E2B SDK: what ``sandgate demo`` runs against the gateway it has started.

Nothing here knows of sandgate. The SDK finds its gateway by three variables, E2B_API_URL, E2B_SANDBOX_URL and
E2B_API_KEY; set them to a gateway of your own and run this file with ``python demo_script.py``.
"""

import time

from e2b import CommandExitException, Sandbox, SandboxQuery

STARTED = time.monotonic()


def say(text: str) -> None:
    """One line with the time since the start, shown at once."""
    print(f"{time.monotonic() - STARTED:7.3f} s  {text}", flush=True)  # noqa: T201


def step(text: str) -> None:
    """What comes next."""
    print(f"\n{text}", flush=True)  # noqa: T201


def main() -> None:
    """One sandbox from its creation to its end."""
    step("Create a sandbox with metadata and environment variables")
    sandbox = Sandbox.create(timeout=120, metadata={"purpose": "demo"}, envs={"GREETING": "hello"})
    try:
        say(f"sandbox {sandbox.sandbox_id}")
        use(sandbox)
    finally:
        step("Kill it")
        say(f"killed: {sandbox.kill()}")
        say(f"still running: {sandbox.is_running()}")


def use(sandbox: Sandbox) -> None:
    """What one does with a sandbox."""
    show_info(sandbox)
    run_commands(sandbox)
    handle_files(sandbox)
    find_it_again(sandbox)


def show_info(sandbox: Sandbox) -> None:
    """What the gateway knows of it."""
    step("Ask about it")
    info = sandbox.get_info()
    say(f"template {info.template_id}, state {info.state.value}, ends at {info.end_at:%H:%M:%S} UTC")
    say(f"metadata {info.metadata}, {info.cpu_count} processors, {info.memory_mb} MiB of memory")


def run_commands(sandbox: Sandbox) -> None:
    """Commands that work, and one that does not."""
    step("Run a command with its own variables and working directory; its output arrives while it runs")
    sandbox.files.make_dir("work")
    result = sandbox.commands.run(
        'echo "$GREETING, $WHO, from $(basename "$PWD")"; for n in 1 2 3; do sleep 0.3; echo "line $n"; done',
        envs={"WHO": "world"},
        cwd="work",
        on_stdout=lambda text: say(f"| {text.rstrip()}"),
    )
    say(f"exit code {result.exit_code}, {len(result.stdout)} characters in all")

    step("Run a command that fails")
    try:
        sandbox.commands.run("echo 'no such luck' >&2; exit 3")
    except CommandExitException as error:
        say(f"CommandExitException: exit code {error.exit_code}, stderr {error.stderr!r}")


def handle_files(sandbox: Sandbox) -> None:
    """A file written, read, listed and looked at."""
    step("Write a file, read it, list its folder, look at it")
    sandbox.files.write("work/note.txt", "written through the SDK\n")
    say(f"content {sandbox.files.read('work/note.txt')!r}")
    say(f"folder holds {[entry.name for entry in sandbox.files.list('work')]}")
    entry = sandbox.files.get_info("work/note.txt")
    say(f"{entry.name}: {entry.size} bytes, {entry.permissions}, owner {entry.owner}")


def find_it_again(sandbox: Sandbox) -> None:
    """The list, filtered."""
    step("List the sandboxes by metadata")
    found = Sandbox.list(query=SandboxQuery(metadata={"purpose": "demo"})).next_items()
    say(
        f"found {[item.sandbox_id for item in found]}, this one among them: {sandbox.sandbox_id in {i.sandbox_id for i in found}}"
    )


if __name__ == "__main__":
    main()
