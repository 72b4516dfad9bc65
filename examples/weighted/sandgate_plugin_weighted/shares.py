"""Who is next: backends in proportion to their weights.

Smooth weighted round-robin rather than chance: with weights 3 and 1 the second backend gets every fourth create, not four in
a row. Each pick lets every backend gain its weight, and the one that is picked loses the sum of all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from sandgate_errors import FailedPrecondition

__all__ = ["Shares"]

_ALL_OTHERS = "*"


class Shares:
    """The weights of every template, and whose turn it is."""

    def __init__(self, templates: Mapping[str, Mapping[str, float]]) -> None:
        self._weights = templates
        self._credit = {template: dict.fromkeys(weights, 0.0) for template, weights in templates.items()}

    @classmethod
    def read(cls, settings: Mapping[str, object]) -> Shares:
        """The shares of a ``[plugins.weighted]`` table. Raises FailedPrecondition with one line for the operator."""
        if unknown := sorted(settings.keys() - {"templates"}):
            raise FailedPrecondition(f"there is no setting '{unknown[0]}'")
        templates = settings.get("templates", {})
        if not isinstance(templates, Mapping):
            raise FailedPrecondition("'templates' is not a table")
        return cls({str(name): _weights(str(name), given) for name, given in templates.items()})

    @property
    def backends(self) -> frozenset[str]:
        """Every backend that has a weight somewhere."""
        return frozenset(backend for weights in self._weights.values() for backend in weights)

    def order(self, template: str) -> tuple[str, ...]:
        """The backends to try for one create: the one whose turn it is, then the others by their weight. Empty: any."""
        name = template if template in self._weights else _ALL_OTHERS
        weights = self._weights.get(name)
        if not weights:
            return ()
        first = self._turn(name)
        rest = sorted(weights.keys() - {first}, key=lambda backend: (-weights[backend], backend))
        return (first, *rest)

    def _turn(self, name: str) -> str:
        weights, credit = self._weights[name], self._credit[name]
        for backend, weight in weights.items():
            credit[backend] += weight
        chosen = max(credit, key=lambda backend: (credit[backend], weights[backend]))
        credit[chosen] -= sum(weights.values())
        return chosen


def _weights(template: str, given: object) -> dict[str, float]:
    if not isinstance(given, Mapping) or not given:
        raise FailedPrecondition(f"'{template}' has no table of weights")
    for backend, weight in given.items():
        right = isinstance(weight, int | float) and not isinstance(weight, bool) and math.isfinite(weight)
        if not right or weight < 0:
            raise FailedPrecondition(f"the weight of '{backend}' for '{template}' is not a number from 0 up")
    if not any(given.values()):
        raise FailedPrecondition(f"every weight for '{template}' is 0")
    return {str(backend): float(weight) for backend, weight in given.items()}
