"""What a method declares as public is what its neighbours have received of y."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.registry import algorithms, whole_y
from dbo.platform.engine.block import PUBLIC

# What a node has received of its neighbourhood, Σ_j w_ij ŷ_j, as each compressed method adds it up from messages.
RECEIVED: dict[str, Callable[[Any], Any]] = {
    "c2dfb": lambda st: st.loop_y.gap_d + st.loop_y.d_hat, "c2dfb_central": lambda st: st.plus.gap_d + st.plus.d_hat,
    "c2dfb_nc": lambda st: st.loop_y.d.w_sent,
}
KEPT = {"c2dfb_lead", "lean"}           # in the state, as `public_y`


@pytest.mark.parametrize("name", RECEIVED)
def test_declared_copies_are_what_neighbours_have_received(lab: Any, name: str) -> None:
    """Of a compressed method: W times the declared copies is the sum of all messages, also where y starts at 0.5."""
    engine = lab.engine(name, problem=lab.quadratic(start=0.5))
    for round_ in range(1, 4):
        copies, state = engine.rows(PUBLIC), engine.local_blocks[0].state
        np.testing.assert_allclose(
            lab.network().weights @ copies, RECEIVED[name](state), rtol=1e-12, atol=1e-13)
        assert np.abs(copies - engine.rows("y")).max() > 1e-3       # control: the copies are not y itself
        engine.advance(round_)


def test_every_compressing_method_names_its_copies() -> None:
    """A gossip method with a compressor keeps public models in its state, or does not publish y itself."""
    compressing = {
        name for name, made in algorithms().items()
        if made.network == "gossip" and hasattr(made.config(), "compressor")}
    assert compressing == {*RECEIVED, *KEPT}
    assert all(algorithms()[name].public is not whole_y for name in RECEIVED)
