"""Everything that the author of an algorithm imports. `import dbo` offers the same names.

    from dataclasses import dataclass
    from dbo.algorithms.api import Array, Shard, algorithm, mix, param
"""

from dbo.algorithms.claims import (
    AVERAGED_INVERSE,
    LOCAL_INVERSE,
    MINIMISER,
    PENALTY,
    TRUNCATED_INVERSE,
    Claim,
    Limit,
    Noise,
    mean,
)
from dbo.algorithms.compression.compressors import (
    COMPRESSORS,
    Compressor,
    Identity,
    Qsgd,
    RandK,
    Sign,
    TopK,
    compressor,
)
from dbo.algorithms.gossip import (
    Message,
    Mixed,
    NotRowsError,
    Outgoing,
    Packed,
    PackedRow,
    PackedSum,
    dense,
    mix,
)
from dbo.algorithms.protocol import Array, Shard, State, WeightedGradient
from dbo.algorithms.registry import Algorithm, algorithm, algorithms
from dbo.algorithms.rng import Key, counter, round_key
from dbo.algorithms.star import Clients, aggregate, average, broadcast, mean_of_clients, sample_clients, server_row
from dbo.parameters import param

__all__ = [
    "AVERAGED_INVERSE", "COMPRESSORS", "LOCAL_INVERSE", "MINIMISER", "PENALTY", "TRUNCATED_INVERSE", "Algorithm",
    "Array", "Claim", "Clients", "Compressor", "Identity", "Key", "Limit", "Message", "Mixed", "Noise",
    "NotRowsError", "Outgoing", "Packed", "PackedRow", "PackedSum", "Qsgd", "RandK", "Shard", "Sign", "State",
    "TopK", "WeightedGradient", "aggregate", "algorithm", "algorithms", "average", "broadcast", "compressor",
    "counter", "dense", "mean", "mean_of_clients", "mix", "param", "round_key", "sample_clients", "server_row",
]
