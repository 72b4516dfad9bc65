"""Every rule has a test that names it (behaviour.md 1 to 14 and 15.2; 15.1 is the profile ROCK, of which it is a part).

Tests name rules in docstrings and comments, alone or as a range such as A11-A14. A rule that is not kept stands here with
the reason, and in docs/compatibility.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]

#: Letter to number of the last rule.
SECTIONS = {
    "W": 15,
    "U": 9,
    "P": 33,
    "O": 17,
    "T": 11,
    "A": 30,
    "F": 48,
    "D": 38,
    "H": 8,
    "S": 12,
    "R": 17,
    "C": 60,
    "V": 4,
    "X": 19,
}
#: Rules of the level MAY that nothing here need show, and those of a client.
OPTIONAL = {
    "W15": "limits of messages are settings",
    "P8": "no command is outside the groups of commands",
    "P9": "each command has a group of its own, which X1 needs",
    "T5": "0 is no limit",
    "A1": "invalid_argument",
    "A19": "invalid_argument",
    "F24": "limits of lists are settings",
    "F47": "the kernel's limit of watches holds",
    "D30": "400",
    "D31": "what the kernel takes",
    "D37": "files are not composed",
    "D38": "files are not composed",
    "H5": "the core's own call brings an agent up",
    "H6": "the core's own call brings an agent up",
    "C26": "offered",
    "X15": "a client's",
    "X18": "a client's, and who may be root is the image's matter",
    "X19": "a client's",
}
NOT_KEPT: dict[str, str] = {}
RULES = [
    rule
    for letter, last in SECTIONS.items()
    for number in range(1, last + 1)
    if (rule := f"{letter}{number}") not in OPTIONAL.keys() | NOT_KEPT.keys()
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
    found = set(re.findall(r"\b[WUPOTAFDHSRCVX]\d+\b", text))
    for letter, first, last in re.findall(r"\b([WUPOTAFDHSRCVX])(\d+) ?(?:-|to) ?\1(\d+)\b", text):
        found |= {f"{letter}{number}" for number in range(int(first), int(last) + 1)}
    return found


@pytest.mark.parametrize("rule", RULES)
def test_rule_has_a_test_that_names_it(rule: str, named: set[str]) -> None:
    assert rule in named


def test_ranges_are_understood() -> None:
    assert rules_in("A2-A4, X4 to X6; P1, B03") == {"A2", "A3", "A4", "X4", "X5", "X6", "P1"}


def test_rule_that_is_not_kept_is_documented() -> None:
    documented = rules_in((REPOSITORY / "docs/compatibility.md").read_text())
    assert NOT_KEPT.keys() <= documented
