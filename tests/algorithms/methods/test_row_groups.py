"""Compressors that send groups of entries, with every method: y's rows are matrices, x's are not."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.api import COMPRESSORS, Message, RandK, RowTopK, TopK, algorithms
from dbo.algorithms.compression.compressors import without_width
from dbo.platform.engine import block
from dbo.platform.engine.arrangement import arrange
from dbo.platform.engine.local import LocalEngine
from dbo.platform.errors import InputError
from dbo.platform.experiment import Experiment
from dbo.platform.runs.preparation import prepare

# d_x = 51 features, which 4 classes do not divide: d_y = 4 · d_x.
TASK = {"name": "coefficient_tuning", "dataset": "synthetic_text", "documents": 100, "features": 51, "classes": 4}
COMPRESSED = [name for name, made in algorithms().items() if "compressor" in {f.name for f in fields(made.config)}]
GROUPED = [name for name, kind in COMPRESSORS.items() if "width" in {f.name for f in fields(kind)}]     # type: ignore[arg-type]


def describe(name: str, **changes: Any) -> Experiment:
    return Experiment(task=TASK, nodes=4, algorithm={"name": name, **changes})


def test_they_are_known() -> None:
    """Methods on a graph and with a server."""
    assert {"c2dfb", "c2dfb_nc", "c2dfb_lead", "c2dfb_central", "lean", "ef_soba"} <= set(COMPRESSED)
    assert GROUPED == ["row_top_k"]


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.parametrize("q", GROUPED)
def test_every_method_sends_groups(name: str, q: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of y's size have whole features, those of x's size single entries; the run stays finite."""
    experiment = describe(name, compressor={"name": q, "ratio": 0.2, "width": 4})
    parts, setup = experiment.parts, prepare(experiment)
    widths: dict[int, set[int]] = {}
    measure = block.measure

    def record(messages: dict[str, Message]) -> Any:
        for message in messages.values():
            if message.form == "sparse":
                widths.setdefault(message.shape[1], set()).add(message.width)
        return measure(messages)

    monkeypatch.setattr(block, "measure", record)
    problem, network = arrange(parts.algorithm, setup.problem, setup.network)
    engine = LocalEngine(parts.algorithm, parts.config, problem, network, [range(network.nodes)])
    for round_ in range(1, 4):
        engine.advance(round_)
    assert np.isfinite(engine.rows("x")).all()
    assert np.isfinite(engine.rows("y")).all()
    assert widths[204] == {4}
    assert widths.get(51, {1}) == {1}


@pytest.mark.parametrize("name", COMPRESSED)
def test_a_width_that_does_not_divide_a_row_is_refused(dbo: Any, tmp_path: Path, name: str) -> None:
    """Exit 2, one line, nothing written."""
    task = [f"task.{key}={value}" for key, value in TASK.items()]
    done = dbo(
        "run", *task, "nodes=4", "rounds=1", f"algorithm={name}", "algorithm.compressor={name: row_top_k, width: 5}",
        "tracking.uri=off", "--out", tmp_path / "run")
    assert done.code == 2
    assert done.err == (
        "dbo: algorithm.compressor.width: 5 is not allowed; must divide the 204 entries of a row of y\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["c2dfb", "lean"])
def test_the_width_of_x_is_checked_against_x(name: str) -> None:
    """4 divides the entries of y only."""
    with pytest.raises(InputError, match=r"algorithm\.compressor_x\.width: 4 .* the 51 entries of a row of x"):
        prepare(describe(name, compressor_x={"name": "row_top_k", "width": 4}))
    prepare(describe(name, compressor_x={"name": "row_top_k", "width": 3}))


@pytest.mark.parametrize(("command", "keys"), [
    ("compare", "algorithms: {madsbo: {}, grouped: {name: lean, compressor: {name: row_top_k, width: 5}}}"),
    ("sweep", "axes: {algorithm.compressor.width: [1, 5]}"),
])
def test_groups_of_runs_are_refused_before_the_first(dbo: Any, tmp_path: Path, command: str, keys: str) -> None:
    """The problem is built once; the other methods' and cells' compressors are checked as well."""
    base = f"task: {TASK}, nodes: 4, rounds: 1, tracking: {{uri: 'off'}}"
    if command == "sweep":
        base = f"name: some, experiment: {{{base}, algorithm: {{name: lean, compressor: {{name: row_top_k}}}}}}"
    (tmp_path / "file.yaml").write_text(f"{{{base}, {keys}}}\n")
    done = dbo(command, tmp_path / "file.yaml", "--out", tmp_path / "out")
    assert done.code == 2
    assert "algorithm.compressor.width: 5 is not allowed" in done.err
    assert not (tmp_path / "out").exists()


def test_groups_of_one_entry_are_left() -> None:
    """`without_width` changes nothing but the width."""
    assert without_width(RowTopK(ratio=0.3, width=4)) == RowTopK(ratio=0.3, width=1)
    for q in (TopK(ratio=0.3, bits=4), RandK()):
        assert without_width(q) is q


@pytest.mark.parametrize("given", [{}, {"ratio_x": 0.4}])
def test_lean_compresses_x_as_before_by_default(given: dict[str, Any]) -> None:
    """y's top-k, with `ratio_x`: the same bits as naming it in `compressor_x`; another one gives others."""
    named = {"compressor_x": {"name": "top_k", "ratio": given.get("ratio_x", 0.2), "bits": 4}}
    rows = []
    for changes in (given, named, {"compressor_x": {"name": "rand_k"}}):
        experiment = describe("lean", compressor={"name": "top_k", "ratio": 0.2, "bits": 4}, **changes)
        parts, setup = experiment.parts, prepare(experiment)
        engine = LocalEngine(parts.algorithm, parts.config, setup.problem, setup.network, [range(4)])
        for round_ in range(1, 5):
            engine.advance(round_)
        rows.append(engine.rows("x").tobytes())
    assert rows[0] == rows[1] != rows[2]
