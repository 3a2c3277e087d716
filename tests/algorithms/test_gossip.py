"""Send rows with `mix`: one array, named channels, and the error messages for what is not an array of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.api import Algorithm, Message, NotRowsError, algorithm, exchange, mix
from dbo.algorithms.compression.compressors import TopK
from dbo.algorithms.gossip import Mixed, Packed, PackedRow
from dbo.algorithms.kernels.lazy import RowSum, wrap_sum
from dbo.algorithms.rng import Key
from dbo.components import forget
from dbo.platform.engine.local import LocalEngine

Array = Any
BLOCKS = {"one block": [[0, 1, 2, 3, 4, 5]], "of one": [[i] for i in range(6)], "uneven": [[5, 0, 2], [4], [1, 3]]}
every_packing = pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)


@dataclass(frozen=True, kw_only=True)
class Config:
    step: float = 0.1


@dataclass(frozen=True)
class State:
    x: Array
    y: Array
    direction: Array


def init(shard: Any, cfg: Config) -> State:
    """Rows that differ from node to node, so that mixing changes them."""
    ids = np.asarray(shard.ids, dtype=np.float64)[:, None]
    return State(shard.x0 + ids, shard.y0 - ids**2, shard.x0)


def run_round(lab: Any, round_: Any, blocks: Sequence[Sequence[int]], **options: Any) -> LocalEngine:
    """An engine after one round of a throw-away algorithm."""
    try:
        made: Algorithm = algorithm("throw_away", config=Config, state=State, init=init, **options)(round_)
    finally:
        forget(__name__)
    engine = LocalEngine(made, Config(), lab.quadratic(), lab.network(), blocks)
    engine.advance(1)
    return engine


def start(lab: Any, part: str) -> Array:
    return getattr(init(lab.quadratic().shard(range(6)), Config()), part)


def drive(awaitable: Any, sums: tuple[Array, ...]) -> Any:
    """Await by hand, with these neighbour sums."""
    steps = awaitable.__await__()
    next(steps)
    with pytest.raises(StopIteration) as end:
        steps.send(sums)
    return end.value.value


@every_packing
@pytest.mark.parametrize("form", ["dense", "sparse", "packed"])
def test_exchange_gives_each_neighbours_rows(lab: Any, blocks: list[list[int]], form: str) -> None:
    """Place s holds the s-th neighbour's row and weight; the weighted sum is that of `mix`, and so are the packets."""
    network = lab.network("star")      # node 0 has five neighbours, the others one

    async def round_(st: State, shard: Any, cfg: Config) -> State:
        """Sums over neighbours."""
        message: Any = st.y if form == "dense" else Message(st.y, form="sparse", kept=1)
        if form == "packed":
            message = Packed(tuple(PackedRow.of(row) for row in st.y), st.y.shape[1], kept=1)
        assert shard.network.places == 5
        (near,) = await exchange(y=message)
        (wy,) = await mix(y=st.y)
        for row, node in enumerate(shard.ids):
            others = network.neighbours[node]
            rows = [-float(j) ** 2 + lab.quadratic().shard([j]).y0[0] for j in others]
            np.testing.assert_array_equal(near.rows[row, : len(others)], rows)
            np.testing.assert_array_equal(near.weights[row, : len(others), 0], network.weights[[node], list(others)])
            assert not near.rows[row, len(others) :].any()
            assert not near.weights[row, len(others) :].any()
        np.testing.assert_allclose(near.mean(st.y, near.rows), np.asarray(wy), rtol=1e-13)
        return State(st.x, near.mean(st.y, near.rows), st.direction)

    try:
        made: Algorithm = algorithm("throw_away", config=Config, state=State, init=init)(round_)
    finally:
        forget(__name__)
    engine = LocalEngine(made, Config(), lab.quadratic(), network, blocks)
    engine.advance(1)
    y = start(lab, "y")
    np.testing.assert_allclose(engine.rows("y"), network.weights.toarray() @ y, rtol=1e-13)
    assert engine.ledger().packets.tolist() == [2] * 6


