"""Turn a user's own samples into a `Split`: check features and labels, number the classes, split, scale."""

import os
from pathlib import Path
from typing import Literal

import numpy as np
from scipy import sparse

from dbo.tasks.api import Array, Features, Part, Split
from dbo.tasks.datasets.splits import split_three_ways, split_two_ways


def find_file(key: str, file: str) -> Path:
    """Return the path of an existing file that `key` names; ~ is the home folder."""
    path = Path(os.path.expanduser(file))
    if not path.is_file():
        raise ValueError(f"task.{key}: {file} {'is a folder' if path.is_dir() else 'does not exist'}; must be a file")
    return path


def check_features(where: str, features: Features) -> Features:
    """Return rows of finite numbers: an image becomes one row; NaN and inf are refused."""
    values = features.data if isinstance(features, sparse.csr_array) else features
    if values.dtype.kind not in "fiub":
        raise ValueError(f"{where} is an array of {values.dtype}; must be numbers")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ValueError(f"{where} contains NaN or inf; must be finite numbers")
    if isinstance(features, sparse.csr_array):
        return features
    if features.ndim < 2:
        raise ValueError(f"{where} has shape {features.shape}; must be (samples, features)")
    return features.reshape(len(features), -1).astype(np.float64 if values.dtype.kind != "f" else values.dtype)


def number_classes(where: str, *parts: Array) -> tuple[list[Array], int]:
    """Return the labels of each part as class numbers 0 … C−1 in the order of the values, and C.

    Labels are texts or whole numbers: 0/1, −1/+1, or any others.
    """
    for labels in parts:
        if labels.ndim != 1:
            raise ValueError(f"{where} has labels of shape {labels.shape}; must be one label per sample")
        if labels.dtype.kind == "f" and not np.isfinite(labels).all():
            raise ValueError(f"{where} has a label that is NaN or inf; must be a class")
        if labels.dtype.kind == "f" and (labels != np.round(labels)).any():
            first = labels[labels != np.round(labels)][0]
            raise ValueError(f"{where} has the label {first:g}; must be a class: a whole number or a text")
        if labels.dtype.kind not in "fiubU":
            raise ValueError(f"{where} has labels of type {labels.dtype}; must be whole numbers or texts")
    values, numbers = np.unique(np.concatenate(parts), return_inverse=True)
    if len(values) < 2:
        found = f"only the class {values[0]}" if len(values) else "no sample"
        raise ValueError(f"{where} has {found}; must have at least two classes")
    if len(values) > max(2, len(numbers) // 2):
        raise ValueError(f"{where} has {len(values)} classes in {len(numbers)} samples; is it the right label?")
    ends = np.cumsum([len(labels) for labels in parts])[:-1]
    return np.split(numbers.astype(np.int64), ends), len(values)


def build_split(
    rest: Part, val: Part | None, test: Part | None, classes: int, test_fraction: float, val_fraction: float, seed: int,
) -> Split:
    """Return the given parts; a missing test part is taken out of `rest`, then a missing validation part."""
    if test is None:
        return split_three_ways(rest, classes, test_fraction, val_fraction, seed)
    return split_two_ways(rest, test, classes, val_fraction, seed) if val is None else Split(rest, val, test, classes)


def scale_features(split: Split, scaling: Literal["none", "standard"]) -> Split:
    """Shift and scale every dense feature to mean 0 and deviation 1 over train and val; constants become 0."""
    if scaling == "none":
        return split
    known = np.concatenate([split.train.features, split.val.features])
    mean, deviation = known.mean(axis=0), known.std(axis=0)
    deviation = np.where(deviation > 0, deviation, 1)
    train, val, test = (Part((part.features - mean) / deviation, part.labels) for part in split.parts)
    return Split(train, val, test, split.classes)
