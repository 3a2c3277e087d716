"""Show runs in a notebook: a progress line while one is running, and a result as a small table."""

import sys
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dbo.platform.config.experiment import Experiment
    from dbo.platform.runs.result import Result
    from dbo.platform.runs.schema import Record


def is_notebook() -> bool:
    """Decide whether this is a Jupyter kernel, whose output can be updated in place."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


class NotebookProgress:
    """Callback that shows one line per run and updates it in place: rounds, score, traffic."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._label, self._rounds, self._score = "", 0, ""
        self._notices: list[str] = []

    def on_start(self, experiment: "Experiment", done: int) -> None:
        self._label, self._rounds = f"{experiment.title} seed {experiment.seed}", experiment.rounds
        self._notices, self._handle, self._score = [], None, ""
        self._show(done, "")

    def on_evaluation(self, record: "Record") -> None:
        score = record.get("test_accuracy")
        text = f"upper loss {record['upper_loss']:.4g}" if score is None else f"accuracy {score:.3f}"
        self._score = f"{text} · {record['comm_mb']:.1f} MB · {record['seconds']:.1f} s"
        self._show(record["round"], self._score)

    def on_notice(self, text: str) -> None:
        self._notices.append(text)

    def on_end(self, result: "Result") -> None:
        if result.status != "finished":
            self._notices.append(f"{result.status}: {result.summary.get('error', '')}")
        self._show(result.summary.get("rounds", 0), " · ".join(filter(None, (result.status, self._score))))

    def _show(self, round_: int, text: str) -> None:
        view: Any = sys.modules["IPython.display"]        # of the kernel: IPython is no dependency

        notes = "".join(f"<br><small>{escape(note)}</small>" for note in self._notices[-3:])
        html = view.HTML(
            f"<code>{escape(self._label)}</code> <progress value='{round_}' max='{self._rounds}'></progress> "
            f"{round_}/{self._rounds} {escape(text)}{notes}")
        if self._handle is None:
            self._handle = view.display(html, display_id=True)
        else:
            self._handle.update(html)
