"""Cutting a data set into train, validation and test, class by class."""

import numpy as np

from dbo.tasks.api import Array, Part, Samples, generator


def stratified(labels: Array, fraction: float, rng: np.random.Generator) -> tuple[Array, Array]:
    """Sample numbers (rest, taken), both sorted: a share `fraction` of every class is taken, to the nearest sample."""
    shuffled = rng.permutation(len(labels))
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]
    sizes = np.bincount(labels)
    rank = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    taken = rank < np.round(fraction * sizes)[labels[order]]
    return np.sort(order[~taken]), np.sort(order[taken])


def three_ways(everything: Part, classes: int, test_fraction: float, val_fraction: float, seed: int) -> Samples:
    """First the test part is taken out, then a share `val_fraction` of what remains becomes the upper level's."""
    rest, test = stratified(everything.labels, test_fraction, generator(seed, "split.test"))
    return with_test(everything.take(rest), everything.take(test), classes, val_fraction, seed)


def with_test(rest: Part, test: Part, classes: int, val_fraction: float, seed: int) -> Samples:
    """For data that comes with a test part of its own."""
    train, val = stratified(rest.labels, val_fraction, generator(seed, "split.val"))
    samples = Samples(rest.take(train), rest.take(val), test, classes)
    for name, part in zip(("train", "val", "test"), samples.parts, strict=True):
        if len(part) == 0:
            raise ValueError(
                f"task.val_fraction, task.test_fraction: the {name} part of {len(rest) + len(test)} samples is empty; "
                f"choose other fractions or more samples"
            )
    return samples
