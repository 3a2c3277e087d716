"""The report in a real browser, opened from disk, offline."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dbo.dashboards import report
from dbo.dashboards.load import load_runs

CHROMIUM = shutil.which("chromium")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
TIMEOUT = 60_000      # milliseconds; a loaded machine is slow

# Ratio of the luminances of a text and of what is behind it (WCAG 2): 4.5 is readable.
CONTRAST = """() => {
  const channel = v => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; };
  const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => .2126 * channel(r) + .7152 * channel(g) + .0722 * channel(b);
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] > .5) return c;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const e of document.querySelectorAll("h1, h2, h4, p, td, th, figcaption, button, summary, nav a")) {
    if (!e.textContent.trim() || !e.checkVisibility()) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))];
    found.push([(Math.max(a, b) + .05) / (Math.min(a, b) + .05), e.tagName, e.textContent.trim().slice(0, 30)]);
  }
  for (const e of document.querySelectorAll(".plot .xtick text, .plot .xtitle")) {
    const [a, b] = [light(parse(getComputedStyle(e).fill)), light(behind(e.closest(".plot")))];
    found.push([(Math.max(a, b) + .05) / (Math.min(a, b) + .05), "axis", e.textContent]);
  }
  return found.sort((one, other) => one[0] - other[0]);
}"""


@pytest.fixture(scope="module")
def html(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "report.html"
    report.write_page(load_runs([recorded / "compare", recorded / "sweep", recorded / "diverged"]), out)
    return out


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        yield None
        return
    with sync_playwright() as play:
        launched = play.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield launched
        launched.close()


@pytest.fixture
def visit(browser: Any, html: Path, require: Callable[[str, bool], None]) -> Iterator[Callable[..., Any]]:
    """A function that opens the page; at the end the page must have had no error, warning or request."""
    require("browser", CHROMIUM is not None)
    problems: list[str] = []
    contexts = []

    def open_page(width: int = 1280, scheme: str = "light", address: str | None = None) -> Any:
        context = browser.new_context(
            offline=True, viewport={"width": width, "height": 800}, color_scheme=scheme, accept_downloads=True
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(TIMEOUT)
        page.on("console", lambda line: problems.append(line.text) if line.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: problems.append(request.url) if request.url.startswith("http") else None)
        page.goto(address or html.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


def scroll_through(page: Any) -> None:
    """Scroll to each figure until all its panels are drawn."""
    for figure in page.locator("figure").all():
        figure.scroll_into_view_if_needed()
    panels = page.locator(".panel").all()
    for panel in panels:
        panel.scroll_into_view_if_needed()
        panel.locator(".main-svg").first.wait_for(state="attached")


def find_overflow(page: Any) -> list[str]:
    """Return the elements that stick out to the right."""
    found = page.evaluate("""() => [...document.querySelectorAll(".main-svg, h1, h2, .card, select, textarea")]
        .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => String(e.className) || e.tagName)""")
    overflows = page.evaluate("document.documentElement.scrollWidth > innerWidth")
    return [*found, *(["the page"] if overflows else [])]


def test_every_figure_shows_data(visit: Callable[..., Any], tmp_path: Path) -> None:
    """Panels are drawn when they come near the screen. Names stay text."""
    page = visit()
    assert page.locator("#topology .main-svg").count() == 0
    scroll_through(page)
    marks = page.evaluate("""() => Object.fromEntries([...document.querySelectorAll("figure")].map(figure => [figure.id,
        [...figure.querySelectorAll(".panel")].map(panel => [
            ...panel.querySelectorAll(".scatterlayer .trace path, .barlayer .point path, .heatmaplayer image"),
        ].filter(e => e.tagName === "image" || (e.getAttribute("d") || "").length > 8).length)]))""")
    assert set(marks) == {
        "accuracy", "loss", "sensitivity", "consensus", "channels", "oracles", "nodes", "topology", "replay",
    }
    assert all(count > 0 for counts in marks.values() for count in counts), marks
    assert len(marks["accuracy"]) == 3                                  # a panel per setting
    assert page.locator("#consensus .panel").first.locator(".trace").count() >= 3      # with the rate
    assert page.evaluate("window.hacked") is None
    assert find_overflow(page) == []
    page.screenshot(path=tmp_path / "light.png", full_page=True)


def test_controls_change_the_figures(visit: Callable[..., Any], tmp_path: Path) -> None:
    """Axis switch, legend, slider, data and download work."""
    page = visit()
    scroll_through(page)
    accuracy = page.locator("#accuracy")
    title = accuracy.locator(".panel").first.locator(".xtitle")
    assert "MB" in title.text_content()
    accuracy.get_by_role("button", name="rounds").click()
    page.wait_for_function("() => document.querySelector('#accuracy .xtitle').textContent === 'rounds'")
    traces = page.locator("#loss .panel .scatterlayer .trace")
    before = traces.count()
    accuracy.locator(".legend button", has_text="mdbo").click()
    page.wait_for_function(f"() => document.querySelectorAll('#loss .panel .scatterlayer .trace').length < {before}")

    topology = page.locator("#topology")
    slider, shown_round = topology.locator("input[type=range]"), topology.locator("output")
    colours = "[...document.querySelectorAll('#topology .points path')].map(p => p.style.fill).join()"
    last, shown = shown_round.text_content(), page.evaluate(colours)
    slider.focus()
    for _ in range(6):
        page.keyboard.press("ArrowLeft")
    assert shown_round.text_content() != last
    page.wait_for_function(f"() => {colours} !== {shown!r}")

    accuracy.locator("summary").click()
    page.wait_for_function("() => document.querySelector('#accuracy textarea').value.length > 100")
    assert "dbo report" in accuracy.locator("code").text_content()
    with page.expect_download() as download:
        accuracy.locator("[data-download]").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[0].startswith("setting,algorithm,variant,seeds,state,round,comm_mb,seconds,node_accuracy_mean")
    assert len(lines) > 50


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable(visit: Callable[..., Any], scheme: str, tmp_path: Path) -> None:
    page = visit(scheme=scheme)
    scroll_through(page)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    faint = [entry for entry in page.evaluate(CONTRAST) if entry[0] < 4.5]
    assert faint == []
    page.screenshot(path=tmp_path / f"{scheme}.png", full_page=True)
    page.locator("#theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") != scheme
    assert [entry for entry in page.evaluate(CONTRAST) if entry[0] < 4.5] == []


def test_page_fits_a_phone(visit: Callable[..., Any], tmp_path: Path) -> None:
    page = visit(width=400)
    scroll_through(page)
    assert find_overflow(page) == []
    page.screenshot(path=tmp_path / "400.png", full_page=True)


def test_print_has_every_figure(visit: Callable[..., Any], tmp_path: Path) -> None:
    """Also figures that were not scrolled to; in light colours, although the page is dark."""
    page = visit(scheme="dark")
    page.pdf(path=tmp_path / "print.pdf", prefer_css_page_size=True)
    assert page.evaluate("[...document.querySelectorAll('.panel')].every(p => p.querySelector('.main-svg'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert (tmp_path / "print.pdf").stat().st_size > 30_000


def test_page_works_in_a_sandboxed_frame(visit: Callable[..., Any], html: Path, tmp_path: Path) -> None:
    """MLflow shows artifacts like this: scripts, but no origin, no storage, no other files, no downloads."""
    frame = tmp_path / "frame.html"
    frame.write_text(f'<iframe sandbox="allow-scripts" width="1200" height="700" src="{html.as_uri()}"></iframe>')
    inside = visit(address=frame.as_uri()).frame_locator("iframe")
    inside.locator("#loss").scroll_into_view_if_needed()
    inside.locator("#loss .scatterlayer .trace").first.wait_for(state="attached")
    inside.locator("#loss summary").click()
    from playwright.sync_api import expect

    expect(inside.locator("#loss textarea")).to_have_value(re.compile("^setting,"))      # filled by an event
    inside.locator("#loss [data-download]").click()
    assert inside.locator("#loss [data-download]").inner_text() == "Copied loss.csv"
