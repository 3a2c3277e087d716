"""Who wins at what: in words, in four cards and in one table."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dbo.dashboards.estimates import Estimate, show
from dbo.dashboards.groups import Cell, Ordered, Setting
from dbo.dashboards.palette import look


@dataclass(frozen=True, slots=True)
class Measure:
    """Something that can be won."""

    key: str
    title: str               # of what it measures
    title_best: str
    verb: str                # what the best one does
    unit: str
    of: Callable[[Cell], Estimate | None]
    more: bool               # whether more is better
    price: bool              # whether it is a price of the target

    def number(self, value: float) -> str:
        return f"{value:.3f}" if self.more else show(value)

    def text(self, value: float) -> str:
        unit = "round" if self.unit == "rounds" and value == 1 else self.unit
        return f"{self.number(value)}\u00a0{unit}" if unit else self.number(value)


ROUNDS = Measure(
    "rounds", "Rounds to target", "Fewest rounds", "needs the fewest rounds", "rounds",
    lambda cell: cell.price("round"), False, True,
)
TRAFFIC = Measure(
    "mb", "Traffic to target", "Least traffic", "sends the least", "MB",
    lambda cell: cell.price("comm_mb"), False, True,
)
CLOCK = Measure(
    "seconds", "Training time to target", "Least training time", "takes the least training time", "s",
    lambda cell: cell.price("seconds"), False, True,
)
ACCURACY = Measure(
    "accuracy", "Final accuracy", "Highest final accuracy", "ends with the highest accuracy", "",
    lambda cell: cell.final("node_accuracy_mean"), True, False,
)
LOSS = Measure(
    "loss", "Final upper loss", "Lowest final loss", "ends with the lowest upper loss", "",
    lambda cell: cell.final("upper_loss"), False, False,
)


def measures(ordered: Ordered) -> list[Measure]:
    """What these runs can be judged by."""
    prices = any(ordered.has(setting.target.metric) for setting in ordered.settings)
    last = ACCURACY if ordered.has("node_accuracy_mean") else LOSS
    return [ROUNDS, TRAFFIC, CLOCK, last] if prices else [last]


@dataclass(frozen=True, slots=True)
class Win:
    """The best cell of a setting by a measure, and the next one."""

    setting: Setting
    cell: Cell
    value: Estimate
    second: Cell | None
    second_value: Estimate | None

    def after(self, ordered: Ordered, measure: Measure) -> str:
        """Who comes next, or is as good."""
        if self.second is None or self.second_value is None:
            return ""
        if self.second_value.mean == self.value.mean:
            return f"level with {ordered.name(self.second)}"
        return f"next {ordered.name(self.second)}, {measure.text(self.second_value.mean)}"

    @property
    def clear(self) -> bool:
        return self.second_value is not None and self.value.apart_from(self.second_value)


def win(ordered: Ordered, setting: Setting, measure: Measure) -> Win | None:
    """A cell wins if all its seeds did what is asked; if there is none such, one of which some did."""
    cells = ordered.within(setting)
    full = [cell for cell in cells if cell.whole and (not measure.price or cell.reached == len(cell.runs))]
    some = [cell for cell in cells if measure.price and cell.reached]
    valued = [(cell, value) for cell in full or some if (value := measure.of(cell)) is not None]
    if not valued:
        return None
    ranked = sorted(valued, key=lambda pair: -pair[1].mean if measure.more else pair[1].mean)
    second = ranked[1] if len(ranked) > 1 else (None, None)
    return Win(setting, *ranked[0], *second)


def cards(ordered: Ordered) -> list[dict[str, Any]]:
    """A card per measure: the winner, its value, and what it has left behind."""
    return [_card(ordered, measure) for measure in measures(ordered)]


def _card(ordered: Ordered, measure: Measure) -> dict[str, Any]:
    wins = [found for setting in ordered.settings if (found := win(ordered, setting, measure))]
    title = measure.title_best if len(ordered.cells) > len(ordered.settings) else measure.title
    card: dict[str, Any] = {"title": title, "to": "", "winner": None, "value": "", "note": ""}
    if measure.price:
        card["to"] = " / ".join(sorted({_goal(setting) for setting in ordered.settings}))
    if not wins:
        return {**card, "value": "nobody", "note": "no run reached it" if measure.price else "no run ended well"}
    if len(ordered.settings) == 1:
        first = wins[0]
        note = _interval(first.value, measure)
        if after := first.after(ordered, measure):
            note += after
            note += "" if first.clear or first.value.count < 2 else "; the intervals overlap"
        if measure.price and first.cell.reached < len(first.cell.runs):
            note += f"; reached by {first.cell.reached} of {len(first.cell.runs)} seeds only"
        value = measure.text(first.value.mean)
        return {**card, **_named(first.cell.algorithm, first.cell.variant), "value": value, "note": note}
    tally = Counter(found.cell.algorithm for found in wins)
    (name, count), *others = tally.most_common()
    note = ", ".join(f"{other} in {number}{' too' if number == count else ''}" for other, number in others)
    return {**card, **_named(name, ""), "value": f"in {count} of {len(ordered.settings)} settings", "note": note}


def _named(algorithm: str, variant: str) -> dict[str, Any]:
    return {"winner": algorithm, "variant": variant, "look": look(algorithm)}


def _interval(value: Estimate, measure: Measure) -> str:
    if value.low is None or value.high is None:
        return ""
    return f"95\u00a0%: {measure.number(value.low)} – {measure.number(value.high)}; "


def _goal(setting: Setting) -> str:
    sign = "≥" if setting.target.rising else "≤"
    return f"{setting.target.metric} {sign} {setting.target.level:g}"


def words(ordered: Ordered) -> list[str]:
    """A sentence per setting that says who wins, and what must be known to believe it."""
    sentences = []
    for setting in ordered.settings[:8]:
        told = _sentence(ordered, setting)
        where = f"{ordered.label(setting)}: " if len(ordered.settings) > 1 else ""
        sentences.append(where + told)
    if len(ordered.settings) > 8:
        sentences.append(f"The table has the other {len(ordered.settings) - 8} settings.")
    return sentences


def _sentence(ordered: Ordered, setting: Setting) -> str:
    cells, judged, several = ordered.within(setting), measures(ordered), len(ordered.settings) > 1
    told = []
    if len(judged) > 1 and not any(cell.reached for cell in cells):
        told.append(f"nobody reached {_goal(setting)}")
    for measure in judged:
        found = win(ordered, setting, measure)
        if found is None:
            continue
        value = measure.text(found.value.mean)
        if len(cells) == 1:
            told.append(f"{measure.title.lower()}: {value}")
        elif several:
            told.append(f"{measure.title_best.lower()} {ordered.name(found.cell)} ({value})")
        else:
            after = found.after(ordered, measure)
            told.append(f"{ordered.name(found.cell)} {measure.verb} ({value}{f'; {after}' if after else ''})")
    missing = [ordered.name(cell) for cell in cells if not cell.reached]
    if len(judged) > 1 and 0 < len(missing) < len(cells):
        told.append(f"{'; '.join(missing[:4])}{f' and {len(missing) - 4} more' if len(missing) > 4 else ''} "
                    f"did not reach {_goal(setting)}")
    if not told:
        return "No run has an evaluation yet."
    sentence = "; ".join(told) + "."
    begins = not several and (len(cells) == 1 or sentence.startswith("nobody"))       # names are written as they are
    return sentence[0].upper() + sentence[1:] if begins else sentence


def rows(ordered: Ordered) -> list[dict[str, Any]]:
    """The table: a row per cell, the best of each setting marked."""
    judged = measures(ordered)
    best = {
        (setting, measure.key): found.cell
        for setting in ordered.settings for measure in judged if (found := win(ordered, setting, measure))
    }
    return [_row(ordered, cell, judged, best) for cell in ordered.cells]


def _row(ordered: Ordered, cell: Cell, judged: Sequence[Measure], best: dict[Any, Cell]) -> dict[str, Any]:
    ended = [f"{status} ×{count}" if count < len(cell.runs) else status
             for status, count in cell.statuses.items() if status != "finished"]
    evaluations = max(len(run.records) for run in cell.runs)
    if evaluations <= 1:
        ended.append("one evaluation only" if evaluations else "no evaluation yet")
    values = []
    for measure in judged:
        estimate = measure.of(cell)
        entry = {"text": "", "range": "", "best": best.get((cell.setting, measure.key)) is cell, "muted": False}
        if estimate is not None:
            entry["text"] = measure.number(estimate.mean)
            if estimate.low is not None and estimate.high is not None:
                entry["range"] = f"{measure.number(estimate.low)} – {measure.number(estimate.high)}"
            if measure.price and cell.reached < len(cell.runs):
                entry["range"] = f"{cell.reached} of {len(cell.runs)} seeds"
        else:
            entry |= {"text": "not reached" if measure is ROUNDS else "–", "muted": measure is ROUNDS}
            nearest = cell.best(cell.setting.target.metric, cell.setting.target.rising)
            if measure is ROUNDS and nearest is not None:
                entry["range"] = f"best {show(nearest, 4)}"
        values.append(entry)
    worst, loss, traffic = cell.final("node_accuracy_min"), cell.final("test_loss"), cell.final("comm_mb")
    return {
        "setting": ordered.label(cell.setting) if len(ordered.settings) > 1 else "", "algorithm": cell.algorithm,
        "variant": cell.variant, "look": look(cell.algorithm), "seeds": len(cell.runs), "values": values,
        "state": ", ".join(ended), "bad": not cell.whole,
        "worst": f"{worst.mean:.3f}" if worst else "–", "loss": show(loss.mean) if loss else "–",
        "traffic": show(traffic.mean) if traffic else "–",
    }
