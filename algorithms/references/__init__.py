"""References: second, plain implementations of the pseudo-code, for `dbo verify` to compare trajectories with.

A reference is a generator `(shard, w, cfg) -> Iterator[{path: rows}]`: what a state must hold at the start and after
each round. It works on stacked rows with an explicit mixing matrix, `w @ rows` for Σ_j w_ij (·)_j, and it shares no
code with the method. `path` names rows of the state: "x", "y", "direction", or parts such as "loop_y.s".

`shard` holds the rows of all nodes; for a method with a server those of the clients, while the last row that is
yielded is the server's; for a method on one machine the pooled data, with W = 1. An algorithm names its reference in
its decorator, `@algorithm(..., reference=...)`. No run uses these modules.
"""
