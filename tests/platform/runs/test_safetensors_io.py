"""Arrays written piece by piece are what the safetensors library reads."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dbo.platform.runs.atomic_io import write_atomically
from dbo.platform.runs.safetensors_io import pieces

ARRAYS: dict[str, Any] = {
    "rows": np.arange(12, dtype=np.float32).reshape(3, 4),
    "wide": np.linspace(0, 1, 7),
    "turned": np.arange(6, dtype=np.int64).reshape(2, 3).T,
    "counts": np.arange(5, dtype=np.uint64),
    "flags": np.array([True, False, True]),
    "bytes": np.arange(3, dtype=np.uint8),
    "one": np.array(2.5),
    "none": np.zeros((0, 4)),
}


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    """Every kind of array that a state has, in any order, not contiguous, without dimensions, empty."""
    write_atomically(tmp_path / "s.safetensors", pieces(ARRAYS))
    found = load_file(tmp_path / "s.safetensors")
    assert set(found) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_arrays_are_not_copied() -> None:
    """The pieces of large arrays are the arrays' own memory."""
    rows = np.zeros((2, 1000))
    *_, last = pieces({"rows": rows})
    rows[1, 999] = 1
    assert np.frombuffer(last, np.float64)[-1] == 1


@pytest.mark.parametrize("bad", [np.array(["text"]), np.zeros(2, dtype=">f4"), np.zeros(2, dtype=complex)])
def test_what_the_format_does_not_have_is_refused(bad: Any) -> None:
    """Not written as something else."""
    with pytest.raises(TypeError, match="is not written"):
        list(pieces({"bad": bad}))
