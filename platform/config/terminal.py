"""Make text safe for a terminal."""

import re

# Everything that a terminal obeys instead of showing it, except line break and tab: C0, C1, direction marks, other line
# breaks, and halves of surrogate pairs, which no terminal can encode.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_control(text: str) -> str:
    """Return text with control characters as `repr` shows them, so that a name cannot change the terminal."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
