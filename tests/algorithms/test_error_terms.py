"""No tracker and no reference point is forgotten: every array of a networked method is recorded or explained."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.api import Algorithm, Array, ErrorTerms, Outgoing, algorithms
from dbo.platform.engine.state_tree import flatten
from dbo.platform.errors import InputError
from dbo.platform.verify import checks

LOCAL = "a local gradient, hypergradient, or estimate of one: no copy of it is kept, and no mean is tracked"
SUM = "a neighbourhood's sum or mean of references, or the neighbours' copies: the references are recorded themselves"
DUAL = "a dual variable: its mean is 0, and it does not become equal at all nodes"
MEMORY = "what a rule of consensus remembers of the last round: an iterate, or a sum of differences"
FEEDBACK = "what error feedback has not sent yet: the vector and its last message are recorded"
AVERAGE = "a running average of what neighbours send: no tracker, its mean lags behind the mean gradient"
ITERATE = "an iterate of a method whose consensus is plain gossip, without an analysis by error terms"
SERVER = "of a method with a server: clients get the same variables from it, only the server's row is used"
UPLOAD = "what the server knows of a client's directions: the directions themselves are in no state"

# Method → arrays of its state that no error term has, by path, and why.
EXPLAINED: dict[str, Mapping[str, str]] = {
    "c2dfb": {"u": LOCAL, "loop_?.grad": LOCAL, "loop_?.gap_?": SUM, "outer.w?_hat": SUM},
    "c2dfb_nc": {"u": LOCAL, "loop_?.grad": LOCAL, "loop_?.?.w_sent": SUM, "loop_?.?.error": FEEDBACK},
    "madsbo": {"r": LOCAL},
    "madsbo_gt": {"r": LOCAL, "grad": LOCAL},
    "mdbo": {"u": LOCAL, "v": LOCAL},
    "vrdbo": {"u": LOCAL, "v": LOCAL},
    "dsgda_gt": {"local.?": LOCAL},
    "sldbo": {"local.?": LOCAL},
    "d_soba": {"h": LOCAL, "v": ITERATE},
    "gossip_dsbo": {"u": LOCAL, "a_?": AVERAGE},
    "sparkle": {"d.?": LOCAL, "memory.?": MEMORY},
    "storm_pl": {"estimate.?": LOCAL},
    "sun_dsbo": {"local.*": LOCAL},
    "slam": {"d": LOCAL, "p": DUAL},
    "c2dfb_lead": {"u": LOCAL, "loop_?.dual": DUAL, "loop_?.w_ref": SUM},
    "c2dfb_central": {"u": LOCAL, "plus.grad": LOCAL, "minus.grad": LOCAL, "plus.gap_?": SUM, "minus.gap_?": SUM},
    "lean": {"u": LOCAL, "loop_?.dual": DUAL, "loop_?.old": MEMORY, "loop_?.near": SUM, "public_y": SUM},
    "fednest": {"h": SERVER},
    "simfbo": {"v": SERVER, "d.?": SERVER},
    "fedbioacc": {"v": SERVER, "e.?": SERVER, "d.?": SERVER},
    "aggitd": {"h": SERVER},
    "ef_soba": {"v": SERVER, "m.?": UPLOAD},
}
NETWORKED = [name for name, made in algorithms().items() if made.network != "single"]
ROUNDS = 3          # afterwards no two arrays of a state are equal by chance


@dataclass(frozen=True)
class Trace:
    """The end of a few rounds, and everything that was sent in the last one, as full rows."""

    state: Any
    sent: list[Array]


def trace(subject: checks.Subject, config: Any) -> Trace:
    """Run a few rounds and record what is sent."""
    sent: list[Array] = []

    @dataclass(frozen=True)
    class Recorded:
        coroutine: Any

        def __await__(self) -> Generator[Outgoing, Any, Any]:
            answers: Any = None
            try:
                while True:
                    outgoing = self.coroutine.send(answers)
                    sent.extend(np.array(message.values) for message in outgoing.channels.values())
                    answers = yield outgoing
            except StopIteration as stop:
                return stop.value

    async def round_(st: Any, shard: Any, cfg: Any) -> Any:
        return await Recorded(subject.algorithm.round(st, shard, cfg))

    engine = subject.start(replace(subject.algorithm, round=round_), config)
    for number in range(1, ROUNDS + 1):
        before = engine.local_blocks[0].state
        sent.clear()
        engine.advance(number)
    return Trace(before, sent)


def list_unrecorded(made: Algorithm, state: Any) -> dict[str, Array]:
    """Return the arrays of a state that are neither x, y or the round, nor in an error term, by path."""
    known = [state.x, state.y, state.t, *made.errors.consensus(state).values()]
    known += [rows for pair in made.errors.compression(state).values() for rows in pair]
    return {
        path: rows for path, rows in flatten(state).items()
        if rows.size and not any(rows is other for other in known)
    }


def find_forgotten(made: Algorithm) -> set[str]:
    """Return what no term has although it is not explained, or although nodes send it as it is."""
    subject, found = checks.prepare(made), set[str]()
    for config in subject.variants.values():
        try:
            traced = trace(subject, config)
        except InputError:
            continue                # a value that the method refuses
        for path, rows in list_unrecorded(made, traced.state).items():
            reasons = [why for pattern, why in EXPLAINED.get(made.name, {}).items() if fnmatchcase(path, pattern)]
            if not reasons:
                found.add(path)
            elif not {AVERAGE, SERVER, UPLOAD} & {*reasons} and rows.any() and any(
                np.array_equal(rows, other) for other in traced.sent
            ):
                found.add(f"{path}, which is sent as it is")
    return found


@pytest.mark.parametrize("name", NETWORKED)
def test_every_tracker_and_reference_point_has_a_term(name: str) -> None:
    """With every value of every switch. To a new array give a term, or say in EXPLAINED why it has none."""
    assert find_forgotten(algorithms()[name]) == set()


@pytest.mark.parametrize(
    ("name", "forgotten"),
    [
        ("storm_pl", {"z", "track.x", "track.y", "track.z"}),
        ("c2dfb_lead", {"s", "loop_y.ref", "loop_z.d", "loop_z.ref"}),
        ("c2dfb", {"outer.x_hat", "outer.s_hat"}),
        ("sparkle", {"v", "track.x", "track.y", "track.v"}),
    ],
)
def test_method_without_terms_is_found(name: str, forgotten: set[str]) -> None:
    """The negative control: the same methods without their terms, with those of one switch value alone too."""
    assert find_forgotten(replace(algorithms()[name], errors=ErrorTerms())) >= forgotten


def test_tracker_that_is_called_local_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reason does not hide a tracker: nodes send it as it is."""
    monkeypatch.setitem(EXPLAINED, "storm_pl", {"*": LOCAL})
    found = find_forgotten(replace(algorithms()["storm_pl"], errors=ErrorTerms()))
    assert {f"track.{s}, which is sent as it is" for s in "xyz"} <= found


@pytest.mark.parametrize("name", NETWORKED)
def test_no_reason_is_out_of_date(name: str) -> None:
    """Every pattern matches an array that has no term, with some value of a switch."""
    made, paths = algorithms()[name], set[str]()
    subject = checks.prepare(made)
    for config in subject.variants.values():
        try:
            state = subject.start(made, config)
            state.advance(1)
        except InputError:
            continue
        paths |= list_unrecorded(made, state.local_blocks[0].state).keys()
    assert [pattern for pattern in EXPLAINED.get(name, {}) if not any(fnmatchcase(p, pattern) for p in paths)] == []
    assert EXPLAINED.keys() <= {*NETWORKED}
