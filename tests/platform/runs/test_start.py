"""A run that starts from a model: of another run, or saved by the user."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.runs.runner import prepare, run

Tiny = Callable[..., Experiment]


def test_a_run_starts_from_the_mean_of_another(tiny: Tiny, tmp_path: Path) -> None:
    """Round 0 is the mean model that the other run ended with."""
    first = run(tiny(), tmp_path / "first")
    second = run(tiny(start=str(tmp_path / "first" / "state.safetensors")), tmp_path / "second")
    for column in ("test_loss", "upper_loss", "solution_error"):
        ends = first.history[column].iloc[-1], second.history[column].iloc[0]
        assert ends[0] == pytest.approx(ends[1], rel=1e-12)
    assert second.history["consensus_x"].iloc[0] == pytest.approx(0, abs=1e-15)


def test_a_saved_model_is_the_same_start(tiny: Tiny, tmp_path: Path) -> None:
    first = run(tiny(), tmp_path / "first")
    first.model.save(tmp_path / "model.safetensors")
    np.testing.assert_allclose(first.model.x, first.state["x"].mean(0), rtol=1e-15)
    shard = prepare(tiny(start=str(tmp_path / "model.safetensors"))).problem.shard([1])
    np.testing.assert_array_equal(shard.x0[0], first.model.x_row)
    np.testing.assert_array_equal(first.node_model(2).y_row, first.state["y"][2])
    assert set(first.model.state_dict()) == {"x", "y"}


@pytest.mark.parametrize(
    ("name", "message"),
    [("nothing", "cannot be read: No such file"), ("", "is a folder; must be a file; of a run, name its state"),
     ("text", "is not a safetensors file"), ("wide", "start: x has 3 entries; this task has 4"),
     ("/dev/zero", "start: /dev/zero is not a regular file"),
     ("half", "has no y; must have the arrays x and y"), ("nan", "x contains NaN or inf")],
)
def test_wrong_starts_are_one_line(tiny: Tiny, tmp_path: Path, name: str, message: str) -> None:
    from safetensors.numpy import save_file

    (tmp_path / "text").write_text("hello")
    arrays: dict[str, dict[str, Any]] = {
        "wide": {"x": np.zeros(3), "y": np.zeros(8)}, "half": {"x": np.zeros(4)},
        "nan": {"x": np.full(4, np.nan), "y": np.zeros(8)},
    }
    for file, content in arrays.items():
        save_file(content, tmp_path / file)
    with pytest.raises(InputError) as caught:
        prepare(tiny(start=str(tmp_path / name)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
