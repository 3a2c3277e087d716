"""Assign each algorithm a colour and a dash: the same in every figure, whichever others are shown beside it.

The colours are Okabe and Ito's, distinguishable with every common form of colour blindness. Their yellow is darkened,
because it cannot be seen on white, and black turns light on a dark page. There are more algorithms than colours: the
second, third and fourth eight differ by the dash of their line. Plugins and labelled variants have long dashes, and
colours that no other series of the figure has, while there are any left.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

_COLOURS = (
    ("#0072B2", "#4BA3DB"), ("#E69F00", "#F0B429"), ("#009E73", "#2BC498"), ("#D55E00", "#F07A2B"),
    ("#CC79A7", "#DE9DC0"), ("#56B4E9", "#7CC8F2"), ("#222222", "#F2F2F2"), ("#8A7B00", "#D6C63A"),
)
_ORDER = (
    "c2dfb", "c2dfb_nc", "madsbo", "mdbo", "madsbo_gt", "vrdbo", "dsgda_gt", "sldbo",
    "d_soba", "gossip_dsbo", "f2ba", "bome", "sparkle", "storm_pl", "sun_dsbo", "slam",
    "f2sa", "stocbio", "soba", "fednest", "simfbo", "fedbioacc", "aggitd", "ef_soba",
    "c2dfb_lead", "lean", "c2dfb_central",
)
_DASHES = ("solid", "dash", "dot", "dashdot")
_OWN_DASHES = ("longdash", "longdashdot")       # of plugins and labelled variants
_MATPLOTLIB_DASHES = {
    "solid": "-", "dash": (0, (4, 1.6)), "dot": (0, (1.2, 1.2)), "dashdot": (0, (4, 1.4, 1.2, 1.4)),
    "longdash": (0, (8, 2)), "longdashdot": (0, (8, 1.6, 1.2, 1.6)),
}

# Magnitudes (channels, oracle calls, heat maps, consensus error) use Cividis, so that none looks like an algorithm.
CIVIDIS = ("#00224E", "#35456C", "#666970", "#948E77", "#C8B866", "#FEE838")

# Values of a parameter that was varied use Viridis: an order that can be seen, and more hues than Cividis.
VIRIDIS = ("#440154", "#414487", "#2A788E", "#22A884", "#7AD151", "#FDE725")


@dataclass(frozen=True, slots=True)
class AlgorithmStyle:
    """Line colours on a light and on a dark page, and the dash."""

    light: str
    dark: str
    dash: str

    @property
    def linestyle(self) -> Any:
        """The dash as matplotlib takes it."""
        return _MATPLOTLIB_DASHES[self.dash]


def get_style(algorithm: str) -> AlgorithmStyle:
    """Return the style of an algorithm; one that is not built in has long dashes and a colour derived from its name."""
    if algorithm in _ORDER:
        number = _ORDER.index(algorithm)
        return AlgorithmStyle(*_COLOURS[number % len(_COLOURS)], _DASHES[number // len(_COLOURS)])
    return _own_style(_hash_name(algorithm))


def get_styles(algorithms: Sequence[str]) -> dict[str, AlgorithmStyle]:
    """Return the styles of algorithms that are shown together: plugins and variants differ from all others.

    Built-in ones keep their style. The others, in the alphabet's order, get the colour that their name gives, or the
    next one that fewer series have: eight series have eight colours, unless built-in ones among them share one.
    """
    styles = {name: get_style(name) for name in algorithms if name in _ORDER}
    used = Counter(style.light for style in styles.values())
    taken = set[int]()
    count = len(_COLOURS) * len(_OWN_DASHES)
    for name in sorted(name for name in algorithms if name not in _ORDER):
        places = [(_hash_name(name) + step) % count for step in range(count)]
        free = [place for place in places if place not in taken] or places
        place = min(free, key=lambda place: used[_own_style(place).light])      # the first of the least used
        taken.add(place)
        styles[name] = _own_style(place)
        used[styles[name].light] += 1
    return {name: styles[name] for name in algorithms}


def _hash_name(name: str) -> int:
    return crc32(name.encode()) % len(_COLOURS)


def _own_style(place: int) -> AlgorithmStyle:
    return AlgorithmStyle(*_COLOURS[place % len(_COLOURS)], _OWN_DASHES[place // len(_COLOURS)])


def sort_key(algorithm: str) -> tuple[int, str]:
    """Order algorithms the same way everywhere: built-in ones first."""
    return (_ORDER.index(algorithm) if algorithm in _ORDER else len(_ORDER), algorithm)


def sample_colours(algorithms: Sequence[str]) -> list[str]:
    """Return a colour per entry: the algorithm's own; if one occurs twice, all entries get colours of the scale."""
    styles = get_styles(algorithms)
    colours = [styles[algorithm].light for algorithm in algorithms]
    has_variants = any(name not in _ORDER for name in styles)
    if len(styles) < len(algorithms) or (has_variants and len(set(colours)) < len(colours)):
        return sample_scale(len(algorithms))
    return colours


def sample_scale(count: int) -> list[str]:
    """Return `count` colours of the magnitude scale, dark to light."""
    if count <= 1:
        return [CIVIDIS[1]]
    return [_interpolate(number * (len(CIVIDIS) - 1) / (count - 1)) for number in range(count)]


def sample_series(count: int) -> list[AlgorithmStyle]:
    """Return styles for the values of one parameter, in their order; without the end that a page's background hides."""
    last = len(VIRIDIS) - 1
    shares = [number / max(1, count - 1) for number in range(count)]
    return [
        AlgorithmStyle(
            _interpolate(0.88 * last * share, VIRIDIS), _interpolate(last * (0.25 + 0.75 * share), VIRIDIS), "solid")
        for share in shares
    ]


def _interpolate(position: float, scale: Sequence[str] = CIVIDIS) -> str:
    low = min(int(position), len(scale) - 2)
    share = position - low
    mixed = [
        round(int(scale[low][i : i + 2], 16) * (1 - share) + int(scale[low + 1][i : i + 2], 16) * share)
        for i in (1, 3, 5)
    ]
    return "#" + "".join(f"{value:02X}" for value in mixed)
