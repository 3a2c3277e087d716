"""Load a user's samples from a NumPy archive (.npz).

Either one pair of arrays, `inputs` and `labels`, which is split into train, val and test; or a pair for each part:
`train_inputs`, `train_labels`, `test_inputs`, … (`inputs_train` is accepted too). Without a val part a share of the
train part becomes one. `features`, `x` and `X` mean `inputs`; `targets` and `y` mean `labels`.
"""

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dbo.tasks.api import Array, Part, Split, dataset, param
from dbo.tasks.datasets.own_files import (
    build_split,
    check_features,
    find_file,
    number_classes,
    scale_features,
)

_INPUTS, _LABELS = ("inputs", "features", "x", "X"), ("labels", "targets", "y")


@dataset("arrays")
@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """Your own samples in a .npz file: inputs and labels, for all samples or for each of train, val and test."""

    file: str = param(help="NumPy archive; inputs (samples first, images are flattened), labels (classes)")
    scaling: Literal["none", "standard"] = param(
        "none", help="standard: every feature has mean 0 and deviation 1 over train and val"
    )
    test_fraction: float = param(0.2, gt=0, lt=1, help="share of all samples kept for testing, without a test part")
    val_fraction: float = param(
        0.5, gt=0, lt=1, help="share of the remaining samples for the upper level, without a val part")

    def load(self, seed: int, data_dir: str | None) -> Split:
        where = f"task.file: {self.file}"
        stored = _read(str(find_file("file", self.file)), where)
        names = [part for part in ("train", "val", "test") if _find_pair(stored, part, where) is not None]
        if names not in ([], ["train", "test"], ["train", "val", "test"]):
            missing = "train" if "train" not in names else "test"
            raise ValueError(f"{where} has {' and '.join(names)} arrays, but no {missing}_inputs; add these too")
        pairs = [_find_pair(stored, name, where) for name in names or ("",)]
        found = [pair for pair in pairs if pair is not None]
        if not found:
            has = ", ".join(sorted(stored)) or "nothing"
            raise ValueError(f"{where} has {has}; must have the arrays inputs and labels, or train_inputs, …")
        labels, classes = number_classes(where, *(pair[1] for pair in found))
        parts = {
            name: Part(check_features(f"{where}: {f'{name}_' if names else ''}inputs", inputs), own)
            for name, (inputs, _), own in zip(names or ("train",), found, labels, strict=True)
        }
        widths = {name: part.features.shape[1] for name, part in parts.items()}
        if len(set(widths.values())) > 1:
            raise ValueError(f"{where}: the parts have {widths} features; must be as many")
        split = build_split(
            parts["train"], parts.get("val"), parts.get("test"), classes, self.test_fraction, self.val_fraction, seed
        )
        return scale_features(split, self.scaling)


def _read(file: str, where: str) -> dict[str, Array]:
    try:
        stored = np.load(file, allow_pickle=False)
        if not isinstance(stored, np.lib.npyio.NpzFile):
            raise ValueError("it holds a single array")
        with stored:
            return dict(stored)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{where} is not a NumPy archive without objects ({reason}); write it with np.savez") from None


def _find_pair(stored: Mapping[str, Array], part: str, where: str) -> tuple[Array, Array] | None:
    """Return inputs and labels of one part ("": of all samples); None if the file has neither."""
    inputs, labels = (
        next((stored[full] for name in names for full in _spell(name, part) if full in stored), None)
        for names in (_INPUTS, _LABELS)
    )
    if inputs is None and labels is None:
        return None
    prefix = f"{part}_" if part else ""
    if inputs is None or labels is None:
        missing, there = ("inputs", "labels") if inputs is None else ("labels", "inputs")
        raise ValueError(f"{where} has {prefix}{there}, but no {prefix}{missing}; must have both")
    if inputs.ndim == 0 or labels.ndim == 0 or len(inputs) != len(labels):
        raise ValueError(f"{where}: {prefix}inputs {inputs.shape} and {prefix}labels {labels.shape} must be as many")
    return inputs, labels


def _spell(name: str, part: str) -> tuple[str, ...]:
    return (f"{part}_{name}", f"{name}_{part}") if part else (name,)
