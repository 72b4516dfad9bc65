"""Following a command over any number of connections, without a network: events in, output and effects out (X11, X12)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from sandgate.client import following
from sandgate.client.following import End, Following
from sandgate.client.process_calls import Program, Target
from sandgate.client.records import Output
from sandgate.client.steps import Ask, Cut, Effect, NoAnswer, Open, Read, Sleep, Steps
from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_api.envd.v1 import process_pb2 as pb
from sandgate_errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    SandboxNotFound,
    SandgateError,
    Unavailable,
    Unimplemented,
)

PROGRAM = Program(argv=("true",))


def start(seq: int = 1, *, pid: int = 7, incarnation: int = 99) -> pb.StartResponse:
    event = pb.ProcessEvent.StartEvent(pid=pid, seq=seq, incarnation=incarnation)
    return pb.StartResponse(event=pb.ProcessEvent(start=event))


def out(seq: int, data: bytes = b"x") -> pb.StartResponse:
    return pb.StartResponse(event=pb.ProcessEvent(data=pb.ProcessEvent.DataEvent(stdout=data, seq=seq)))


def end(**fields: Any) -> pb.StartResponse:
    return pb.StartResponse(event=pb.ProcessEvent(end=pb.ProcessEvent.EndEvent(exited=True, **fields)))


KEEPALIVE = pb.StartResponse(event=pb.ProcessEvent(keepalive=pb.ProcessEvent.KeepAlive()))
PAUSED = sandboxes_pb2.SANDBOX_STATE_PAUSED
RUNNING = sandboxes_pb2.SANDBOX_STATE_RUNNING

Reply = pb.StartResponse | SandgateError | None


class Connection:
    """One stream of a script; None is its plain end, an error how it breaks."""

    def __init__(self, replies: Iterable[Reply]) -> None:
        self.replies = list(replies)
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Network:
    """Carries out steps by a script, and notes what was asked for. Time stands still but for Sleep."""

    def __init__(self, *connections: Iterable[Reply], states: Iterable[int | SandgateError] = ()) -> None:
        self.connections = [Connection(replies) for replies in connections]
        self.opened: list[Open] = []
        self.states = list(states)
        self.slept: list[float] = []

    def run(self, steps: Steps[Any]) -> Any:
        try:
            effect = next(steps)
            while True:
                try:
                    outcome = self._carry_out(effect)
                except SandgateError as error:
                    effect = steps.throw(error)
                else:
                    effect = steps.send(outcome)
        except StopIteration as stop:
            return stop.value

    def _carry_out(self, effect: Effect) -> Any:
        if isinstance(effect, Open):
            self.opened.append(effect)
            return self.connections[len(self.opened) - 1]
        if isinstance(effect, Read):
            assert isinstance(effect.stream, Connection)
            assert not effect.stream.closed
            return _raised(effect.stream.replies.pop(0))
        if isinstance(effect, Sleep):
            self.slept.append(effect.seconds)
            return None
        assert isinstance(effect, Ask)
        state = _raised(self.states.pop(0)) if self.states else RUNNING
        return sandboxes_pb2.GetResponse(sandbox=sandboxes_pb2.Sandbox(state=state))

    def asked_from(self) -> list[int]:
        return [call.request.from_seq for call in self.opened if isinstance(call.request, pb.ConnectRequest)]


def _raised(outcome: Any) -> Any:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


@pytest.fixture
def clock(monkeypatch) -> Callable[[float], None]:
    now = [1000.0]
    monkeypatch.setattr(following.time, "monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def followed(network: Network) -> Following:
    following = Following(Target(sandbox_id="i1"))
    network.run(following.start(PROGRAM, None))
    return following


def read_all(network: Network, followed: Following) -> bytes:
    seen = b""
    while (output := network.run(followed.next())) is not None:
        seen += output.stdout or b""
    return seen


def test_output_comes_in_order_and_the_end_is_known():
    network = Network([start(), out(1, b"a"), KEEPALIVE, out(2, b"b"), end()])
    command = followed(network)
    assert command.pid == 7
    assert command.end is None
    assert read_all(network, command) == b"ab"
    assert (command.last_seq, command.reconnects, command.end) == (2, 0, End(exit_code=0, error=None))
    assert network.connections[0].closed


def test_each_stream_is_told_apart():
    data = pb.ProcessEvent.DataEvent
    events = [data(stdout=b"o", seq=1), data(stderr=b"e", seq=2), data(pty=b"p", seq=3)]
    network = Network([start(), *(pb.StartResponse(event=pb.ProcessEvent(data=event)) for event in events)])
    command = followed(network)
    assert [network.run(command.next()) for _ in events] == [Output(stdout=b"o"), Output(stderr=b"e"), Output(pty=b"p")]


@pytest.mark.parametrize("broken", [Cut("gone"), Unavailable("the agent ends"), None], ids=["cut", "agent", "no end"])
def test_a_cut_connection_is_taken_up_after_the_last_piece(broken):
    network = Network([start(), out(1, b"a"), out(2, b"b"), broken], [start(3), out(3, b"c"), end()])
    command = followed(network)
    assert read_all(network, command) == b"abc"
    assert network.asked_from() == [3]
    assert command.reconnects == 1


def test_a_cut_before_any_output_replays_from_the_first_piece():
    network = Network([start(), Cut("gone")], [start(1), out(1, b"a"), end()])
    assert read_all(network, followed(network)) == b"a"
    assert network.asked_from() == [1]


def test_any_number_of_cuts_is_survived():
    count = 50
    later = ([start(n), out(n, b"%d," % n), Cut("gone")] for n in range(1, count))
    network = Network([start(), Cut("gone")], *later, [start(count), end()])
    command = followed(network)
    assert read_all(network, command) == b"".join(b"%d," % n for n in range(1, count))
    assert command.reconnects == count


@pytest.mark.parametrize("cut_after", range(4))
def test_a_cut_at_any_place_changes_nothing(cut_after):
    pieces = [out(n, b"%d" % n) for n in range(1, 4)]
    network = Network(
        [start(), *pieces[:cut_after], Cut("gone")], [start(cut_after + 1), *pieces[cut_after:], end(exit_code=3)]
    )
    command = followed(network)
    assert read_all(network, command) == b"123"
    assert command.end == End(exit_code=3, error=None)


def test_pieces_that_are_not_retained_any_more_are_an_error():
    network = Network([start(), out(1), Cut("gone")], [start(5), out(5), end()])
    command = followed(network)
    network.run(command.next())
    with pytest.raises(DataLoss, match="pieces 2 to 4 are not retained"):
        network.run(command.next())
    assert network.connections[1].closed
    with pytest.raises(DataLoss):
        network.run(command.next())
    assert command.end is None


@pytest.mark.parametrize("seq", [1, 3], ids=["again", "left out"])
def test_pieces_out_of_order_are_an_error(seq):
    network = Network([start(), out(1), out(seq), end()])
    command = followed(network)
    network.run(command.next())
    with pytest.raises(DataLoss):
        network.run(command.next())


def test_another_process_under_the_same_pid_is_not_followed():
    network = Network([start(), out(1), Cut("gone")], [start(2, incarnation=100), out(2, b"not ours"), end()])
    command = followed(network)
    network.run(command.next())
    with pytest.raises(NotFound, match="another process"):
        network.run(command.next())


def test_a_process_that_ended_out_of_sight_has_no_made_up_end():
    network = Network([start(), Cut("gone")], [NotFound("process with pid 7 not found")])
    command = followed(network)
    with pytest.raises(NotFound, match="how is not known"):
        network.run(command.next())
    assert command.end is None


def test_a_killed_sandbox_is_told_as_one():
    network = Network([start(), Cut("gone")], states=[SandboxNotFound.of("i1")])
    command = followed(network)
    with pytest.raises(SandboxNotFound):
        network.run(command.next())


def test_an_agent_that_numbers_nothing_cannot_be_attached_to_again():
    network = Network([start(0), out(0, b"a"), Cut("gone")])
    command = followed(network)
    assert network.run(command.next()) == Output(stdout=b"a")
    with pytest.raises(Unavailable, match="does not number"):
        network.run(command.next())
    assert command.last_seq == 0


def test_a_paused_sandbox_is_waited_for_and_not_woken(clock):
    """X19: its agent is not called, for any length of time."""
    network = Network([start(), Cut("gone")], [start(1), out(1, b"a"), end()], states=[PAUSED] * 500 + [RUNNING])
    command = followed(network)
    assert read_all(network, command) == b"a"
    assert len(network.opened) == 2
    assert len(network.slept) == 500


def test_a_gateway_that_is_gone_for_long_is_an_error(monkeypatch, clock):
    network = Network([start(), Cut("gone")], states=[Cut("refused")] * 1000)
    command = followed(network)
    before = network._carry_out

    def timed(effect: Effect) -> Any:
        if isinstance(effect, Sleep):
            clock(effect.seconds)
        return before(effect)

    monkeypatch.setattr(network, "_carry_out", timed)
    with pytest.raises(Cut, match="did not come back within 120 s"):
        network.run(command.next())
    assert 120 <= sum(network.slept) < 125
    assert max(network.slept) <= 1


def test_a_stream_that_a_pause_ended_is_taken_up_after_the_resume():
    """X12: who calls the agent of a paused sandbox hears that there is none; only the core knows better."""
    broken = SandboxNotFound("there is no sandbox i1")
    network = Network(
        [start(), out(1, b"a"), broken],
        [broken],
        [start(2), out(2, b"b"), end()],
        states=[PAUSED, RUNNING, PAUSED, RUNNING],
    )
    command = followed(network)
    assert read_all(network, command) == b"ab"
    assert command.reconnects == 1


def test_a_core_that_hangs_while_it_is_asked_is_asked_again():
    network = Network(
        [start(), out(1, b"a"), Cut("cut")],
        [start(2), out(2, b"b"), end()],
        states=[DeadlineExceeded("no answer"), DeadlineExceeded("no answer"), RUNNING],
    )
    assert read_all(network, followed(network)) == b"ab"


def test_attempts_that_fail_are_repeated():
    network = Network(
        [start(), out(1, b"a"), Cut("gone")],
        [Cut("refused")],
        [NoAnswer("hangs")],
        [Unavailable("the agent does not answer")],
        [start(2), out(2, b"b"), end()],
        states=[RUNNING, Cut("refused"), RUNNING],
    )
    command = followed(network)
    assert read_all(network, command) == b"ab"
    assert command.reconnects == 1
    assert all(connection.closed for connection in network.connections)


def test_a_start_is_never_repeated():
    network = Network([Cut("gone")])
    with pytest.raises(Cut, match="may run or not"):
        followed(network)
    assert len(network.opened) == 1
    assert network.connections[0].closed


def test_a_start_that_is_not_answered_says_that_it_may_run():
    with pytest.raises(DeadlineExceeded, match="may run or not"):
        followed(Network([NoAnswer("late")]))


def test_a_refused_start_says_why():
    with pytest.raises(InvalidArgument, match="cwd"):
        followed(Network([InvalidArgument("cwd '/x' does not exist")]))


def test_a_stream_that_begins_otherwise_is_a_fault():
    with pytest.raises(Internal):
        followed(Network([out(1)]))
    with pytest.raises(Internal):
        followed(Network([None]))


@pytest.mark.parametrize("first", [[start(), DeadlineExceeded("limit")], [start(), Cut("x")]], ids=["same", "later"])
def test_the_time_limit_is_told_on_the_first_connection_and_on_a_later_one(first):
    network = Network(first, [start(1), end(timed_out=True, exit_code=-1)])
    command = followed(network)
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match="limit"):
            network.run(command.next())
    assert command.end is None


def test_connect_follows_from_now_on():
    network = Network([start(41), out(41, b"a"), end()])
    command = Following(Target(sandbox_id="i1"))
    network.run(command.connect(7, None, None))
    assert command.last_seq == 40
    assert not network.opened[0].request.HasField("from_seq")
    assert read_all(network, command) == b"a"


def test_connect_replays_from_what_is_retained():
    network = Network([start(17), out(17, b"a"), end()])
    command = Following(Target(sandbox_id="i1"))
    network.run(command.connect(7, 0, None))
    assert network.opened[0].request.HasField("from_seq")
    assert read_all(network, command) == b"a"


@pytest.mark.parametrize(("seq", "kind"), [(17, DataLoss), (0, Unimplemented)])
def test_connect_from_what_is_not_retained_is_an_error(seq, kind):
    network = Network([start(seq)])
    command = Following(Target(sandbox_id="i1"))
    with pytest.raises(kind):
        network.run(command.connect(7, 3, None))
    assert network.connections[0].closed


def test_disconnect_ends_the_output():
    network = Network([start(), out(1), out(2)])
    command = followed(network)
    network.run(command.next())
    command.disconnect()
    assert network.run(command.next()) is None
    assert network.connections[0].closed
    assert command.end is None


def test_disconnect_while_attaching_again_stops_it():
    network = Network([start(), Cut("gone")], states=[Cut("refused")] * 1000)
    command = followed(network)
    steps = command.next()
    effect = next(steps)
    assert isinstance(effect, Read)
    effect = steps.throw(Cut("gone"))
    effect = steps.throw(Cut("refused"))
    assert isinstance(effect, Sleep)
    command.disconnect()
    with pytest.raises(StopIteration) as stop:
        steps.send(None)
    assert stop.value.value is None


def test_two_readers_at_once_are_refused():
    network = Network([start(), out(1)])
    command = followed(network)
    first = command.next()
    next(first)
    with pytest.raises(FailedPrecondition, match="being read"):
        network.run(command.next())
    first.close()
    assert network.run(command.next()) == Output(stdout=b"x")


def test_an_interrupted_read_loses_nothing():
    """A reader that is cancelled leaves at a read; the piece that comes then is the next reader's."""
    network = Network([start(), out(1, b"a"), end()])
    command = followed(network)
    steps = command.next()
    next(steps)
    steps.close()
    assert read_all(network, command) == b"a"


def test_an_interrupted_attempt_leaves_no_connection():
    network = Network([start(), Cut("gone")], [start(1)], [start(1), out(1, b"a"), end()])
    command = followed(network)
    steps = command.next()
    next(steps)
    steps.throw(Cut("gone"))
    effect = steps.send(sandboxes_pb2.GetResponse(sandbox=sandboxes_pb2.Sandbox(state=RUNNING)))
    steps.send(network._carry_out(effect))
    steps.close()
    assert network.connections[1].closed
    assert read_all(network, command) == b"a"
