"""What an algorithm sees of a problem, and what the platform sees of an algorithm's state.

Every array has a leading node axis: row i belongs to node `shard.ids[i]`. One block may host one row or all of them;
the lines of an algorithm are the same in both cases, so nothing here may mix rows except `await mix(...)`.
"""

from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray

# A numpy array on the CPU, a torch tensor on a GPU: algorithms use arithmetic that both know.
Array: TypeAlias = NDArray[Any]


class Shard(Protocol):
    """The rows of the problem that one block holds: its oracles take stacked rows and answer with stacked rows."""

    @property
    def nodes(self) -> int: ...
    @property
    def dim_x(self) -> int: ...
    @property
    def dim_y(self) -> int: ...
    @property
    def ids(self) -> Array:
        """(nodes,) the network-wide numbers of these rows; random draws are keyed by them."""
    @property
    def seed(self) -> int: ...
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


class State(Protocol):
    """All that a node remembers between rounds: a frozen dataclass of arrays (or of such dataclasses), rows first.

    Besides x and y a state may show `z`, a second lower-level iterate; it is saved with the other two.
    """

    @property
    def x(self) -> Array: ...
    @property
    def y(self) -> Array: ...
    @property
    def direction(self) -> Array:
        """(nodes, dim_x) the direction along which the next upper step goes; its mean's norm is reported."""
