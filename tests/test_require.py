"""The skip mechanism of conftest.py: a skip that continuous integration must not see becomes a failure."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
NEEDS_BROWSER = "def test_needs_browser(require):\n    require('browser', {available})\n"


def run_pytest(folder: Path, required: str, available: bool) -> tuple[int, str]:
    """Runs one test that needs a browser, in a folder of its own with our conftest.py."""
    shutil.copy(CONFTEST, folder)
    (folder / "test_it.py").write_text(NEEDS_BROWSER.format(available=available))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "--rootdir", ".", "test_it.py"],
        cwd=folder, env=os.environ | {"DBO_REQUIRE": required},
        capture_output=True, text=True, timeout=120, check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("required", "available", "code", "says"),
    [
        ("", True, 0, "1 passed"),
        ("", False, 0, "1 skipped"),
        ("data", False, 0, "1 skipped"),
        ("browser,data", True, 0, "1 passed"),
        ("data, browser", False, 1, "needs a browser, which is not here although DBO_REQUIRE names it"),
        ("broswer", True, 4, "DBO_REQUIRE: unknown ['broswer']"),
    ],
)
def test_missing_need_skips_or_fails(tmp_path: Path, required: str, available: bool, code: int, says: str) -> None:
    """A missing need skips the test, fails it if DBO_REQUIRE names the need; a misspelt DBO_REQUIRE is refused."""
    returned, output = run_pytest(tmp_path, required, available)
    assert returned == code, output
    assert says in output


def test_unknown_need_is_an_error(require: Any) -> None:
    """A test cannot ask for something that DBO_REQUIRE could never name."""
    with pytest.raises(ValueError, match="unknown need 'broswer'"):
        require("broswer", True)
