"""How cells share the CPUs of a cluster."""

from dbo.sweeps.tune_runner import compute_fair_share


def test_fair_share_is_the_largest_that_fits() -> None:
    """Whole CPUs first, and never a share across machines."""
    assert compute_fair_share([8.0], 4) == 1.0
    assert compute_fair_share([2.0], 2) == 1.0
    assert compute_fair_share([2.0], 4) == 0.5
    assert compute_fair_share([1.0, 1.0], 3) == 0.5
    assert compute_fair_share([4.0, 4.0], 10) == 0.8
    assert compute_fair_share([2.0], 1000) == 0.01
