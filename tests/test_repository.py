"""What every clone must be: small, self-contained, typed, its documents leading somewhere."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from sandgate_plugin_api import API_VERSION

ROOT = Path(__file__).resolve().parents[1]
LARGEST = 300_000

# Put together here, because this file is looked through as well. Packages come by name from wherever a machine is set
# up to get them; an address in the repository would send somebody elsewhere.
REGISTRIES = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("npmjs", "org"),
        ("npmjs", "com"),
        ("crates", "io"),
        ("deb", "debian", "org"),
        ("archive", "ubuntu", "com"),
        ("proxy", "golang", "org"),
        ("repo1", "maven", "org"),
    )
]


def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
    # A file that is deleted and not yet committed is still listed.
    return [path for name in listing.decode().split("\0") if name and (path := ROOT / name).is_file()]


TRACKED = tracked()
PACKAGES = sorted(
    path.parent
    for path in TRACKED
    if path.name == "__init__.py"
    and path.parent.name.startswith("sandgate")
    and not (path.parents[1] / "__init__.py").exists()
)
DOCUMENTS = [path for path in TRACKED if path.suffix == ".md"]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_tracked_file_names_a_package_registry() -> None:
    found = [
        f"{relative(path)}: {name}" for path in TRACKED for name in REGISTRIES if name.encode() in path.read_bytes()
    ]
    assert found == []


def test_no_lock_file_of_another_ecosystem_is_tracked() -> None:
    """The SDKs under test are installed by name and version; a lock would carry addresses."""
    names = {"package-lock.json", "yarn.lock", "pnpm-lock.yaml", "uv.lock", "poetry.lock"}
    assert [relative(path) for path in TRACKED if path.name in names] == []


def test_no_tracked_file_is_large() -> None:
    assert [relative(path) for path in TRACKED if path.stat().st_size > LARGEST] == []


def test_nothing_generated_is_tracked() -> None:
    out_of_place = re.compile(
        r"(^|/)(__pycache__|\.venv|\.cache|node_modules|dist|build)/|\.(py[co]|egg-info|log|sqlite3?|db)$"
    )
    assert [relative(path) for path in TRACKED if out_of_place.search(relative(path))] == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_package_is_typed(package: Path) -> None:
    assert (package / "py.typed").is_file()


@pytest.mark.parametrize(
    "package", [path for path in PACKAGES if path.name != "sandgate_api"], ids=lambda path: path.name
)
def test_package_says_what_it_offers(package: Path) -> None:
    """An ``__all__``, and in it only what the package has: a name, or a module of its own."""
    source = ast.parse((package / "__init__.py").read_text())
    assert ast.get_docstring(source), "the package says nothing about itself"
    offered = [
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
    ]
    offered += [
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id == "__all__"
        and node.value
    ]
    assert len(offered) == 1, "no __all__, or several"
    bound = {
        alias.asname or alias.name
        for n in ast.walk(source)
        if isinstance(n, ast.Import | ast.ImportFrom)
        for alias in n.names
    }
    bound |= {
        node.name for node in source.body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
    bound |= {n.id for n in ast.walk(source) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    modules = {path.stem for path in package.iterdir()}
    assert set(offered[0]) - bound - modules == set()


def test_distributions_have_one_version() -> None:
    versions = {
        relative(path): tomllib.loads(path.read_text())["project"]["version"]
        for path in TRACKED
        if path.name == "pyproject.toml"
    }
    # What plugins are made against has a version of its own: it changes only when they must.
    api = versions.pop("plugins/api/pyproject.toml")
    assert len(set(versions.values())) == 1, versions
    assert int(api.partition(".")[0]) == API_VERSION


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_links_of_documents_lead_somewhere(document: Path) -> None:
    """Links inside the repository: the file is there, and the heading too where one is named."""
    broken = [
        target
        for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", without_code(document.read_text()))
        if "://" not in target and not target.startswith("mailto:") and not leads_somewhere(document, target)
    ]
    assert broken == []


def leads_somewhere(document: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    file = (document.parent / name).resolve() if name else document
    if not file.exists() or not file.is_relative_to(ROOT):
        return False
    return not anchor or anchor in anchors_of(file)


def anchors_of(document: Path) -> set[str]:
    """Headings the way code hosts turn them into anchors: lower case, punctuation dropped, spaces to hyphens."""
    headings = re.findall(r"^#+ +(.*?) *#*$", without_code(document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_paths_in_documents_exist(document: Path) -> None:
    """A file of the repository that a document names in code style by its path from the top."""
    tops = {path.relative_to(ROOT).parts[0] for path in TRACKED if path.relative_to(ROOT).parts[1:]}
    named = re.findall(r"`([\w.\-]+(?:/[\w.\-]+)+/?)`", document.read_text())
    missing = [name for name in named if name.split("/")[0] in tops and not (ROOT / name).exists()]
    assert missing == []


def test_make_targets_named_in_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for document in DOCUMENTS for name in re.findall(r"`make ([a-z]+)", document.read_text())}
    assert named - targets == set()
