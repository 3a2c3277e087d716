"""The report as a file: self-contained, escaped, of bounded size, written atomically; and the figures beside it."""

import io
import json
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dbo.dashboards import outputs, report
from dbo.dashboards.charts.costs import build_cost_panels
from dbo.dashboards.charts.curves import build_curves
from dbo.dashboards.charts.draw import COLUMN_WIDTH, DRAWERS, add_legend, create_figure
from dbo.dashboards.figure_file import save_figure
from dbo.dashboards.figures import main as draw_overview
from dbo.dashboards.groups import group_runs
from dbo.dashboards.load import load_runs
from dbo.dashboards.palette import get_style
from dbo.platform.cli import console as console_module
from dbo.platform.cli import main
from dbo.platform.cli import report as report_command
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine import evaluation
from dbo.platform.errors import InputError
from dbo.platform.runs.runner import run
from dbo.platform.runs.schema import Target

ROOT = Path(__file__).resolve().parents[2]
Copy = Callable[[str], Path]


def write_page(tmp_path: Path, *folders: Path) -> str:
    out = tmp_path / "report.html"
    report.write_page(load_runs(folders), out)
    return out.read_text(encoding="utf-8")


def strip_plotly(html: str) -> str:
    """Remove plotly's own text, which is not ours to check."""
    plotly = report.read_plotly()
    assert html.count(plotly) == 1
    return html.replace(plotly, "")


def read_data(html: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def test_page_requests_nothing(recorded: Path, tmp_path: Path) -> None:
    """It has no URL, needs no other file and no storage, and its own security policy forbids them."""
    html = strip_plotly(write_page(tmp_path, recorded))
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", html)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", html)
    assert "localStorage" not in html
    assert "fetch(" not in html
    assert "default-src 'none'" in html


def test_names_cannot_become_markup(recorded: Path, tmp_path: Path) -> None:
    """A run named <script>… is shown by that name, in the text and in the data."""
    html = strip_plotly(write_page(tmp_path, recorded / "diverged", recorded / "sweep"))
    assert "<script>window" not in html
    assert "&lt;script&gt;window.hacked=1&lt;/script&gt;" in html
    assert "A few <b>" not in html
    assert html.count("</script>") == 4
    assert "A few <b>steps</b>" in json.dumps(read_data(html))


def test_embedded_data_cannot_end_its_element() -> None:
    text = report.embed_json({"</script><!--": "&\u2028"})
    assert not set(text) & set("<>&\u2028")
    assert json.loads(text) == {"</script><!--": "&\u2028"}


def test_text_that_is_no_unicode_is_shown(copy: Copy, tmp_path: Path) -> None:
    """JSON may hold half of a surrogate pair, and a folder's name any byte: shown escaped, in valid UTF-8."""
    folder = copy("sweep")
    group = json.loads((folder / "group.json").read_text())
    (folder / "group.json").write_text(json.dumps({**group, "claim": "a\ud800b"}))
    html = write_page(tmp_path, folder)
    assert "a\\ud800b" in html
    assert read_data(html)


def test_incomplete_and_failed_runs_are_reported(recorded: Path, copy: Copy, tmp_path: Path) -> None:
    """Diverged, interrupted, with one evaluation only."""
    single = copy("quadratic")
    for name in ("metrics.jsonl", "nodes.jsonl"):
        (single / name).write_text((single / name).read_text().splitlines(keepends=True)[0])
    for name in ("summary.json", "manifest.json"):
        (single / name).unlink()
    html = write_page(tmp_path, recorded / "diverged", single)
    for text in ("1 run diverged", "1 run was interrupted", "one evaluation only", "0 of 8", "is not finite"):
        assert text in html


def test_figure_without_data_is_replaced_by_its_reason(recorded: Path, tmp_path: Path) -> None:
    html = write_page(tmp_path, recorded / "quadratic")
    for missing in ("accuracy", "sensitivity", "nodes"):
        assert f'<figure id="{missing}"' not in html
    assert "<b>Accuracy</b>: no data. These tasks have no accuracy." in html
    assert '<figure id="topology"' in html
    assert 'figures --only topology' in html


def test_many_long_runs_make_a_page_of_bounded_size(tmp_path: Path) -> None:
    """60 runs × 1,000 evaluations: below 15 MB."""
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "report.py"))
    benchmark["write_runs"](tmp_path / "runs", 60, 1000)
    html = write_page(tmp_path, tmp_path / "runs")
    assert len(html.encode()) < 15e6
    curves = read_data(html)["curves"]
    assert isinstance(curves, list)
    assert len(curves) == 30
    assert max(len(curve["x"]["round"]) for curve in curves) <= 300


