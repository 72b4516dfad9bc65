"""What the edge counts has few labels, whatever clients and servers in sandboxes say."""

from __future__ import annotations

from sandgate_edge.telemetry import Telemetry


def counted(telemetry: Telemetry) -> dict[tuple[str, ...], float]:
    (family,) = [family for family in telemetry.families(streams=0) if family.name == "sandgate_edge_requests"]
    return {tuple(series.labels): series.value for series in family.series}


def test_methods_and_statuses_that_http_does_not_know_are_one():
    telemetry = Telemetry()
    for number in range(100, 1000):
        telemetry.answered("port", "GET", code=str(number), seconds=0.1)
    for method in ("BREW", "WHEN", "A" * 1000):
        telemetry.answered("port", method, code="200", seconds=None)
    telemetry.answered("/process.Process/Start", "POST", code="deadline_exceeded", seconds=0.1)
    found = counted(telemetry)
    assert sum(found.values()) == 904
    assert found["port", "other", "200"] == 3
    assert found["port", "GET", "404"] == found["port", "GET", "499"] == 1
    assert found["port", "GET", "other"] > 800
    assert found["/process.Process/Start", "POST", "deadline_exceeded"] == 1
    assert len(found) < 80
