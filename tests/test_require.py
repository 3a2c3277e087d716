"""The `require` fixture of conftest.py: continuous integration turns skips into failures."""

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
    """Run one test that needs a browser, in a separate folder with our conftest.py."""
    shutil.copy(CONFTEST, folder)
    (folder / "test_it.py").write_text(NEEDS_BROWSER.format(available=available))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "--rootdir", ".", "test_it.py"],
        cwd=folder, env=os.environ | {"DBO_REQUIRE": required},
        capture_output=True, text=True, timeout=120, check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("required", "available", "code", "message"),
    [
        ("", True, 0, "1 passed"),
        ("", False, 0, "1 skipped"),
        ("data", False, 0, "1 skipped"),
        ("browser,data", True, 0, "1 passed"),
        ("data, browser", False, 1, "needs a browser, which is not here although DBO_REQUIRE names it"),
        ("broswer", True, 4, "DBO_REQUIRE: unknown ['broswer']"),
    ],
)
def test_missing_need_skips_or_fails(tmp_path: Path, required: str, available: bool, code: int, message: str) -> None:
    """A missing need skips the test, or fails it if DBO_REQUIRE names the need; a misspelt DBO_REQUIRE is refused."""
    returned, output = run_pytest(tmp_path, required, available)
    assert returned == code, output
    assert message in output


def test_unknown_need_is_an_error(require: Any) -> None:
    """A test can require only what DBO_REQUIRE may name."""
    with pytest.raises(ValueError, match="unknown resource 'broswer'"):
        require("broswer", True)
