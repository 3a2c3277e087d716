"""In a notebook a run shows its progress, and a result is a table."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import dbo
from dbo.notebook import is_notebook

SMALL: dict[str, Any] = {
    "task": {"name": "quadratic", "dim_x": 4, "dim_y": 8}, "nodes": 4, "rounds": 3, "engine": "local",
    "algorithm": "d_soba",
}


class Screen:
    """What a notebook displays: the last content of every output."""

    def __init__(self) -> None:
        self.outputs: list[str] = []

    def display(self, html: str, display_id: bool) -> Any:
        self.outputs.append(html)
        number = len(self.outputs) - 1
        return SimpleNamespace(update=lambda new: self.outputs.__setitem__(number, new))


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """Pretend to be a Jupyter kernel."""
    shown, package, display = Screen(), ModuleType("IPython"), ModuleType("IPython.display")
    shell = type("ZMQInteractiveShell", (), {})()
    package.get_ipython = lambda: shell         # type: ignore[attr-defined]
    display.HTML, display.display = str, shown.display       # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


def test_a_run_shows_its_progress_in_one_output(screen: Screen, tmp_path: Path) -> None:
    """The line is updated in place; its end is the last round, with its score."""
    dbo.run(**SMALL, out=tmp_path / "r")
    assert len(screen.outputs) == 1
    assert "3/3 finished · upper loss " in screen.outputs[0]
    assert "d_soba seed 0" in screen.outputs[0]


def test_the_runs_of_a_comparison_can_be_told_apart(screen: Screen, tmp_path: Path) -> None:
    """A line for each run, with its seed and the label of a variant."""
    file = tmp_path / "c.yaml"
    file.write_text("algorithms: {d_soba: {}, slow: {name: d_soba, eta_x: 0.001}}\n")
    settings = {key: value for key, value in SMALL.items() if key != "algorithm"}
    dbo.compare(file=file, seeds=[0, 1], out=tmp_path / "c", **settings)
    labels = [html.partition("</code>")[0] for html in screen.outputs]
    assert labels == [f"<code>{name} seed {seed}" for seed in (0, 1) for name in ("d_soba", "slow")]


def test_a_script_shows_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a kernel there is no display."""
    assert not is_notebook()
    dbo.run(**SMALL, out=tmp_path / "r")
    assert capsys.readouterr() == ("", "")


def test_results_are_one_line_of_text(tmp_path: Path) -> None:
    """A prompt shows how a run ended and where it is, not its arrays."""
    result = dbo.run(**SMALL, out=tmp_path / "r")
    text = repr(result)
    assert text.startswith("<Result d_soba finished round=3 upper_loss=")
    assert str(tmp_path / "r") in text
    assert "\n" not in text
    assert repr(dbo.load(tmp_path / "r")) == f"<Loaded run: 1 run, 4 evaluations, folder={str(tmp_path / 'r')!r}>"


def test_results_are_tables(tmp_path: Path) -> None:
    """The last evaluation of a run; names cannot inject markup."""
    result = dbo.run(**SMALL, out=tmp_path / "<b>r")
    html = result._repr_html_()
    assert "<td>upper_loss</td>" in html
    assert "&lt;b&gt;r" in html
    assert "<b>r" not in html
    loaded: Callable[[], str] = dbo.load(tmp_path / "<b>r")._repr_html_
    assert "d_soba" in loaded()
    assert "&lt;b&gt;r" in loaded()
