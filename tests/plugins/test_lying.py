"""The suite for backends notices what it is there for: each broken promise fails the test of that promise."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from sandgate_testing.backend_suite import run_backend_suite

pytestmark = pytest.mark.timeout(600)

LYING = (Path(__file__).parent / "lying.py").read_text()

#: Fault, as ``lying.py`` has it, and tests of the suite that must fail by it.
FAULTS: dict[str, tuple[str, ...]] = {
    "any name is a template": ("test_template_that_does_not_exist_is_not_found",),
    "aliases lead nowhere": ("test_template_is_found_by_each_of_its_names",),
    "a name breaks it": ("test_template_that_does_not_exist_is_not_found",),
    "metadata is read": ("test_metadata_is_never_a_reason_to_fail",),
    "names are refused late": ("test_name_that_cannot_be_one_is_refused_or_left",),
    "a name takes over": ("test_name_that_is_taken_is_refused_and_its_sandbox_stays",),
    "token in a command line": ("test_token_stands_in_no_command_line",),
    "blocks": ("test_event_loop_goes_on_in_all_that_a_sandbox_goes_through",),
    "not bound to its host": ("test_sandbox_that_is_not_bound_to_its_host_is_found_from_another",),
    "lacks nothing of what it says": (
        "test_commands_and_files_of_another_user",
        "test_input_ends",
        "test_metadata_is_kept_with_a_file",
        "test_tree_of_a_command_ends_with_it",
        "test_measurements_make_sense",
    ),
    "pauses nothing": ("test_agent_of_a_sandbox_paused_with_memory_does_not_answer",),
    "a cancelled resume ends it": ("test_cancelled_resume_leaves_it_running_or_paused",),
    "a cancelled snapshot is kept": ("test_cancelled_snapshot_keeps_nothing_and_leaves_the_sandbox_as_it_was",),
    "a snapshot ends processes": ("test_processes_go_on_over_a_snapshot",),
    "limits of a create": ("test_memory_beyond_the_limit_is_not_given_and_the_agent_lives",),
    "limits after a pause": ("test_limits_hold_over_a_pause",),
    "limits of a copy": ("test_limits_hold_for_what_is_made_from_a_snapshot",),
    "usage is impossible": ("test_usage_is_whole_and_possible",),
    "usage of what is gone": ("test_usage_of_one_that_is_gone_is_none_or_an_error_of_the_taxonomy",),
    "usage is always the same": (
        "test_memory_that_is_held_is_told_and_no_longer_when_it_is_let_go",
        "test_processor_time_is_told_and_of_this_sandbox_alone",
    ),
    "address of everybody": ("test_address_is_one_that_the_sandbox_has",),
    "address of another": ("test_no_two_sandboxes_have_one_address",),
    "address without a network": ("test_sandbox_that_is_on_no_network_has_no_address",),
    "address of what is gone": ("test_sandbox_that_is_gone_has_no_address",),
    "no rules": (
        "test_rules_hold_from_the_first_instruction",
        "test_rules_can_be_replaced_while_it_runs",
        "test_rules_of_a_paused_sandbox_can_be_replaced_or_stay",
        "test_rules_hold_after_the_gateway_has_started_again",
        "test_rules_by_name_are_kept_or_refused",
        "test_rules_of_one_that_is_gone_are_not_found",
    ),
}


@pytest.fixture
def suite(install: Callable[..., None], isolation: str, tmp_path: Path) -> Callable[..., str]:
    install("dist-lying", LYING, entry="lying")

    def run(fault: str, *tests: str) -> str:
        config = f'[backends.lying]\nisolation = "{isolation}"\nwarm = 0\nfault = "{fault}"\n'
        return run_backend_suite("lying", config=config, folder=tmp_path, select=" or ".join(tests))

    return run


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_promise_fails_the_test_of_it(suite: Callable[..., str], fault: str) -> None:
    with pytest.raises(AssertionError) as noticed:
        suite(fault, *FAULTS[fault])
    failed = set(re.findall(r"^(?:FAILED|ERROR) \S*::(test_\w+)", str(noticed.value), re.MULTILINE))
    assert failed == set(FAULTS[fault]), str(noticed.value)
