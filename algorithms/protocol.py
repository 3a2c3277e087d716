"""Define what an algorithm sees of a problem, and what the platform sees of an algorithm's state.

Every array has a leading node axis: row i belongs to node `shard.ids[i]`. A block may host one row or all of them. The
lines of an algorithm are the same in both cases, so nothing may mix rows except `await mix(...)`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from numpy.typing import NDArray

if TYPE_CHECKING:
    from dbo.algorithms.rng import Key

# A numpy array on the CPU, a torch tensor on a GPU: algorithms use arithmetic that both support.
Array: TypeAlias = NDArray[Any]

# (x, y, f_weight, g_weight) → (nodes, dim_y) rows ∇_y (f_weight f_i + g_weight g_i), in one pass over the data.
WeightedGradient: TypeAlias = Callable[[Array, Array, float, float], Array]


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """What an algorithm may know of the network: numbers that every node knows before the start."""

    nodes: int = 1
    places: int = 0                # neighbours that a node has at most: the places of `exchange`
    spectral_gap: float = 1.0      # ρ = 1 − max(|λ₂|, |λ_m|) of W


class Shard(Protocol):
    """The rows of the problem that one block hosts: its oracles take stacked rows and return stacked rows."""

    @property
    def nodes(self) -> int: ...
    @property
    def dim_x(self) -> int: ...
    @property
    def dim_y(self) -> int: ...
    @property
    def ids(self) -> Array:
        """(nodes,) the network-wide numbers of these rows; random numbers are keyed by them."""
    @property
    def seed(self) -> int: ...
    @property
    def network(self) -> NetworkFacts: ...
    @property
    def clients(self) -> int:
        """The clients of the whole network, if it has a server; otherwise 0."""
    @property
    def x0(self) -> Array:
        """(nodes, dim_x) the common start."""
    @property
    def y0(self) -> Array:
        """(nodes, dim_y) the common start."""

    def f(self, x: Array, y: Array) -> Array:
        """(nodes,) upper-level values f_i(x_i, y_i)."""

    def g(self, x: Array, y: Array) -> Array:
        """(nodes,) lower-level values g_i(x_i, y_i)."""

    def f_x(self, x: Array, y: Array) -> Array: ...
    def f_y(self, x: Array, y: Array) -> Array: ...
    def g_x(self, x: Array, y: Array) -> Array: ...
    def g_y(self, x: Array, y: Array) -> Array: ...

    def g_yy(self, x: Array, y: Array, v: Array) -> Array:
        """(nodes, dim_y) Hessian-vector products ∇²_yy g_i(x_i, y_i) v_i."""

    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        """(nodes, dim_x) Jacobian-vector products ∇²_xy g_i(x_i, y_i) v_i = ∂/∂x ⟨∇_y g_i, v_i⟩."""

    @property
    def h_y(self) -> WeightedGradient | None:
        """The fused form of a weighted sum of f_y and g_y; None: the shard has none, add the two."""

    def sample(self, key: "Key") -> "Shard":
        """Return the same oracles on the samples drawn for this key; with full batches, the shard itself.

        Equal keys give equal samples: two gradients of one batch see the same data.
        """


@runtime_checkable
class CountsRows(Protocol):
    """A shard that counts oracle calls per row: for products that only some rows use."""

    def only(self, rows: Array) -> Shard:
        """Return the same oracles, counted for the rows in the mask alone."""

    def g_yy_of(self, rows: Array, x: Array, y: Array, v: Array) -> Array:
        """`g_yy`, counted for the rows in the mask `rows` alone."""


class State(Protocol):
    """All that a node keeps between rounds: a frozen dataclass of arrays (or of such dataclasses), rows first.

    Besides x and y a state may have `z`, a second lower-level iterate, which is saved with the other two. It may have
    `public_y`, the weighted mean of what the node's neighbourhood has published of y, which every evaluation reports
    beside y. Other algorithms declare `public`, the copies of y that neighbours have; it is evaluated on request.
    """

    @property
    def x(self) -> Array: ...
    @property
    def y(self) -> Array: ...
    @property
    def direction(self) -> Array:
        """(nodes, dim_x) the direction of the next upper step; the norm of its mean is reported."""
