"""Print notices about slow work, such as downloads, for the user who waits."""

import sys


def print_notice(text: str) -> None:
    """Print one line on stderr."""
    print(f"dbo: {text}", file=sys.stderr, flush=True)