def test_exchange_on_a_device(lab: Any) -> None:
    """Tensors: the neighbours' rows are tensors with the numbers of the NumPy run."""
    torch = pytest.importorskip("torch")
    ours = lab.engine("lean", rounds=3)
    theirs = LocalEngine(
        lab.algorithm("lean"), lab.config("lean"), lab.quadratic(), lab.network(), [[0, 1, 2], [3], [4, 5]],
        device="torch_cpu",
    )
    for round_ in range(1, 4):
        theirs.advance(round_)
    assert isinstance(theirs.local_blocks[0].state.loop_y.near, torch.Tensor)
    np.testing.assert_allclose(theirs.rows("x"), ours.rows("x"), rtol=1e-10)
    assert theirs.ledger().bytes_broadcast == ours.ledger().bytes_broadcast


def test_only_arrays_are_exchanged() -> None:
    with pytest.raises(NotRowsError, match=r"exchange\(y=…\) got a float; must be an array with a row per node"):
        exchange(y=1.0)      # type: ignore[arg-type]


@every_packing
def test_one_array_gives_one_array(lab: Any, blocks: list[list[int]]) -> None:
    """`wy = await mix(y)` is W y in every packing, and its bytes are counted under the channel `value`."""

    async def round_(st: State, shard: Any, cfg: Config) -> State:
        """Mixes y."""
        wy = await mix(st.y)
        return State(st.x, wy - cfg.step * st.y, st.direction)

    engine = run_round(lab, round_, blocks, packets=lambda cfg: 1)
    y, w = start(lab, "y"), lab.network().weights.toarray()
    np.testing.assert_allclose(engine.rows("y"), w @ y - 0.1 * y, rtol=1e-14)
    assert np.abs(w @ y - y).max() > 1
    assert list(engine.ledger().channels) == ["value"]


@every_packing
def test_one_compressed_array_gives_one_array(lab: Any, blocks: list[list[int]]) -> None:
    """A message of a compressor can be sent without a name too."""
    q, scale = TopK(ratio=0.4), np.arange(1.0, 6.0)

    async def round_(st: State, shard: Any, cfg: Config) -> State:
        """Mixes the two largest entries of y."""
        return State(st.x, await mix(q(st.y * scale, Key(0, shard.ids, 0), "y")), st.direction)

    engine = run_round(lab, round_, blocks, packets=lambda cfg: 1)
    y = start(lab, "y") * scale
    y[:, :3] = 0
    np.testing.assert_allclose(engine.rows("y"), lab.network().weights @ y, rtol=1e-14)


@every_packing
def test_named_channels_give_a_tuple_in_their_order(lab: Any, blocks: list[list[int]]) -> None:
    """Σ_j w_ij of each channel, in the order of the arguments; one named channel is a tuple of one."""

    async def round_(st: State, shard: Any, cfg: Config) -> State:
        """Mixes y and x in one packet, then x alone."""
        wy, wx = await mix(y=st.y, x=st.x)
        (wwx,) = await mix(x=wx)
        return State(wwx, wy, st.direction)

    engine = run_round(lab, round_, blocks, packets=lambda cfg: 2)
    w = lab.network().weights
    np.testing.assert_allclose(engine.rows("y"), w @ start(lab, "y"), rtol=1e-14)
    np.testing.assert_allclose(engine.rows("x"), w @ (w @ start(lab, "x")), rtol=1e-14)
    assert set(engine.ledger().channels) == {"x", "y"}


@pytest.mark.parametrize(
    ("arrays", "named", "message"),
    [
        (2, (), "mix(...) got 2 arrays without a name; must be one array"),
        (1, ("y",), "mix(...) got an array without a name beside y; must be one array"),
        (3, ("y", "z"), "mix(...) got 3 arrays without a name beside y, z; must be one array"),
    ],
)
def test_arrays_without_a_name_are_refused(arrays: int, named: tuple[str, ...], message: str) -> None:
    """Several arrays need names, and one without a name cannot travel with named ones."""
    rows = np.zeros((2, 3))
    with pytest.raises(NotRowsError) as error:
        mix(*[rows] * arrays, **dict.fromkeys(named, rows))
    assert str(error.value).startswith(message)
    assert "`wx = await mix(x)`" in str(error.value)
    assert "`wx, wy = await mix(x=…, y=…)`" in str(error.value)


