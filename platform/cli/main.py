"""Assemble the command line and turn errors into one line and an exit code.

Exit 0: done. Exit 1: the run failed. Exit 2: the input is wrong; nothing was written.
"""

import sys
import traceback
from typing import Annotated, Any

import typer

from dbo.platform.cli.check import check_runs
from dbo.platform.cli.clean import clean_runs
from dbo.platform.cli.compare import compare_algorithms
from dbo.platform.cli.completion import print_candidates, print_script
from dbo.platform.cli.console import console
from dbo.platform.cli.doctor import check_machine
from dbo.platform.cli.jobs import show_jobs
from dbo.platform.cli.listing import list_components
from dbo.platform.cli.new import write_experiment, write_plugin
from dbo.platform.cli.replay import replay_runs
from dbo.platform.cli.report import write_report
from dbo.platform.cli.run import run_experiment
from dbo.platform.cli.submit import submit_job
from dbo.platform.cli.supervise import supervise_command
from dbo.platform.cli.sweep import run_sweep
from dbo.platform.cli.sync import sync_runs
from dbo.platform.cli.tune import tune_steps
from dbo.platform.cli.ui import serve_ui
from dbo.platform.cli.verify import verify_components
from dbo.platform.cli.watch import watch_run
from dbo.platform.config.redact import redact
from dbo.platform.config.terminal import escape_control
from dbo.platform.engine.ray_session import set_exit_code
from dbo.platform.errors import InputError, NodeFailure, RunError
from dbo.version import find_version

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
)
app.command("run")(run_experiment)
app.command("compare")(compare_algorithms)
app.command("sweep")(run_sweep)
app.command("check")(check_runs)
app.command("clean")(clean_runs)
app.command("tune")(tune_steps)
app.command("report")(write_report)
app.command("replay")(replay_runs)
app.command("watch")(watch_run)
app.command("ui")(serve_ui)
app.command("list")(list_components)
app.command("init")(write_experiment)
app.command("new")(write_plugin)
app.command("verify")(verify_components)
app.command("sync")(sync_runs)
app.command("submit")(submit_job)
app.command("jobs")(show_jobs)
app.command("supervise", context_settings={"allow_extra_args": True, "ignore_unknown_options": True,
                                           "allow_interspersed_args": False})(supervise_command)
app.command("doctor")(check_machine)
app.command("completion")(print_script)
app.command("complete", hidden=True, add_help_option=False, context_settings={
    "allow_extra_args": True, "ignore_unknown_options": True})(print_candidates)

_UsageError: Any = typer.BadParameter.__base__      # click's, of which typer may carry a copy of its own


def _show_version(requested: bool) -> None:
    if requested:
        console.print(f"dbo {find_version()}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[bool, typer.Option(
        "--version", callback=_show_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    """Run, compare and verify decentralized bilevel optimization algorithms."""


def main() -> None:
    """Run the command in `sys.argv` and exit."""
    try:
        _run_command()
    except SystemExit as end:
        set_exit_code(end.code)
        raise


def _run_command() -> None:
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
        if code == 130:                    # typer returns this after Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code)
    except InputError as error:
        _fail(str(error), 2)
    except _UsageError as error:
        _fail(f"{error.format_message().rstrip('.')}; {_advise(error)}", 2)
    except NodeFailure as error:
        print(redact(escape_control(error.trace.rstrip())), file=sys.stderr)
        _fail(str(error), 1)
    except RunError as error:
        _fail(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted; recorded results are kept, --resume continues the run", 1)
    except OSError as error:
        _fail(_describe_system_error(error), 1)
    except MemoryError as error:
        _fail(f"not enough memory{f': {error}' if str(error) else ''}", 1)
    except Exception as error:
        _fail_with_traceback(error)


def _advise(error: Any) -> str:
    """Return what to do about a wrong option: keys of an experiment are not options."""
    from dbo.platform.config.experiment import Experiment

    key = str(getattr(error, "option_name", None) or "").lstrip("-").replace("-", "_")
    if key.partition(".")[0] in Experiment.model_fields:
        return f"write {key}=VALUE, without dashes"
    return "--help shows what is allowed"


def _describe_system_error(error: OSError) -> str:
    """Return the file and the reason; where the system names no file, the function that failed."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.filename is not None:
        return f"{error.filename}: {reason}"
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "dbo" in frame.filename or "platform" in frame.filename] or frames
    return f"{reason}{f' (in {ours[-1].name}, {ours[-1].filename}:{ours[-1].lineno})' if ours else ''}"


def _fail_with_traceback(error: Exception) -> None:
    """Print the traceback, then one line. Of an error in a plugin, print only the frames from the plugin on."""
    from dbo.platform.config import plugins

    trace, position = traceback.TracebackException.from_exception(error), plugins.locate_error(error)
    in_plugin = [number for number, frame in enumerate(trace.stack) if frame.filename in plugins.plugin_files()]
    del trace.stack[: in_plugin[0] if in_plugin else 0]
    print(redact(escape_control("".join(trace.format()).rstrip())), file=sys.stderr)
    if position:
        _fail(f"{position}: {type(error).__name__}: {error}", 1)
    _fail("the run failed; the traceback above shows the first error", 1)


def _fail(text: str, code: int) -> None:
    line = redact(escape_control(" ".join(text.split())))
    print(f"dbo: {line if len(line) <= 1500 else line[:1000] + ' … ' + line[-400:]}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
