"""Define a task in PyTorch: write data, start, both losses and metrics; derivatives and batches come from the platform.

    @dbo.task("my_task")
    class MyTask(dbo.TorchTask):
        def data(self, seed): ...                   # train (lower level), val (upper level), test
        def init(self, generator): ...              # the start of x and of y
        def lower(self, x, y, batch): ...           # g_i, a scalar
        def upper(self, x, y, batch): ...           # f_i, a scalar
        def metrics(self, x, y, test): ...

This module does not import torch: `dbo list` and runs of other tasks do not need it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dbo.tasks.protocol import Direction, Setup, Split, Task

if TYPE_CHECKING:
    import torch

    from dbo.tasks.torch_problem import TorchProblem


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The samples that a loss sees: all or some samples of one node, or the test samples."""

    inputs: "torch.Tensor"
    labels: "torch.Tensor"
    index: "torch.Tensor"       # their numbers in the whole train, val or test part
    compute_representation: "Callable[[], torch.Tensor] | None" = None

    @property
    def representation(self) -> Any:
        """The value of `TorchTask.representation(x, inputs)`, computed once per x and batch."""
        if self.compute_representation is None:
            raise AttributeError("batch.representation: the task has no method representation(self, x, inputs)")
        return self.compute_representation()

    def __len__(self) -> int:
        return len(self.labels)


class TorchTask(Task):
    """A task whose losses are written in PyTorch.

    x and y are tensors, modules (`torch.nn.Module`), or dictionaries, lists and tuples of them. The losses get them
    with the same structure; modules arrive as functions with their parameters as attributes.
    """

    directions: ClassVar[Mapping[str, Direction]] = {"test_accuracy": "max", "test_loss": "min"}
    vectorize: ClassVar[bool] = True            # False: call the losses node by node instead of under torch.vmap

    def data(self, seed: int) -> Split:
        """Return the samples; leave it out where `datasets` names registered data sets."""
        raise NotImplementedError

    def init(self, generator: "torch.Generator") -> tuple[Any, Any]:
        """Return the start of x and of y."""
        raise NotImplementedError

    def lower(self, x: Any, y: Any, batch: Batch) -> "torch.Tensor":
        """Return the loss g_i of one node: a scalar."""
        raise NotImplementedError

    def upper(self, x: Any, y: Any, batch: Batch) -> "torch.Tensor":
        """Return the loss f_i of one node: a scalar."""
        raise NotImplementedError

    def representation(self, x: Any, inputs: "torch.Tensor") -> Any:
        """Return what depends on x alone; optional. The losses find it as `batch.representation`."""
        raise NotImplementedError

    def metrics(self, x: Any, y: Any, test: Batch) -> Mapping[str, Any]:
        """Return the metrics of one model; `directions` declares which values of each are better."""
        raise NotImplementedError

    @property
    def has_representation(self) -> bool:
        return type(self).representation is not TorchTask.representation

    def build(self, setup: Setup) -> "TorchProblem":
        from dbo.tasks.torch_problem import build_problem

        return build_problem(self, setup)

    def build_model(self, seed: int, x: Any, y: Any) -> tuple[Any, Any]:
        """Return x and y, given as rows, with the structure that `init` gives them."""
        from dbo.tasks.torch_problem import unflatten_model

        return unflatten_model(self, seed, x, y)

    def read_model(self, seed: int, arrays: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return x and y as rows, from the rows of nodes or from the tensors of a `state_dict`, `x.…` and `y.…`."""
        from dbo.tasks.torch_problem import flatten_model

        return flatten_model(self, seed, arrays)
