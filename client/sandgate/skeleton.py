"""``sandgate plugin new``: a distribution with a backend to begin with.

The files lie in ``skeleton_files`` as they will be, but for the plugin's name. What they make is a whole backend, on plain
subprocesses, which passes the suite that every backend passes; a test of ours holds them to that.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from string import Template

import click
from packaging.utils import canonicalize_name

from sandgate_errors import FailedPrecondition, InvalidArgument
from sandgate_plugin_api.loading import examine_all, installed_plugins
from sandgate_plugin_api.version import API_VERSION

__all__ = ["write"]

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_LONGEST_NAME = 32
#: Where each file goes; `$module` is the plugin's package.
_PLACES = {
    "pyproject.toml.txt": "pyproject.toml",
    "README.md.txt": "README.md",
    "init.py.txt": "$module/__init__.py",
    "backend.py.txt": "$module/backend.py",
    "box.py.txt": "$module/box.py",
    "py.typed.txt": "$module/py.typed",
    "test_suite.py.txt": "tests/test_suite.py",
}


def write(name: str, folder: Path | None) -> None:
    """Write the files and say what to do next. Raises InvalidArgument, FailedPrecondition."""
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise InvalidArgument(
            f"a backend's name has lower-case letters, digits and single hyphens, at most {_LONGEST_NAME}: not '{name}'"
        )
    distribution = f"sandgate-plugin-{name}"
    _check_free(name, distribution)
    folder = folder or Path(distribution)
    words = {
        "name": name,
        "distribution": distribution,
        "module": f"sandgate_plugin_{name.replace('-', '_')}",
        "backend": "".join(part.capitalize() for part in name.split("-")) + "Backend",
        "api": f"{API_VERSION}.0",
    }
    _make_empty(folder)
    source = resources.files("sandgate") / "skeleton_files"
    for file, place in _PLACES.items():
        target = folder / Template(place).substitute(words)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(Template((source / file).read_text()).substitute(words))
    click.echo(f"wrote {folder}; next:\n\n    pip install -e '{folder}[test]'\n    python -m pytest {folder}")


def _check_free(name: str, distribution: str) -> None:
    """Raises FailedPrecondition for what an installed plugin is called: pip would put the new one in its place."""
    for plugin in examine_all(installed_plugins()):
        if name in {plugin.name, *plugin.backends} or canonicalize_name(plugin.distribution) == distribution:
            raise FailedPrecondition(
                f"'{name}' is taken by {plugin.distribution}, which is installed here: choose another name"
            )


def _make_empty(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise FailedPrecondition(f"{folder} is not empty: name another folder with --dir")
    except OSError as error:
        raise FailedPrecondition(f"{folder} cannot be made: {error.strerror or error}") from error
