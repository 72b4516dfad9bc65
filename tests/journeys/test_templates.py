"""What the SDK learns about templates (C24)."""

from __future__ import annotations

from e2b import Template

from sandgate_testing.gateway import Gateway


def test_template_exists_says_which_are_there(gateway: Gateway) -> None:
    options = {"api_url": gateway.url, "api_key": gateway.api_key}
    assert Template.exists("base", **options) is True
    assert Template.exists("no-such-template", **options) is False
