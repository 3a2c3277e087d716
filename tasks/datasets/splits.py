"""Split a data set into train, validation and test, class by class."""

import numpy as np

from dbo.tasks.api import Array, Part, Split, generator


def split_stratified(labels: Array, fraction: float, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return sample numbers (rest, taken), both sorted, with a share `fraction` of every class taken."""
    shuffled = rng.permutation(len(labels))
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]
    sizes = np.bincount(labels)
    rank = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    taken = rank < np.round(fraction * sizes)[labels[order]]
    return np.sort(order[~taken]), np.sort(order[taken])


def subsample(part: Part, share: float, seed: int, purpose: str) -> Part:
    """Return a share of the samples of every class; all of them if the share is 1 or more."""
    if share >= 1:
        return part
    return part.take(split_stratified(part.labels, share, generator(seed, purpose))[1])


def split_three_ways(part: Part, classes: int, test_fraction: float, val_fraction: float, seed: int) -> Split:
    """Take the test part out first, then a share `val_fraction` of the rest for the upper level."""
    rest, test = split_stratified(part.labels, test_fraction, generator(seed, "split.test"))
    return split_two_ways(part.take(rest), part.take(test), classes, val_fraction, seed)


def split_two_ways(rest: Part, test: Part, classes: int, val_fraction: float, seed: int) -> Split:
    """Split `rest` into train and validation, for data with an official test part."""
    train, val = split_stratified(rest.labels, val_fraction, generator(seed, "split.val"))
    samples = Split(rest.take(train), rest.take(val), test, classes)
    for name, part in zip(("train", "val", "test"), samples.parts, strict=True):
        if len(part) == 0:
            raise ValueError(
                f"task.val_fraction, task.test_fraction: the {name} part of {len(rest) + len(test)} samples is empty; "
                f"choose other fractions or more samples"
            )
    return samples
