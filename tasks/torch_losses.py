"""Losses that are faster than their plain expressions when classes are few and samples are many."""

import torch
from torch import Tensor


def linear_cross_entropy(features: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of the scores `features @ weight`, for weight (features, classes).

    The value of `cross_entropy(features @ weight, labels)`. Scores are computed with the classes first: softmax over
    ten classes then runs along the samples, which is many times faster on a CPU.
    """
    scores = weight.transpose(-2, -1) @ features.transpose(-2, -1)      # (classes, samples)
    at_label = torch.log_softmax(scores, dim=-2).gather(-2, labels.unsqueeze(-2))
    return -at_label.mean()
