"""The safetensors library reads arrays that were serialized piece by piece."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dbo.platform.runs.atomic_io import write_atomically
from dbo.platform.runs.safetensors_io import serialize

ARRAYS: dict[str, Any] = {
    "rows": np.arange(12, dtype=np.float32).reshape(3, 4),
    "wide": np.linspace(0, 1, 7),
    "transposed": np.arange(6, dtype=np.int64).reshape(2, 3).T,
    "counts": np.arange(5, dtype=np.uint64),
    "flags": np.array([True, False, True]),
    "bytes": np.arange(3, dtype=np.uint8),
    "one": np.array(2.5),
    "none": np.zeros((0, 4)),
}


def test_library_reads_what_was_serialized(tmp_path: Path) -> None:
    """Every kind of array of a state, also not contiguous, without dimensions, or empty."""
    write_atomically(tmp_path / "s.safetensors", serialize(ARRAYS))
    found = load_file(tmp_path / "s.safetensors")
    assert set(found) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_arrays_are_not_copied() -> None:
    """The pieces of arrays are views of their memory."""
    rows = np.zeros((2, 1000))
    *_, last = serialize({"rows": rows})
    rows[1, 999] = 1
    assert np.frombuffer(last, np.float64)[-1] == 1


@pytest.mark.parametrize("bad", [np.array(["text"]), np.zeros(2, dtype=">f4"), np.zeros(2, dtype=complex)])
def test_types_that_the_format_lacks_are_refused(bad: Any) -> None:
    """Instead of being converted."""
    with pytest.raises(TypeError, match="cannot be written"):
        list(serialize({"bad": bad}))
