"""Refuse random numbers inside of a loss: a resumed run, or another packing of nodes, could not repeat them."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class RandomLossError(ValueError):
    """A loss or a metric has drawn random numbers."""


def refuse_random_numbers() -> AbstractContextManager[Any]:
    """Return a context in which an operation that draws from a generator, such as dropout, is a `RandomLossError`."""
    return _NoRandomNumbers()    # type: ignore[no-untyped-call]


class _NoRandomNumbers(TorchDispatchMode):    # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in operation.tags and not _is_off(operation, args, kwargs or {}):
            raise RandomLossError(
                f"draws random numbers ({operation.overloadpacket.__name__}), which a resumed run could not repeat; "
                f"draw them in data or init, and call dropout with training=False"
            )
        return operation(*args, **(kwargs or {}))


def _is_off(operation: Any, args: Any, kwargs: Any) -> bool:
    """Decide whether an operation with dropout, such as attention, is called without it."""
    for number, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            given = args[number] if number < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given == 0)
    return False
