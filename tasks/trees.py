"""Flatten trees of tensors and modules to a row, and rebuild them inside a loss."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd


class FunctionalModule:
    """A module with given parameters: call it like the module.

    Parameters, buffers and inner modules are attributes, as in the module itself: `net.conv.weight`, `net[0].bias`.
    Inner modules can be called too.
    """

    def __init__(self, module: nn.Module, parameters: dict[str, Tensor]) -> None:
        self._module, self._parameters = module, parameters

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return functional_call(self._module, self._parameters, arguments, keywords)

    def parameters(self) -> Iterator[Tensor]:
        return iter(self._parameters.values())

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._parameters.items())

    def __getattr__(self, name: str) -> "Tensor | FunctionalModule | None":
        if name.startswith("__") or "_module" not in self.__dict__:      # `copy` asks before there is a module
            raise AttributeError(name)
        if name in self._parameters:
            return self._parameters[name]
        module = self._module
        # By identity: a parameter that several names share is given once.
        given = {id(own): self._parameters[path] for path, own in module.named_parameters()}
        if (inner := module._modules.get(name)) is not None:
            return FunctionalModule(inner, {path: given[id(own)] for path, own in inner.named_parameters()})
        if (own := dict(module.named_parameters(recurse=False, remove_duplicate=False)).get(name)) is not None:
            return given[id(own)]
        if (buffer := dict(module.named_buffers(recurse=False)).get(name)) is not None:
            return buffer
        if name in module._parameters:                    # such as the bias of a layer that has none
            return None
        found = [*self._parameters, *(inner for inner, _ in module.named_children())]
        raise AttributeError(f"the module has no parameter {name!r}; it has {', '.join(found)}")

    def __getitem__(self, key: int | str) -> "Tensor | FunctionalModule":
        """Return an entry of a Sequential, or of a list or dictionary of modules or parameters."""
        name = self._entries[key] if isinstance(key, int) else key
        found: Tensor | FunctionalModule = getattr(self, name)
        return found

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> "Iterator[Tensor | FunctionalModule]":
        return (self[number] for number in range(len(self)))

    @property
    def _entries(self) -> list[str]:
        return [*self._module._modules, *self._module._parameters]


@dataclass(frozen=True, slots=True)
class _Leaf:
    number: int
    shape: torch.Size


@dataclass(frozen=True, slots=True)
class _ModuleLeaf:
    module: nn.Module
    parameters: dict[str, _Leaf]


@dataclass(frozen=True, slots=True)
class TreeSpec:
    """The structure of a tree: rebuild it from a row, as plain tensors or as the user's own modules."""

    template: Any
    sizes: list[int] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    @property
    def dim(self) -> int:
        return sum(self.sizes)

    def unflatten(self, row: Tensor) -> Any:
        """Return the tree with views of the row as leaves, modules as functions of them."""
        parts = torch.split(row, self.sizes)

        def call(leaf: _ModuleLeaf, tensors: dict[str, Tensor]) -> FunctionalModule:
            own = leaf.module.named_parameters()
            return FunctionalModule(leaf.module, {name: tensors.get(name, frozen) for name, frozen in own})

        return _map(self.template, lambda leaf: parts[leaf.number].view(leaf.shape), call)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "TreeSpec":
        """Return the structure with copies of its modules, buffers on a device and floating ones in `dtype`."""
        def move(node: Any) -> Any:
            if isinstance(node, _ModuleLeaf):
                return _ModuleLeaf(copy.deepcopy(node.module).to(device=device, dtype=dtype), node.parameters)
            if isinstance(node, dict):
                return {key: move(item) for key, item in node.items()}
            return _rebuild(node, [move(item) for item in node]) if isinstance(node, list | tuple) else node

        return TreeSpec(move(self.template), self.sizes, self.paths)

    def rebuild(self, row: Tensor) -> Any:
        """Return the user's own tree with copies of the row's parts as leaves, modules as modules."""
        parts = torch.split(row, self.sizes)

        def load(leaf: _ModuleLeaf, tensors: dict[str, Tensor]) -> nn.Module:
            module = copy.deepcopy(leaf.module).to(row.dtype)
            module.load_state_dict({**module.state_dict(), **tensors})
            return module

        return _map(self.template, lambda leaf: parts[leaf.number].reshape(leaf.shape).clone(), load)

    def join(self, parts: Mapping[str, NDArray[Any]], where: str) -> NDArray[Any]:
        """Return the row whose parts are the arrays of a state_dict, `where.…`; ValueError names one that is wrong.

        Buffers and frozen parameters are not part of a row: those that the arrays have must be those of the modules.
        """
        names = [where] if isinstance(self.template, _Leaf) else [f"{where}.{path}" for path in self.paths]
        shapes = {name: tuple(leaf.shape) for name, leaf in zip(names, _leaves(self.template), strict=True)}
        constants = dict(_buffers(self.template, where))
        for name, shape in shapes.items():
            if name not in parts:
                raise ValueError(f"has no {name}; must have {', '.join(names)}")
            if parts[name].shape != shape:
                raise ValueError(f"has {name} of shape {parts[name].shape}; this task has {shape}")
        for name in parts.keys() - shapes.keys():
            if name not in constants:
                raise ValueError(f"has {name}; must have {', '.join(names)}, and nothing else of {where}")
            constant = constants[name]
            if constant is not None and not _is_same(constant, parts[name]):
                raise ValueError(f"has a constant {name} (buffer or frozen) that is not the one of the task's init")
        return np.concatenate([parts[name].reshape(-1).astype(np.float64) for name in names])


