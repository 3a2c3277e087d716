"""Select the top-k of rows that are torch tensors; nothing is read back to the host.

`topk` gives the threshold alone: which of several equal entries it returns is not defined. The choice among these is a
running sum of integers, so the result is the same on every device and in every run.
"""

from typing import Any

import torch

# Magnitudes compare like the integers with their bits, and NaN is the largest of them.
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def keep_largest(rows: Any, k: int) -> Any:
    """Keep each row's k largest entries by magnitude, NaN first, the first of equal ones; set the others to 0.0."""
    kept = torch.where(mark_largest(rows.abs(), k), rows, 0.0)
    return kept + 0.0      # turns −0.0, which is not sent, into 0.0


def mark_largest(magnitude: Any, k: int) -> Any:
    """Return a mask of exactly k entries of each row."""
    keys = torch.where(magnitude.isnan(), torch.nan, magnitude).view(_BITS[magnitude.dtype])    # one NaN for all
    threshold = torch.topk(keys, k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    above, tied = keys > threshold, keys == threshold
    missing = k - above.sum(dim=1, keepdim=True)
    return above | (tied & (tied.cumsum(dim=1, dtype=torch.int32) <= missing))
