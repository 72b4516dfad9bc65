"""Every rule about wire, users and commands has a test that names it (behaviour.md 1 to 6 and 15.2).

Tests name rules in docstrings and comments, alone or as a range such as A11-A14. A rule that is not kept stands here with
the reason, and in docs/compatibility.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]

#: Letter to number of the last rule.
SECTIONS = {"W": 15, "U": 9, "P": 33, "O": 17, "T": 11, "A": 30, "X": 19}
#: Rules of the level MAY, and those of other parts.
OPTIONAL = {"W15", "P8", "P9", "T5", "A1", "A19", "X15", "X18", "X19"}
NOT_KEPT = {
    "P7": "a sandbox has no control groups of its own to divide; commands are the first that the kernel kills (P6)",
}
RULES = [
    rule
    for letter, last in SECTIONS.items()
    for number in range(1, last + 1)
    if (rule := f"{letter}{number}") not in OPTIONAL | NOT_KEPT.keys()
]


@pytest.fixture(scope="module")
def named() -> set[str]:
    found: set[str] = set()
    for folder in ("tests", "plugins"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            if path != Path(__file__) and "test" in str(path.relative_to(REPOSITORY)):
                found |= rules_in(path.read_text())
    return found


def rules_in(text: str) -> set[str]:
    found = set(re.findall(r"\b[WUPOTAX]\d+\b", text))
    for letter, first, last in re.findall(r"\b([WUPOTAX])(\d+) ?(?:-|to) ?\1(\d+)\b", text):
        found |= {f"{letter}{number}" for number in range(int(first), int(last) + 1)}
    return found


@pytest.mark.parametrize("rule", RULES)
def test_rule_has_a_test_that_names_it(rule: str, named: set[str]) -> None:
    assert rule in named


def test_ranges_are_understood() -> None:
    assert rules_in("A2-A4, X4 to X6; P1, B03") == {"A2", "A3", "A4", "X4", "X5", "X6", "P1"}


@pytest.mark.parametrize("rule", NOT_KEPT)
def test_rule_that_is_not_kept_is_documented(rule: str) -> None:
    assert rule in (REPOSITORY / "docs/compatibility.md").read_text()