def test_damaged_folder_leaves_an_existing_page_unchanged(
    copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is one line and exit code 2, and nothing is written."""
    folder, out = copy("quadratic"), tmp_path / "out" / "report.html"
    out.parent.mkdir()
    out.write_text("existing")
    (folder / "summary.json").write_text("{")
    figures = tmp_path / "figures"
    monkeypatch.setattr(sys, "argv", ["dbo", "report", str(folder), "--out", str(out), "--figures", str(figures)])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert str(folder / "summary.json") in (printed.out + printed.err).replace("\n", "")
    assert out.read_text() == "existing"
    assert not figures.exists()
    assert [file.name for file in out.parent.iterdir()] == ["report.html"]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_command_prints_its_progress(
    recorded: Path, tmp_path: Path, is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that disappears on a terminal, a line that stays elsewhere."""
    monkeypatch.chdir(recorded)
    monkeypatch.setenv("TERM", "xterm")
    screen = Console(file=io.StringIO(), force_terminal=is_terminal, width=200)
    for module in (report_command, console_module):
        monkeypatch.setattr(module, "console", screen)
    report_command.write_report([Path("quadratic")], tmp_path / "r.html")
    printed = screen.file.getvalue()                      # type: ignore[attr-defined]
    assert printed.startswith("reading quadratic\nreport: ") is not is_terminal
    assert ("drawing the page of 1 run" in printed) is is_terminal        # the last state of the line


@pytest.mark.parametrize(
    "wrong", [["--only", "accuracy"], ["--figures", "f", "--only", "nonsense"], ["--target", "a=b"]]
)
def test_wrong_option_exits_2_and_writes_nothing(
    recorded: Path, tmp_path: Path, wrong: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dbo", "report", str(recorded / "quadratic"), *wrong])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 2
    assert not list(tmp_path.iterdir())


def test_figures_fit_a_column_of_a_paper(recorded: Path, tmp_path: Path) -> None:
    """PDF with embedded TrueType fonts, and PNG, one column wide."""
    page, figures = tmp_path / "r.html", tmp_path / "f"
    lines = list(outputs.export_report([recorded / "sweep"], page, figures, "sensitivity,accuracy", None))
    curves = "accuracy-mb, accuracy-node-mb, accuracy-seconds, accuracy-rounds"
    assert lines == [f"figures: {figures} (sensitivity, {curves})"]
    assert not page.exists()
    pdf = (figures / "accuracy-mb.pdf").read_bytes()
    assert pdf.startswith(b"%PDF")
    assert b"/MediaBox [ 0 0 237.6" in pdf       # 3.3 in
    assert b"/FontFile2" in pdf                  # TrueType, type 42
    assert b"/Type3" not in pdf
    assert (figures / "accuracy-mb.png").read_bytes().startswith(b"\x89PNG")


def test_bytes_per_node_are_an_axis_of_their_own(recorded: Path) -> None:
    """Those of the tables, `bytes_broadcast / nodes`, on a log axis, whatever the costs; the other axes as before."""
    runs = group_runs(load_runs([recorded / "sweep"]))
    reached = 0
    for curve, group in zip(build_curves(runs), runs.seed_groups, strict=True):
        (run,) = group.runs
        sent = [record["bytes_broadcast"] / 4 / 1e6 for record in run.records]
        assert curve["x"]["node_mb"] == pytest.approx(sent, rel=1e-4)
        assert curve["x"]["comm_mb"] == pytest.approx([8 * value for value in sent], rel=1e-4)       # a ring of 4
        first = group.setting.target.find_first(run.records)
        if first is not None and curve["reached"] is not None:
            reached += 1
            assert curve["reached"]["node_mb"] == pytest.approx(first["bytes_broadcast"] / 4 / 1e6, rel=1e-4)
    assert reached > 0
    scales = {name: figure.axes[0].get_xscale() for name, figure in DRAWERS["accuracy"](runs)}
    assert scales["accuracy-node-mb"] == "log"
    assert scales["accuracy-rounds"] == "linear"
    alone = group_runs(load_runs([recorded / "sweep" / "cells" / "k1"]))
    assert {name: figure.axes[0].get_xscale() for name, figure in DRAWERS["accuracy"](alone)} == {
        "accuracy-mb": "linear", "accuracy-node-mb": "log", "accuracy-seconds": "linear", "accuracy-rounds": "linear"}


def test_comparison_has_all_figures(recorded: Path, tmp_path: Path) -> None:
    folders = [recorded / "compare", recorded / "diverged"]
    lines = list(outputs.export_report(folders, tmp_path / "r.html", tmp_path, None, None))
    for name in ("loss-rounds", "consensus-x", "consensus-y", "channels", "oracles", "nodes", "topology"):
        assert name in lines[1]
        assert (tmp_path / f"{name}.png").stat().st_size > 5000


def test_a_field_of_algorithms_is_one_figure(tmp_path: Path) -> None:
    """A row per algorithm, the cheapest in oracle calls first, networks apart; whoever misses the target comes last."""
    quadratic = {"nodes": 4, "rounds": 30, "engine": {"name": "local"}, "dtype": "float64",
                 "task": {"name": "quadratic", "dim_x": 4, "dim_y": 8}}
    steps = {
        "soba": {"eta_x": 0.2, "eta_y": 0.5, "eta_v": 0.5},
        "simfbo": {"eta_x": 0.2, "eta_y": 0.4, "eta_v": 0.4},
        "sparkle": {"eta_x": 1e-9, "eta_y": 0.5, "eta_v": 0.5},
        "dsgda_gt": {"eta_x": 0.1, "eta_y": 0.12, "eta_z": 0.12},
        "f2ba": {"inner_steps": 10, "eta_in": 0.8, "eta_out": 0.3},
        "d_soba": {"eta_x": 0.2, "eta_y": 0.4, "eta_v": 0.4},
    }
    for name, values in steps.items():
        run(Experiment(**quadratic, algorithm={"name": name, **values}), tmp_path / "runs" / name)
    target = "solution_error=0.6"
    grouped = group_runs(load_runs([tmp_path / "runs"], Target.parse(target)))
    panels = build_cost_panels(grouped, grouped.settings[0])
    assert panels is not None
    assert panels.titles == ("final ψ", "rounds", "MB", "oracle calls of a node")       # no samples: full gradients
    networks = [row.network for row in panels.rows]
    assert networks == ["gossip"] * 3 + ["star"] + ["single"] * 2
    calls = {row.label: value.mean if (value := row.values[3]) else None for row in panels.rows}
    assert panels.rows[2].label == "sparkle"
    assert calls["sparkle"] is None
    assert calls["d_soba"] == 7 * next(row.values[1].mean for row in panels.rows if row.label == "d_soba")
    assert not any(panels.is_approximate)
    lines = list(outputs.export_report([tmp_path / "runs"], tmp_path / "r.html", tmp_path / "f", "costs", target))
    assert lines == [f"figures: {tmp_path / 'f'} (costs)"]
    assert (tmp_path / "f" / "costs.png").stat().st_size > 5000


@pytest.mark.parametrize(("target", "marked"), [("upper_loss=1e9", 1), ("psi=1e9", 4)])
def test_the_field_marks_a_psi_that_missed_its_tolerance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, marked: int
) -> None:
    """The panel of ψ, and those of costs of a level of ψ."""
    quadratic = {"nodes": 4, "rounds": 2, "engine": {"name": "local"},
                 "task": {"name": "quadratic", "dim_x": 4, "dim_y": 8}}
    for name in ("d_soba", "sldbo", "mdbo", "madsbo", "dsgda_gt"):
        if name == "dsgda_gt":
            monkeypatch.setattr(evaluation, "limit_products", lambda nodes, dim_y: 2)
        run(Experiment(**quadratic, algorithm={"name": name}), tmp_path / "runs" / name)
    grouped = group_runs(load_runs([tmp_path / "runs"], Target.parse(target)))
    panels = build_cost_panels(grouped, grouped.settings[0])
    assert panels is not None
    assert [row.label for row in panels.rows if row.is_approximate] == ["dsgda_gt"]
    assert panels.is_approximate == (True,) * marked + (False,) * (4 - marked)
    ((_, figure),) = DRAWERS["costs"](grouped)
    titles = [axis.get_title() for axis in figure.axes]
    assert [title.startswith("≈ ") for title in titles] == list(panels.is_approximate)
    assert "approximate, ψ missed its tolerance" in " ".join(text.get_text() for text in figure.texts)
    save_figure(figure, tmp_path / "costs.png", dpi=200)


def test_module_draws_an_overview(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert draw_overview([str(recorded / "compare"), "--out", str(tmp_path / "o.png")]) == 0
    assert (tmp_path / "o.png").exists()
    assert draw_overview([str(recorded / "quadratic"), "--out", str(tmp_path / "q.png")]) == 2
    assert draw_overview([str(recorded / "compare"), "--out", str(tmp_path / "o.docx")]) == 2
    assert "no run has an accuracy" in capsys.readouterr().err


def test_outputs_beside_the_results_of_each_command(copy: Copy) -> None:
    """Every folder gets the page and a graph; several runs also figures; a comparison also the graph of each run."""
    run = copy("quadratic")
    assert outputs.write_beside_results("run", run) == run / "report.html"
    assert (run / "topology.png").exists()
    assert not (run / "figures").exists()
    sweep = copy("sweep")
    outputs.write_beside_results("sweep", sweep)
    assert {file.name for file in (sweep / "figures").iterdir()} >= {"accuracy-mb.pdf", "sensitivity.png"}
    assert (sweep / "report.html").exists()
    assert (sweep / "topology.png").exists()
    assert not list(sweep.rglob("*/topology.png"))
    comparison = copy("compare")
    outputs.write_beside_results("compare", comparison)
    assert {picture.parent.name for picture in comparison.rglob("topology.png")} == {
        comparison.name, *(place.parent.name for place in comparison.glob("*/network.json"))}


@pytest.mark.parametrize("name", [".report.html.new", "report.html"])
def test_planted_link_is_not_written_through(recorded: Path, tmp_path: Path, name: str) -> None:
    """Whoever may write into the folder cannot choose another file for the page; no temporary file is left."""
    foreign, folder = tmp_path / "foreign", tmp_path / "r"
    foreign.write_text("mine")
    folder.mkdir()
    (folder / name).symlink_to(foreign)
    report.write_page(load_runs([recorded / "quadratic"]), folder / "report.html")
    assert foreign.read_text() == "mine"
    assert not (folder / "report.html").is_symlink()
    assert {path.name for path in folder.iterdir()} == {name, "report.html"}


@pytest.mark.parametrize("name", ["topology.png", "figures/accuracy-mb.png", "figures/accuracy-mb.pdf"])
def test_planted_link_is_not_followed_by_a_figure(copy: Copy, tmp_path: Path, name: str) -> None:
    """The picture replaces the link; the file that it points to stays."""
    comparison, foreign = copy("compare"), tmp_path / "foreign"
    foreign.write_text("mine")
    (comparison / name).parent.mkdir(exist_ok=True)
    (comparison / name).unlink(missing_ok=True)
    (comparison / name).symlink_to(foreign)
    outputs.write_beside_results("compare", comparison)
    assert foreign.read_text() == "mine"
    assert (comparison / name).stat().st_size > 1000
    assert not (comparison / name).is_symlink()


def test_planted_folder_of_figures_is_refused(copy: Copy, tmp_path: Path) -> None:
    """Figures beside results do not go to where a link points."""
    comparison, foreign = copy("compare"), tmp_path / "foreign"
    foreign.mkdir()
    shutil.rmtree(comparison / "figures", ignore_errors=True)
    (comparison / "figures").symlink_to(foreign)
    with pytest.raises(InputError, match="figures is a symbolic link"):
        outputs.write_beside_results("compare", comparison)
    assert not list(foreign.iterdir())


@pytest.mark.parametrize("count", [2, 7])
def test_a_legend_that_is_too_long_is_above_the_axis(count: int) -> None:
    """It neither leaves the figure nor covers the axis; short entries stay inside."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    def draw(names: list[str]) -> tuple[Any, Any, Any]:
        figure, axes = create_figure(COLUMN_WIDTH, 2.3)
        add_legend(axes[0][0], {name: get_style("c2dfb") for name in names})
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        [legend] = [*figure.legends, *filter(None, [axes[0][0].get_legend()])]
        return figure.bbox, legend.get_window_extent(canvas.get_renderer()), axes[0][0].get_window_extent()

    setting = "eta_in = 0.0141234, eta_out = 0.0271234, gamma_in = 0.171234, gamma_out = 0.421234"
    page, legend, axis = draw([f"{setting}, K = {k}" for k in range(count)])
    assert page.x0 <= legend.x0
    assert legend.x1 <= page.x1
    assert axis.y1 <= legend.y0
    assert legend.y1 <= page.y1
    _, legend, axis = draw([f"K = {k}" for k in range(count)])
    assert axis.y0 <= legend.y0 < legend.y1 <= axis.y1
