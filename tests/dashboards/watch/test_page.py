"""The live page in a real browser, beside a real run: progress, end, restart of the run and of the server."""

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
TIMEOUT = 60_000      # milliseconds; a loaded machine is slow


class PausedRun:
    """A run in a thread that waits at round `stop` until `finish` is called."""

    def __init__(self, folder: Path, stop: int) -> None:
        self._stop, self._released = stop, threading.Event()
        experiment = Experiment(name=EVIL, rounds=12, nodes=5, engine={"name": "local"})
        self._thread = threading.Thread(target=run, args=(experiment, folder), kwargs={"callback": self}, daemon=True)
        self._thread.start()

    def on_start(self, experiment: Experiment, done: int) -> None: ...
    def on_notice(self, text: str) -> None: ...
    def on_end(self, result: Result) -> None: ...

    def on_evaluation(self, record: dict[str, Any]) -> None:
        if record["round"] == self._stop:
            self._released.wait(120)

    def finish(self) -> None:
        self._released.set()
        self._thread.join(120)


class ServerThread:
    """The server in a thread."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self._server, listener = server.create_server(folder), server.open_socket(port)
        self.port = int(listener.getsockname()[1])
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
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
        page.set_default_timeout(TIMEOUT)
        yield page
        browser.close()


def wait_until_shown(page: Any, rounds: int, state: str) -> None:
    """Wait until tiles, curve, nodes and badge have reached this round, and the curve has every round once."""
    page.wait_for_function(
        """([rounds, state]) => {
            const xs = document.querySelector("#accuracy").data?.[0]?.x ?? [];
            return document.querySelector("#tiles dd")?.textContent === `${rounds} of 12`
                && document.querySelector("#state").textContent.includes(state)
                && document.querySelector("#nodes-round").textContent === `at round ${rounds}`
                && xs.length === rounds + 1 && xs.every((x, i) => x === i);
        }""", arg=[rounds, state],
    )


def test_page_follows_run_and_server_through_restarts(page: Any, tmp_path: Path) -> None:
    """Waiting, running, ended, restarted, server lost and back: each is shown, and no round twice."""
    folder, problems = tmp_path / "run", []
    folder.mkdir()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
    page.on("request", lambda request: None if "//127.0.0.1:" in request.url or request.url.startswith("data:")
            else problems.append(request.url))
    served = ServerThread(folder)
    page.goto(f"http://127.0.0.1:{served.port}/")
    page.wait_for_function("() => document.querySelector('#state').textContent.includes('waiting')")

    first = PausedRun(folder, stop=4)
    wait_until_shown(page, 4, "running")
    assert page.locator("#topology circle").count() == page.locator("#nodes tbody tr").count() == 5
    assert page.locator("#events li").count() == 1
    first.finish()
    wait_until_shown(page, 12, "finished")
    assert EVIL in page.locator("#facts").text_content()
    for by, last in (("MB", 1.0), ("seconds", 0.0), ("rounds", 11.9)):
        page.click(f"#x-axis button:has-text('{by}')")
        assert page.evaluate("document.querySelector('#loss').data[0].x.at(-1)") > last
        assert page.locator("#loss .scatterlayer path.js-line").count() == 1
    save_screenshot(page, tmp_path, "light-1280")

    second = PausedRun(folder, stop=2)
    wait_until_shown(page, 2, "running")
    assert problems == []

    served.stop()
    page.wait_for_function("() => document.querySelector('#connection').textContent.includes('no connection')")
    assert all("ERR_CONNECTION" in line for line in problems)
    served = ServerThread(folder, served.port)
    page.wait_for_function("() => document.querySelector('#connection').textContent.includes('live')")
    problems.clear()
    second.finish()
    wait_until_shown(page, 12, "finished")

    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 400, "height": 800})
    page.wait_for_function("() => document.querySelector('#accuracy').layout.font.color === '#e8ecf2'")
    page.wait_for_function("() => document.documentElement.scrollWidth <= 400")    # redrawn a moment later
    save_screenshot(page, tmp_path, "dark-400")
    assert page.evaluate("window.hacked") is None
    assert problems == []
    served.stop()


def save_screenshot(page: Any, folder: Path, name: str) -> None:
    """Save a picture for people; the variable DBO_SCREENSHOTS names the folder."""
    page.screenshot(path=Path(os.environ.get("DBO_SCREENSHOTS", folder)) / f"watch-{name}.png", full_page=True)
