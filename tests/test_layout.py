"""The layout of the checkout: package folders without `__init__.py`, and a folder called platform that hides nothing.

Python looks through the path entry by entry. In one entry a folder with an `__init__.py` is a package and ends the
search; a folder without one is only noted as a namespace candidate, used if no later entry has a real module of that
name. So `platform/` at the repo root is harmless exactly as long as it has no `__init__.py`: the standard library's
`platform` comes later on the path and wins.
"""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS: dict[str, Any] = PYPROJECT["tool"]["setuptools"]
PACKAGES: list[str] = SETUPTOOLS["packages"]
PACKAGE_DIR: dict[str, str] = SETUPTOOLS["package-dir"]
FOLDERS = ("algorithms", "dashboards", "platform", "sweeps", "tasks")


def python(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs Python with `cwd` first on its path, whatever the environment says."""
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env={}, capture_output=True, text=True, timeout=120, check=False
    )


def platform_seen_from(folder: Path) -> Path:
    """The file of the module that `import platform` finds when `folder` is the working directory."""
    done = python("-c", "import platform; print(platform.__file__)", cwd=folder)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip()).resolve()


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_package_folder_has_an_init(folder: str) -> None:
    """No top-level package folder has an `__init__.py`; the sub-packages have one."""
    assert (ROOT / folder).is_dir()
    assert not list((ROOT / folder).glob("__init__.py*"))
    packages = {file.parent for file in (ROOT / folder).rglob("*.py")} - {ROOT / folder}
    assert [str(package) for package in packages if not (package / "__init__.py").is_file()] == []


def test_platform_is_the_standard_library_s() -> None:
    """From the repo root `import platform` gives the standard library's module."""
    assert not platform_seen_from(ROOT).is_relative_to(ROOT / "platform")


@pytest.mark.parametrize(
    "args",
    [("-c", "import platform; platform.system()"), ("-c", "import uuid; uuid.uuid4()"), ("-m", "pytest", "--version")],
    ids=["platform", "uuid", "pytest"],
)
def test_python_works_from_the_root(args: tuple[str, ...]) -> None:
    """What breaks first when `platform` is hidden works with the repo root as working directory."""
    done = python(*args, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_an_init_would_hide_the_standard_library(tmp_path: Path) -> None:
    """Negative control: the same folder is harmless without `__init__.py` and hides the module with one."""
    package = tmp_path / "platform"
    package.mkdir()
    (package / "errors.py").touch()
    assert not platform_seen_from(tmp_path).is_relative_to(tmp_path)
    (package / "__init__.py").touch()
    assert platform_seen_from(tmp_path) == (package / "__init__.py").resolve()


def test_nothing_at_the_root_shadows_the_standard_library() -> None:
    """No module at the root is named like a standard one, and no folder unless it is a mere namespace candidate."""
    standard = [path for path in ROOT.iterdir() if path.name.partition(".")[0] in sys.stdlib_module_names]
    assert [path.name for path in standard if path.is_file() or (path / "__init__.py").exists()] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_module_is_named_like_a_standard_one(folder: str) -> None:
    """`python folder/module.py` puts the folder first on the path: a `queue.py` there would be what `queue` means."""
    assert [path.name for path in (ROOT / folder).glob("*.py") if path.stem in sys.stdlib_module_names] == []


def test_package_lists_agree() -> None:
    """Every package has its folder in package-dir, the folder exists, and the package folders are all there."""
    assert sorted(PACKAGES) == sorted(PACKAGE_DIR)
    for package, folder in PACKAGE_DIR.items():
        assert package == ("dbo" if folder == "dbo" else "dbo." + folder.replace("/", "."))
        assert (ROOT / folder).is_dir(), folder
    assert {folder.partition("/")[0] for folder in PACKAGE_DIR.values()} == {"dbo", *FOLDERS}


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_file_is_in_the_wheel(folder: str) -> None:
    """A folder that is neither a package nor a package's data would be missing from the wheel without a word."""
    data = {
        file
        for package, patterns in SETUPTOOLS["package-data"].items() if package in PACKAGE_DIR
        for pattern in patterns
        for file in (ROOT / PACKAGE_DIR[package]).glob(pattern)
    }
    files = [file for file in (ROOT / folder).rglob("*") if file.is_file() and file not in data]
    kept = [file.relative_to(ROOT) for file in files]
    folders = {f.parent.as_posix() for f in kept if not any(p.startswith((".", "__pycache__")) for p in f.parts)}
    assert folder in folders
    assert folders <= set(PACKAGE_DIR.values())


@pytest.mark.parametrize("folder", FOLDERS)
def test_package_is_typed_and_linked_for_the_type_checkers(folder: str) -> None:
    """typings/dbo/<folder> is a relative link to the folder, which holds a py.typed."""
    link = ROOT / "typings" / "dbo" / folder
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == (ROOT / folder).resolve()
    assert (ROOT / folder / "py.typed").is_file()


def test_no_link_without_a_package() -> None:
    """typings/dbo links the package folders and the modules of dbo/, and nothing else."""
    modules = {path.name for path in (ROOT / "dbo").glob("*.py")}
    assert {path.name for path in (ROOT / "typings" / "dbo").iterdir()} == {*FOLDERS, *modules}


def imported_libraries() -> set[str]:
    """The top-level names of all third-party modules that the packages import."""
    found = set()
    for folder in ("dbo", *FOLDERS):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else \
                    [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
                found |= {name.partition(".")[0] for name in names}
    return found - set(sys.stdlib_module_names) - {"dbo"}


def test_every_imported_library_is_a_declared_dependency() -> None:
    """A wheel in a clean environment finds everything that it imports."""
    declared = PYPROJECT["project"]["dependencies"]
    names = {re.split(r"[<>=\[ ]", entry)[0].lower().replace("_", "-") for entry in declared}
    provided = packages_distributions()
    missing = {
        library for library in imported_libraries()
        if not names & {name.lower().replace("_", "-") for name in provided.get(library, [library])}
    }
    assert missing == {"markupsafe", "pydantic_core"}      # parts of jinja2 and pydantic, released with them
