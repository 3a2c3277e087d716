"""The one place that gives an algorithm its colour: the same in every figure, whichever others are shown beside it.

The colours are Okabe and Ito's, distinguishable with every common form of colour blindness; their yellow is darkened,
because it cannot be seen on white. Black turns light on a dark page. There are more algorithms than colours: a second
and third dozen differ by the line's dash.
"""

from dataclasses import dataclass
from typing import Any
from zlib import crc32

_COLOURS = (
    ("#0072B2", "#4BA3DB"), ("#E69F00", "#F0B429"), ("#009E73", "#2BC498"), ("#D55E00", "#F07A2B"),
    ("#CC79A7", "#DE9DC0"), ("#56B4E9", "#7CC8F2"), ("#222222", "#F2F2F2"), ("#8A7B00", "#D6C63A"),
)
_ORDER = (
    "c2dfb", "c2dfb_nc", "madsbo", "mdbo", "madsbo_gt", "vrdbo", "dsgda_gt", "sldbo",
    "d_soba", "gossip_dsbo", "f2ba", "bome",
)
_DASHES = ("solid", "dash", "dot")
_MATPLOTLIB = {"solid": "-", "dash": (0, (4, 1.6)), "dot": (0, (1.2, 1.2))}

# Magnitudes (channels, oracles, heat maps, consensus error) take another scale, so that no algorithm's colour is taken.
SCALE = "Cividis"
SHADES = ("#00224E", "#35456C", "#666970", "#948E77", "#C8B866", "#FEE838")


@dataclass(frozen=True, slots=True)
class Look:
    """How an algorithm is drawn."""

    light: str
    dark: str
    dash: str

    @property
    def linestyle(self) -> Any:
        return _MATPLOTLIB[self.dash]


def look(algorithm: str) -> Look:
    """An algorithm's colours and dash; one that is not built in is dotted, in a colour that its name decides."""
    if algorithm in _ORDER:
        number = _ORDER.index(algorithm)
        return Look(*_COLOURS[number % len(_COLOURS)], _DASHES[number // len(_COLOURS)])
    return Look(*_COLOURS[crc32(algorithm.encode()) % len(_COLOURS)], "dot")


def rank(algorithm: str) -> tuple[int, str]:
    """Sorts algorithms in one order everywhere."""
    return (_ORDER.index(algorithm) if algorithm in _ORDER else len(_ORDER), algorithm)


def shades(count: int) -> list[str]:
    """So many steps of the scale, dark to light."""
    if count <= 1:
        return [SHADES[1]]
    return [_between(number * (len(SHADES) - 1) / (count - 1)) for number in range(count)]


def _between(at: float) -> str:
    low = min(int(at), len(SHADES) - 2)
    parts = [
        round(int(SHADES[low][i : i + 2], 16) * (1 - at + low) + int(SHADES[low + 1][i : i + 2], 16) * (at - low))
        for i in (1, 3, 5)
    ]
    return "#" + "".join(f"{part:02X}" for part in parts)
