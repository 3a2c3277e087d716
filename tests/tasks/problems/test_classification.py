"""Test metrics of classification problems."""

import numpy as np

from dbo.tasks.problems.classification import accuracy_and_loss


def test_accuracy_and_loss_by_hand() -> None:
    """Two of three are correct; the loss is the mean of −log p of the label."""
    scores = np.log(np.array([[0.7, 0.3], [0.4, 0.6], [0.9, 0.1]]))
    accuracy, loss = accuracy_and_loss(scores, np.array([0, 1, 1]))
    assert accuracy == 2 / 3
    np.testing.assert_allclose(loss, -np.mean(np.log([0.7, 0.6, 0.1])))
