"""The live page in a real browser, beside a real run: it fills, ends, starts again, and outlives its server."""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dbo.dashboards.watch import server
from dbo.platform.config.experiment import Experiment
from dbo.platform.runs.runner import Result, run

CHROMIUM = shutil.which("chromium")
EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
PATIENCE = 60_000     # milliseconds; a loaded machine takes its time


class Gated:
    """A run in a thread that waits at round `stop` until it is let go."""

    def __init__(self, folder: Path, stop: int) -> None:
        self._stop, self._go = stop, threading.Event()
        experiment = Experiment(name=EVIL, rounds=12, nodes=5, engine={"name": "local"})
        self._thread = threading.Thread(target=run, args=(experiment, folder), kwargs={"watcher": self}, daemon=True)
        self._thread.start()

    def started(self, experiment: Experiment, done: int) -> None: ...
    def noted(self, text: str) -> None: ...
    def ended(self, result: Result) -> None: ...

    def evaluated(self, record: dict[str, Any]) -> None:
        if record["round"] == self._stop:
            self._go.wait(120)

    def finish(self) -> None:
        self._go.set()
        self._thread.join(120)


class Served:
    """The server in a thread."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self._server, place = server.server(folder), server.listen(port)
        self.port = int(place.getsockname()[1])
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [place]}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)


@pytest.fixture
def page(require: Callable[[str, bool], None]) -> Iterator[Any]:
    require("browser", CHROMIUM is not None)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        page.set_default_timeout(PATIENCE)
        yield page
        browser.close()


def shows(page: Any, rounds: int, state: str) -> None:
    """Waits until tiles, curve, nodes and badge have come to this round, and the curve has every round once."""
    page.wait_for_function(
        """([rounds, state]) => {
            const drawn = document.querySelector("#accuracy").data?.[0]?.x ?? [];
            return document.querySelector("#tiles dd")?.textContent === `${rounds} of 12`
                && document.querySelector("#state").textContent.includes(state)
                && document.querySelector("#nodes-round").textContent === `at round ${rounds}`
                && drawn.length === rounds + 1 && drawn.every((x, i) => x === i);
        }""", arg=[rounds, state],
    )


def test_the_page_lives_with_the_run(page: Any, tmp_path: Path) -> None:
    """Waiting, going on, ended, started again, the server gone and back: each is shown, and no round twice."""
    folder, trouble = tmp_path / "run", []
    folder.mkdir()
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("console", lambda said: trouble.append(said.text) if said.type == "error" else None)
    page.on("request", lambda asked: None if "//127.0.0.1:" in asked.url or asked.url.startswith("data:")
            else trouble.append(asked.url))
    served = Served(folder)
    page.goto(f"http://127.0.0.1:{served.port}/")
    page.wait_for_function("() => document.querySelector('#state').textContent.includes('waiting')")

    going = Gated(folder, stop=4)
    shows(page, 4, "running")
    assert page.locator("#topology circle").count() == page.locator("#nodes tbody tr").count() == 5
    assert page.locator("#events li").count() == 1
    going.finish()
    shows(page, 12, "finished")
    assert EVIL in page.locator("#facts").text_content()
    for by, last in (("MB", 1.0), ("seconds", 0.0), ("rounds", 11.9)):
        page.click(f"#against button:has-text('{by}')")
        assert page.evaluate("document.querySelector('#loss').data[0].x.at(-1)") > last
        assert page.locator("#loss .scatterlayer path.js-line").count() == 1
    screenshot(page, tmp_path, "light-1280")

    again = Gated(folder, stop=2)
    shows(page, 2, "running")
    assert trouble == []

    served.stop()
    page.wait_for_function("() => document.querySelector('#link').textContent.includes('does not answer')")
    assert all("ERR_CONNECTION" in line for line in trouble)
    served = Served(folder, served.port)
    page.wait_for_function("() => document.querySelector('#link').textContent.includes('live')")
    trouble.clear()
    again.finish()
    shows(page, 12, "finished")

    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 400, "height": 800})
    page.wait_for_function("() => document.querySelector('#accuracy').layout.font.color === '#e8ecf2'")
    page.wait_for_function("() => document.documentElement.scrollWidth <= 400")    # redrawn a moment later
    screenshot(page, tmp_path, "dark-400")
    assert page.evaluate("window.hacked") is None
    assert trouble == []
    served.stop()


def screenshot(page: Any, folder: Path, name: str) -> None:
    """For people to look at; kept where DBO_SCREENSHOTS says."""
    place = Path(os.environ.get("DBO_SCREENSHOTS", folder))
    page.screenshot(path=place / f"watch-{name}.png", full_page=True)
