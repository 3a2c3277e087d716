"""Everything that the author of a task, a data set or a partition imports. `import dbo` offers the same names."""

from dbo.parameters import param
from dbo.tasks.arrays import Array
from dbo.tasks.protocol import (
    DataSet,
    DataSize,
    Direction,
    Features,
    Part,
    Partition,
    Problem,
    Setup,
    Shard,
    Split,
    Task,
    WeightedGradient,
    Work,
    generator,
)
from dbo.tasks.registry import dataset, partition, task
from dbo.tasks.sampling import Batches
from dbo.tasks.torch_task import Batch, TorchTask

__all__ = [
    "Array", "Batch", "Batches", "DataSet", "DataSize", "Direction", "Features", "Part", "Partition", "Problem",
    "Setup", "Shard", "Split", "Task", "TorchTask", "WeightedGradient", "Work", "dataset", "generator", "param",
    "partition", "task",
]
