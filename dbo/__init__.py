"""Run, compare and sweep decentralized bilevel optimization algorithms. The public API, imported lazily.

    import dbo

    result = dbo.run(algorithm="c2dfb", nodes=10, topology="ring", rounds=50)
    result.history            # pandas.DataFrame, a row per evaluation
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:      # for type checkers and editors; `x as x` marks a re-export
    from dbo.algorithms.api import AVERAGED_INVERSE as AVERAGED_INVERSE
    from dbo.algorithms.api import LOCAL_INVERSE as LOCAL_INVERSE
    from dbo.algorithms.api import MINIMISER as MINIMISER
    from dbo.algorithms.api import PENALTY as PENALTY
    from dbo.algorithms.api import TRUNCATED_INVERSE as TRUNCATED_INVERSE
    from dbo.algorithms.api import Array as Array
    from dbo.algorithms.api import Claim as Claim
    from dbo.algorithms.api import Clients as Clients
    from dbo.algorithms.api import Compressor as Compressor
    from dbo.algorithms.api import ErrorTerms as ErrorTerms
    from dbo.algorithms.api import Identity as Identity
    from dbo.algorithms.api import Key as Key
    from dbo.algorithms.api import Limit as Limit
    from dbo.algorithms.api import Message as Message
    from dbo.algorithms.api import Noise as Noise
    from dbo.algorithms.api import Qsgd as Qsgd
    from dbo.algorithms.api import RandK as RandK
    from dbo.algorithms.api import Shard as Shard
    from dbo.algorithms.api import Sign as Sign
    from dbo.algorithms.api import State as State
    from dbo.algorithms.api import TopK as TopK
    from dbo.algorithms.api import aggregate as aggregate
    from dbo.algorithms.api import algorithm as algorithm
    from dbo.algorithms.api import average as average
    from dbo.algorithms.api import broadcast as broadcast
    from dbo.algorithms.api import compressor as compressor
    from dbo.algorithms.api import counter as counter
    from dbo.algorithms.api import exchange as exchange
    from dbo.algorithms.api import mean as mean
    from dbo.algorithms.api import mean_of_clients as mean_of_clients
    from dbo.algorithms.api import mix as mix
    from dbo.algorithms.api import round_key as round_key
    from dbo.algorithms.api import sample_clients as sample_clients
    from dbo.algorithms.api import server_row as server_row
    from dbo.api import compare as compare
    from dbo.api import load as load
    from dbo.api import run as run
    from dbo.api import sweep as sweep
    from dbo.parameters import param as param
    from dbo.platform.config.experiment import Experiment as Experiment
    from dbo.platform.errors import InputError as InputError
    from dbo.platform.errors import RunError as RunError
    from dbo.platform.network.topology import topology as topology
    from dbo.tasks.api import Batch as Batch
    from dbo.tasks.api import DataSize as DataSize
    from dbo.tasks.api import Part as Part
    from dbo.tasks.api import Split as Split
    from dbo.tasks.api import TorchTask as TorchTask
    from dbo.tasks.api import Work as Work
    from dbo.tasks.api import dataset as dataset
    from dbo.tasks.api import partition as partition
    from dbo.tasks.api import task as task
    from dbo.tasks.torch_losses import linear_cross_entropy as linear_cross_entropy

# Where each public name lives. Nothing is imported before somebody uses it: `import dbo` takes milliseconds.
_PLACES = {
    "dbo.api": ("compare", "load", "run", "sweep"),
    "dbo.parameters": ("param",),
    "dbo.platform.config.experiment": ("Experiment",),
    "dbo.platform.errors": ("InputError", "RunError"),
    "dbo.algorithms.api": (
        "AVERAGED_INVERSE", "LOCAL_INVERSE", "MINIMISER", "PENALTY", "TRUNCATED_INVERSE", "Array", "Claim",
        "Clients", "Compressor", "ErrorTerms", "Identity", "Key", "Limit", "Message", "Noise", "Qsgd", "RandK",
        "Shard", "Sign", "State", "TopK", "aggregate", "algorithm", "average", "broadcast", "compressor", "counter",
        "exchange", "mean", "mean_of_clients", "mix", "round_key", "sample_clients", "server_row",
    ),
    "dbo.platform.network.topology": ("topology",),
    "dbo.tasks.api": ("Batch", "DataSize", "Part", "Split", "TorchTask", "Work", "dataset", "partition", "task"),
    "dbo.tasks.torch_losses": ("linear_cross_entropy",),
}
_HOME = {name: module for module, names in _PLACES.items() for name in names}
__all__ = [*_HOME]

# In a checkout the packages lie beside this folder, not inside it: `dbo.platform` is <root>/platform. A wheel has them
# inside. Without this a process whose working directory is the checkout would find `dbo`, but not `dbo.platform`.
_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "platform").is_dir():
    __path__.append(str(_root))


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dbo' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