def flatten(tree: Any, where: str) -> tuple[TreeSpec, Tensor]:
    """Return the structure of a tree and its entries as one row; `where` names the tree in errors."""
    tensors: list[Tensor] = []
    paths: list[str] = []
    seen: dict[int, str] = {}

    def add(tensor: Any, path: str) -> _Leaf:
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"{path} is a {type(tensor).__name__}; must be a tensor, a torch.nn.Module, or a dict, list or tuple "
                f"of them"
            )
        if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.is_meta:
            kind = "meta" if tensor.is_meta else "sparse" if tensor.layout is not torch.strided else str(tensor.dtype)
            raise ValueError(f"{path} has dtype {kind.removeprefix('torch.')}; must be floating-point and dense")
        if (first := seen.setdefault(id(tensor), path)) != path:
            raise ValueError(f"{first} and {path} are the same tensor; name it once, or use one module for both")
        if path.partition(".")[2] in paths:
            raise ValueError(f"two entries have the path {path}; choose other keys")
        tensors.append(tensor.detach())
        paths.append(path.partition(".")[2] or path)
        return _Leaf(len(tensors) - 1, tensor.shape)

    def visit(node: Any, path: str) -> Any:
        if isinstance(node, nn.Module):
            _check_module(node, path)
            trained = ((name, p) for name, p in node.named_parameters() if p.requires_grad)      # the others are frozen
            return _ModuleLeaf(node, {name: add(p, f"{path}.{name}") for name, p in trained})
        if isinstance(node, dict):
            return {key: visit(item, f"{path}.{key}") for key, item in node.items()}
        if isinstance(node, list | tuple):
            return _rebuild(node, [visit(item, f"{path}.{n}") for n, item in enumerate(node)])
        return add(node, path)

    template = visit(tree, where)
    if not tensors:
        raise ValueError(f"{where} has no tensors; must have at least one entry")
    spec = TreeSpec(template, [tensor.numel() for tensor in tensors], paths)
    return spec, torch.cat([tensor.reshape(-1).to(torch.float64) for tensor in tensors])


def _check_module(module: nn.Module, path: str) -> None:
    """Refuse layers whose forward pass changes buffers or draws random numbers: rounds would not be repeatable."""
    for name, layer in module.named_modules():
        place = f"{path}.{name}".rstrip(".")
        if isinstance(layer, _NormBase) and layer.track_running_stats and layer.training:
            raise ValueError(
                f"{place}: {type(layer).__name__} changes its running statistics in every forward pass; use "
                f"track_running_stats=False, GroupNorm or LayerNorm, or call .eval() on it"
            )
        if isinstance(layer, _DropoutNd) and layer.p > 0 and layer.training:
            raise ValueError(
                f"{place}: {type(layer).__name__} draws random numbers that a resumed run could not repeat; remove it, "
                f"or call .eval() on the module"
            )


def _map(node: Any, leaf: Callable[[_Leaf], Any], module: Callable[[_ModuleLeaf, dict[str, Tensor]], Any]) -> Any:
    if isinstance(node, _Leaf):
        return leaf(node)
    if isinstance(node, _ModuleLeaf):
        return module(node, {name: leaf(inner) for name, inner in node.parameters.items()})
    if isinstance(node, dict):
        return {key: _map(item, leaf, module) for key, item in node.items()}
    return _rebuild(node, [_map(item, leaf, module) for item in node])


def _rebuild(like: Any, items: list[Any]) -> Any:
    """Return items as a list, a tuple or a named tuple, as in another tree."""
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)


def _is_same(constant: Tensor, found: NDArray[Any]) -> bool:
    """Compare in float32, which a model of a float32 run has."""
    own = constant.detach()
    if own.is_floating_point():
        return np.array_equal(own.float().numpy(), found.astype(np.float32))
    return np.array_equal(own.numpy(), found)


def _leaves(node: Any) -> Iterator[_Leaf]:
    if isinstance(node, _Leaf):
        yield node
    elif isinstance(node, _ModuleLeaf):
        yield from node.parameters.values()
    else:
        for item in node.values() if isinstance(node, dict) else node:
            yield from _leaves(item)


def _buffers(node: Any, path: str) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the other entries of state_dicts: buffers, frozen parameters, None for second names of a parameter."""
    if isinstance(node, _ModuleLeaf):
        frozen = {name: p for name, p in node.module.named_parameters() if not p.requires_grad}
        constants = {**dict(node.module.named_buffers()), **frozen}
        for name in node.module.state_dict().keys() - node.parameters.keys():
            yield f"{path}.{name}", constants.get(name)
    elif not isinstance(node, _Leaf):
        for key, item in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _buffers(item, f"{path}.{key}")
