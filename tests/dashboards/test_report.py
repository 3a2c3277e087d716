"""The page as a file: whole, self-contained, escaped, small."""

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dbo.dashboards import outputs, report
from dbo.dashboards.figures import main as draw
from dbo.dashboards.load import gather
from dbo.platform.cli import main

ROOT = Path(__file__).resolve().parents[2]
Copy = Callable[[str], Path]


def page(tmp_path: Path, *folders: Path) -> str:
    out = tmp_path / "report.html"
    report.write(gather(folders), out)
    return out.read_text(encoding="utf-8")


def own(html: str) -> str:
    """Without plotly's own text."""
    plotly = report._plotly()
    assert html.count(plotly) == 1
    return html.replace(plotly, "")


def data(html: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def test_page_asks_for_nothing(made: Path, tmp_path: Path) -> None:
    """No address, no file beside it, no storage; and its own policy forbids them."""
    html = own(page(tmp_path, made))
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", html)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", html)
    assert "localStorage" not in html
    assert "fetch(" not in html
    assert "default-src 'none'" in html


def test_names_cannot_become_markup(made: Path, tmp_path: Path) -> None:
    """A run called <script>… is shown by that name, in the text and in the data."""
    html = own(page(tmp_path, made / "diverged", made / "sweep"))
    assert "<script>window" not in html
    assert "&lt;script&gt;window.hacked=1&lt;/script&gt;" in html
    assert "A few <b>" not in html
    assert html.count("</script>") == 4
    assert "A few <b>steps</b>" in json.dumps(data(html))


def test_embedded_data_cannot_end_its_element() -> None:
    text = report.embed({"</script><!--": "&\u2028"})
    assert not set(text) & set("<>&\u2028")
    assert json.loads(text) == {"</script><!--": "&\u2028"}


def test_states_are_told_as_they_are(made: Path, copy: Copy, tmp_path: Path) -> None:
    """Diverged, one evaluation only, interrupted, not begun."""
    single = copy("quadratic")
    for name in ("metrics.jsonl", "nodes.jsonl"):
        (single / name).write_text((single / name).read_text().splitlines(keepends=True)[0])
    (single / "summary.json").unlink()
    html = page(tmp_path, made / "diverged", single)
    for text in ("1 run diverged", "1 run was interrupted", "one evaluation only", "0 of 8", "is not finite"):
        assert text in html


def test_figures_without_data_are_left_out_with_a_line(made: Path, tmp_path: Path) -> None:
    html = page(tmp_path, made / "quadratic")
    for missing in ("accuracy", "sensitivity", "nodes"):
        assert f'<figure id="{missing}"' not in html
    assert "is left out" in html
    assert '<figure id="topology"' in html
    assert 'figures --only topology' in html


def test_many_long_runs_make_a_page_of_bounded_size(tmp_path: Path) -> None:
    """60 runs × 1,000 evaluations: below 15 MB."""
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "report.py"))
    benchmark["made_up"](tmp_path / "runs", 60, 1000)
    html = page(tmp_path, tmp_path / "runs")
    assert len(html.encode()) < 15e6
    curves = data(html)["curves"]
    assert isinstance(curves, list)
    assert len(curves) == 30
    assert max(len(curve["x"]["round"]) for curve in curves) <= 300


def test_damaged_folder_leaves_an_earlier_page_as_it_was(
    copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit 2, nothing written."""
    folder, out = copy("quadratic"), tmp_path / "out" / "report.html"
    out.parent.mkdir()
    out.write_text("earlier")
    (folder / "summary.json").write_text("{")
    figures = tmp_path / "figures"
    monkeypatch.setattr(sys, "argv", ["dbo", "report", str(folder), "--out", str(out), "--figures", str(figures)])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 2
    said = capsys.readouterr()
    assert str(folder / "summary.json") in (said.out + said.err).replace("\n", "")
    assert out.read_text() == "earlier"
    assert not figures.exists()
    assert [file.name for file in out.parent.iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    "wrong", [["--only", "accuracy"], ["--figures", "f", "--only", "nonsense"], ["--target", "a=b"]]
)
def test_wrong_options(
    made: Path, tmp_path: Path, wrong: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dbo", "report", str(made / "quadratic"), *wrong])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 2
    assert not list(tmp_path.iterdir())


def test_figures_for_paper(made: Path, tmp_path: Path) -> None:
    """PDF with embedded TrueType fonts and PNG, one column wide."""
    said = list(outputs.report([made / "sweep"], tmp_path / "r.html", tmp_path / "f", "sensitivity,accuracy", None))
    assert said == [f"figures: {tmp_path / 'f'} (sensitivity, accuracy-mb, accuracy-seconds, accuracy-rounds)"]
    assert not (tmp_path / "r.html").exists()
    pdf = (tmp_path / "f" / "accuracy-mb.pdf").read_bytes()
    assert pdf.startswith(b"%PDF")
    assert b"/MediaBox [ 0 0 237.6" in pdf       # 3.3 in
    assert b"/FontFile2" in pdf                  # TrueType, type 42
    assert b"/Type3" not in pdf
    assert (tmp_path / "f" / "accuracy-mb.png").read_bytes().startswith(b"\x89PNG")


def test_all_figures_of_a_comparison(made: Path, tmp_path: Path) -> None:
    made_names = list(outputs.report([made / "compare", made / "diverged"], tmp_path / "r.html", tmp_path, None, None))
    for name in ("loss-rounds", "consensus-x", "consensus-y", "channels", "oracles", "nodes", "topology"):
        assert name in made_names[1]
        assert (tmp_path / f"{name}.png").stat().st_size > 5000


def test_overview_by_module(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert draw([str(made / "compare"), "--out", str(tmp_path / "o.png")]) == 0
    assert (tmp_path / "o.png").exists()
    assert draw([str(made / "quadratic"), "--out", str(tmp_path / "q.png")]) == 2
    assert draw([str(made / "compare"), "--out", str(tmp_path / "o.docx")]) == 2
    assert "no accuracies" in capsys.readouterr().err


def test_after_a_run_a_sweep_and_a_comparison(copy: Copy) -> None:
    """The page and the graph in the folder; of several runs the figures too, of a comparison the graph of each run."""
    run = copy("quadratic")
    assert outputs.after("run", run) == run / "report.html"
    assert (run / "topology.png").exists()
    assert not (run / "figures").exists()
    sweep = copy("sweep")
    outputs.after("sweep", sweep)
    assert {file.name for file in (sweep / "figures").iterdir()} >= {"accuracy-mb.pdf", "sensitivity.png"}
    assert (sweep / "report.html").exists()
    assert (sweep / "topology.png").exists()
    assert not list(sweep.rglob("*/topology.png"))
    comparison = copy("compare")
    outputs.after("compare", comparison)
    assert {picture.parent.name for picture in comparison.rglob("topology.png")} == {
        comparison.name, *(place.parent.name for place in comparison.glob("*/network.json"))}
