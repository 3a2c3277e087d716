"""Everything that the author of an algorithm imports. `import dbo` offers the same names.

    from dataclasses import dataclass
    from dbo.algorithms.api import Array, Shard, algorithm, mix, param
"""

from dbo.algorithms.claims import (
    AVERAGED_INVERSE,
    CENTRAL,
    LOCAL_INVERSE,
    MINIMISER,
    MOREAU,
    PENALTY,
    PERSONALISED,
    SERIES,
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
    Lazy,
    Qsgd,
    RandK,
    RowTopK,
    Sign,
    TopK,
    TopShare,
    compressor,
)
from dbo.algorithms.compression.grid import EIGHTHS, Grid, level_tables, level_values, read_scale, scale_code
from dbo.algorithms.error_terms import ErrorTerms
from dbo.algorithms.gossip import (
    MANY_WORDS,
    Message,
    Mixed,
    Neighbours,
    NotRowsError,
    Outgoing,
    Packed,
    PackedRow,
    code_kernels,
    dense,
    exchange,
    mark_kernels,
    mix,
)
from dbo.algorithms.kernels.short import short_loops
from dbo.algorithms.protocol import Array, NetworkFacts, Shard, State, WeightedGradient
from dbo.algorithms.registry import Algorithm, algorithm, algorithms
from dbo.algorithms.rng import Key, counter, round_key
from dbo.algorithms.star import Clients, aggregate, average, broadcast, mean_of_clients, sample_clients, server_row
from dbo.parameters import param

__all__ = [
    "AVERAGED_INVERSE", "CENTRAL", "COMPRESSORS", "EIGHTHS", "LOCAL_INVERSE", "MANY_WORDS", "MINIMISER", "MOREAU",
    "PENALTY", "PERSONALISED", "SERIES", "TRUNCATED_INVERSE", "Algorithm", "Array", "Claim", "Clients", "Compressor",
    "ErrorTerms", "Grid", "Identity", "Key", "Lazy", "Limit", "Message", "Mixed", "Neighbours", "NetworkFacts", "Noise",
    "NotRowsError", "Outgoing", "Packed", "PackedRow", "Qsgd", "RandK", "RowTopK", "Shard", "Sign", "State", "TopK",
    "TopShare", "WeightedGradient", "aggregate", "algorithm", "algorithms", "average", "broadcast", "code_kernels",
    "compressor", "counter", "dense", "exchange", "level_tables", "level_values", "mark_kernels", "mean",
    "mean_of_clients", "mix", "param", "read_scale", "round_key", "sample_clients", "scale_code", "server_row",
    "short_loops",
]