@pytest.mark.parametrize("wrong", [0.0, [1.0, 2.0], None, np.float64(3)], ids=lambda value: type(value).__name__)
def test_only_rows_can_be_sent(wrong: Any) -> None:
    """A number, a list or None is refused by its type, with and without a name."""
    expected = f"got a {type(wrong).__name__}; must be an array with a row per node"
    with pytest.raises(NotRowsError) as error:
        mix(x=wrong)
    assert str(error.value) == f"mix(x=…) {expected}"
    with pytest.raises(NotRowsError) as error:
        mix(wrong)
    assert str(error.value) == f"mix(…) {expected}"


ARITHMETIC = {
    "sum": lambda found, rows: found + rows,
    "array first": lambda found, rows: rows + found,
    "product": lambda found, rows: 0.5 * found,
    "division": lambda found, rows: found / 2,
    "matrix product": lambda found, rows: rows.T @ found,
    "negation": lambda found, rows: -found,
    "in place": lambda found, rows: np.add(rows, found, out=rows),
}


@pytest.mark.parametrize("operation", ARITHMETIC.values(), ids=ARITHMETIC)
def test_arithmetic_on_a_tuple_of_sums_explains_itself(operation: Any) -> None:
    """`wx = await mix(x=x)` is a tuple: arithmetic on it explains what to write instead; indexing works."""
    rows = np.ones((2, 3))
    found = drive(mix(x=rows), (rows,))
    assert isinstance(found, tuple)
    assert found[0] is rows
    with pytest.raises(NotRowsError, match=r"write `\(wx,\) = await mix\(x=…\)` or `wx = await mix\(x\)`"):
        operation(found, rows)


@pytest.mark.parametrize("operation", ARITHMETIC.values(), ids=ARITHMETIC)
@pytest.mark.parametrize("named", [True, False])
def test_a_forgotten_await_explains_itself(operation: Any, named: bool) -> None:
    """mix(...) without `await` is no array, named or not."""
    rows = np.ones((2, 3))
    with pytest.raises(NotRowsError, match="write `await mix"):
        operation(mix(x=rows) if named else mix(rows), rows)


def test_a_forgotten_await_cannot_be_unpacked() -> None:
    """`wx, ws = mix(...)` fails with the same hint."""
    rows = np.ones((2, 3))
    with pytest.raises(NotRowsError, match="write `await mix"):
        _, _ = mix(x=rows, s=rows)    # type: ignore[misc]


def test_a_single_array_supports_arithmetic() -> None:
    """Control: the result of `await mix(x)` is the array itself."""
    rows = np.ones((2, 3))
    assert drive(mix(rows), (rows,)) is rows
    assert isinstance(drive(mix(x=rows), (rows,)), Mixed)


def test_a_packed_message_is_its_rows() -> None:
    """Packing and decoding gives the same rows; a weighted sum of packed rows is that of the dense ones."""
    rows = np.random.default_rng(0).standard_normal((3, 130)) * (np.arange(130) % 3 == 0)
    packed = Packed(tuple(PackedRow.of(row) for row in rows), 130, kept=44)
    np.testing.assert_array_equal(packed.values, rows)
    assert packed.shape == Message(rows).shape == (3, 130)
    total = wrap_sum(RowSum((tuple(zip((0.5, 0.25, 0.25), packed.rows, strict=True)),), 130, rows.dtype))
    np.testing.assert_allclose(np.asarray(total), [0.5 * rows[0] + 0.25 * rows[1] + 0.25 * rows[2]], rtol=1e-14)
