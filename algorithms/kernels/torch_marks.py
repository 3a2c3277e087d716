"""The operations of `marks` on a torch device: 64 marks to a word, as int64 with the bits of the host's words.

Every operation is a sum, a running maximum or a write to places that differ, so it gives the same bits in every run.
Nothing is read back to the host; numbers are tensors.
"""

from typing import Any

import torch


def find_positions(words: Any, out: Any) -> None:
    """Write the positions of the marks to `out`, which has space for exactly all of them."""
    numbers = torch.arange(1, len(out) + 1, device=words.device)
    out.copy_(torch.searchsorted(unpack_words(words).cumsum(dim=0), numbers))


def sum_gaps(words: Any, shift: int) -> Any:
    """Return Σ (g >> shift) over the gaps in front of the marks, a tensor of one integer."""
    marked, gaps = _find_gaps(words)
    return torch.where(marked, gaps >> shift, 0).sum()


def encode_gaps(words: Any, shift: int, unary: Any, lowest: Any) -> None:
    """Write the two streams of the Rice code into words of zeros; `lowest` has a word more than its bits need."""
    marked, gaps = _find_gaps(words)
    ends = torch.where(marked, (gaps >> shift) + 1, 0).cumsum(dim=0) - 1
    unary.copy_(_pack_words(_mark_places(ends, marked, 64 * len(unary))))
    if not shift:
        return
    first = (marked.to(torch.int64).cumsum(dim=0) - 1) * shift
    bits = torch.zeros(64 * len(lowest), dtype=torch.bool, device=words.device)
    for bit in range(shift):
        bits |= _mark_places(first + bit, marked & (gaps >> bit & 1).to(torch.bool), len(bits))
    lowest.copy_(_pack_words(bits))


def decode_gaps(unary: Any, lowest: Any, shift: int, dim: int, words: Any) -> Any:
    """Set the marks that the two streams describe; return their number, or −1 if one is not below dim."""
    ended, lengths = _find_gaps(unary)
    gaps = torch.where(ended, lengths << shift, 0)
    first = (ended.to(torch.int64).cumsum(dim=0) - 1).clamp(min=0) * shift
    stream = unpack_words(lowest)
    for bit in range(shift):
        gaps += torch.where(ended, stream[(first + bit).clamp(max=len(stream) - 1)].to(torch.int64) << bit, 0)
    positions = torch.where(ended, gaps + 1, 0).cumsum(dim=0) - 1
    is_inside = ended & (positions < dim)
    words.copy_(_pack_words(_mark_places(positions, is_inside, 64 * len(words))))
    return torch.where((ended & ~is_inside).any(), -1, ended.sum())


def unpack_words(words: Any) -> Any:
    """Return the marks as a mask, the first bit of a word first."""
    return (words[:, None] >> torch.arange(64, device=words.device) & 1).to(torch.bool).view(-1)


def _pack_words(marked: Any) -> Any:
    """Reverse `unpack_words`. The bits of a word differ, so their sum is their union, in any order."""
    return (marked.view(-1, 64).to(torch.int64) << torch.arange(64, device=marked.device)).sum(dim=1)


def _find_gaps(words: Any) -> tuple[Any, Any]:
    """Return the marks as a mask, and for each entry the unmarked ones between it and the mark before it."""
    marked = unpack_words(words)
    at = torch.arange(1, len(marked) + 1, device=words.device)
    last = torch.where(marked, at, 0).cummax(dim=0).values
    return marked, at - 1 - torch.nn.functional.pad(last[:-1], (1, 0))


def _mark_places(places: Any, chosen: Any, size: int) -> Any:
    """Return a mask of so many entries with marks at the chosen places; the last entry takes what is not chosen."""
    spare = torch.zeros(size + 1, dtype=torch.bool, device=places.device)
    return spare.scatter_(0, torch.where(chosen, places.clamp(max=size), size), True)[:size]
