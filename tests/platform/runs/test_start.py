"""A run that starts from a model: of another run, or saved by the user."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.numpy import save_file

import dbo
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
     ("half", "has no y; must have the arrays x and y"), ("nan", "x contains NaN or inf"),
     ("parts", "has no x, y; must have the arrays x and y"),
     ("pickled", "is a file of torch.save or np.savez, which is not read; write it"),
     ("brief", "has numbers of type BF16; must be float16, 32 or 64")],
)
def test_wrong_starts_are_one_line(tiny: Tiny, tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "text").write_text("hello")
    arrays: dict[str, dict[str, Any]] = {
        "wide": {"x": np.zeros(3), "y": np.zeros(8)}, "half": {"x": np.zeros(4)},
        "nan": {"x": np.full(4, np.nan), "y": np.zeros(8)}, "parts": {"x.w": np.zeros(4), "y.w": np.zeros(8)},
    }
    torch.save({"x": torch.zeros(4)}, tmp_path / "pickled")
    safetensors.torch.save_file({"x": torch.zeros(4, dtype=torch.bfloat16), "y": torch.zeros(8)}, tmp_path / "brief")
    for file, content in arrays.items():
        save_file(content, tmp_path / file)
    with pytest.raises(InputError) as caught:
        prepare(tiny(start=str(tmp_path / name)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- the trees and modules of a TorchTask ----------------------------------------------------------------------------

NET = """
import numpy as np, torch, dbo

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 2)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, inputs):
        return self.inner(inputs + self.shift)

@dbo.task("start_net")
class StartNet(dbo.TorchTask):
    'A module with a buffer, and a tree.'

    def data(self, seed):
        rng = np.random.default_rng(seed)
        return dbo.Split(*((rng.standard_normal((24, 3)), rng.standard_normal(24)) for _ in range(3)))

    def init(self, generator):
        return Layer(), {"head": [torch.randn(2, generator=generator)], "bias": torch.zeros(())}

    def lower(self, x, y, batch):
        error = x(batch.inputs) @ y["head"][0] + y["bias"] - batch.labels
        return error.square().mean() + y["head"][0].square().sum() + y["bias"].square()

    def upper(self, x, y, batch):
        return (x(batch.inputs) @ y["head"][0] + y["bias"] - batch.labels).square().mean()

    def metrics(self, x, y, test):
        return {"test_loss": self.upper(x, y, test)}
"""
PARTS = {"x.inner.weight", "x.inner.bias", "x.shift", "y.head.0", "y.bias"}


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The experiment of a small task in PyTorch; the working folder is a new one."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    return {
        "task": "start_net", "plugins": ["net.py"], "nodes": 3, "rounds": 2, "dtype": "float64", "engine": "local",
        "partition": "iid", "algorithm": {"name": "c2dfb", "inner_steps": 2, "eta_in": 0.01, "eta_out": 0.01},
    }


def starts_of(net: dict[str, Any], start: Any) -> tuple[Any, Any]:
    """Return the rows that a run of no rounds would start from."""
    from dbo.api import _build_experiment

    shard = prepare(_build_experiment(net, {"start": start})).problem.shard([0])
    return shard.x0[0], shard.y0[0]


def test_a_saved_state_dict_is_a_start(net: dict[str, Any]) -> None:
    """Every form of the final model starts from the same rows: file, state_dict, saved state_dict, modules, result."""
    result = dbo.run(net, out="first")
    model = result.model
    state = model.state_dict()
    assert set(state) == PARTS
    model.save("rows.safetensors")
    safetensors.torch.save_file({name: value.contiguous() for name, value in state.items()}, "state.safetensors")
    for start in ("rows.safetensors", "state.safetensors", model, result, state, (model.x, model.y)):
        x, y = starts_of(net, start)
        np.testing.assert_array_equal(x, model.x_row)
        np.testing.assert_array_equal(y, model.y_row)
    again = dbo.run(net, out="second", start=(model.x, model.y))
    assert again.history["test_loss"].iloc[0] == pytest.approx(result.history["test_loss"].iloc[-1], rel=1e-12)
    assert again.experiment.start is not None
    assert Path(again.experiment.start).parent == Path("runs", "starts")
    assert dbo.run(net, out="second", start=(model.x, model.y), resume=True).is_new is False


def test_the_file_of_a_start_is_its_content(net: dict[str, Any]) -> None:
    """The same model twice is one file and one key; another one is another file."""
    from dbo.api import _build_experiment

    zero = {"x": np.zeros(8), "y": np.zeros(3)}
    keys = [
        _build_experiment(net, {"start": start}).run_key for start in (zero, dict(zero), {**zero, "y": np.ones(3)})
    ]
    assert keys[0] == keys[1] != keys[2]
    assert len(list(Path("runs", "starts").iterdir())) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y.bias": None}, "has no y.bias; must have y.head.0, y.bias"),
        ({"y.head.0": torch.zeros(3)}, r"has y.head.0 of shape (3,); this task has (2,)"),
        ({"y.more": torch.zeros(3)}, "has y.more; must have y.head.0, y.bias, and nothing else of y"),
        ({"x.shift": torch.zeros(3)}, "has a constant x.shift (buffer or frozen) that is not the one of"),
        ({"x.inner.bias": torch.full((2,), np.nan)}, "start: x contains NaN or inf"),
        ({"y.bias": "nothing"}, "start: y.bias is a str; must be a tensor or an array of numbers"),
    ],
)
def test_wrong_parts_are_one_line(net: dict[str, Any], change: dict[str, Any], message: str) -> None:
    """A part that is missing, has another shape, is unknown, or is no number."""
    state = {
        "x.inner.weight": torch.zeros(2, 3), "x.inner.bias": torch.zeros(2), "x.shift": torch.ones(3),
        "y.head.0": torch.zeros(2), "y.bias": torch.zeros(()), **change,
    }
    with pytest.raises(InputError) as caught:
        starts_of(net, {name: value for name, value in state.items() if value is not None})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("start", [3.0, [1, 2, 3], object()])
def test_an_object_that_is_no_model_is_one_line(net: dict[str, Any], start: Any) -> None:
    with pytest.raises(InputError, match=f"start: a {type(start).__name__} is not allowed; must be a file, a result's"):
        dbo.run(net, start=start)
