"""Cross-entropy: stable for any scores, zero on padding."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dbo.tasks.problems.softmax import CrossEntropy


@given(shift=st.floats(-1e4, 1e4), seed=st.integers(0, 99))
def test_a_common_shift_of_scores_changes_nothing(shift: float, seed: int) -> None:
    """softmax(s + a) = softmax(s): loss, residual and curvature stay finite and equal for huge scores."""
    rng = np.random.default_rng(seed)
    scores, v = rng.standard_normal((2, 6, 3))
    loss = CrossEntropy.from_labels(np.arange(6) % 3, np.full(6, 1 / 6), 3, "float64")
    np.testing.assert_allclose(loss.loss(scores + shift), loss.loss(scores), atol=1e-10)
    np.testing.assert_allclose(loss.residual(scores + shift), loss.residual(scores), atol=1e-10)
    np.testing.assert_allclose(loss.curvature(scores + shift, v), loss.curvature(scores, v), atol=1e-10)


def test_scores_far_apart_do_not_overflow() -> None:
    """Scores of ±1e4 in float32 give the limit values, without a warning."""
    loss = CrossEntropy.from_labels(np.array([0, 1]), np.array([0.5, 0.5]), 2, "float32")
    scores = np.array([[1e4, -1e4], [1e4, -1e4]], dtype=np.float32)
    np.testing.assert_allclose(loss.loss(scores), [0.0, 1e4])
    np.testing.assert_allclose(loss.residual(scores), [[0.0, 0.0], [0.5, -0.5]])
    np.testing.assert_allclose(loss.curvature(scores, np.ones_like(scores)), 0)


def test_padding_has_no_loss_and_no_derivative() -> None:
    """A sample of weight 0 contributes exactly zero to everything, whatever its scores and label are."""
    loss = CrossEntropy.from_labels(np.array([1, 0]), np.array([1.0, 0.0]), 3, "float64")
    scores = np.random.default_rng(0).standard_normal((2, 3))
    for result in (loss.loss(scores), loss.residual(scores), loss.curvature(scores, scores)):
        assert np.all(result[1] == 0.0)
        assert np.all(result[0] != 0.0)
