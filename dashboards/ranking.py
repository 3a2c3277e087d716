"""Rank the algorithms of each setting: summary cards, one sentence per setting, and the results table."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dbo.dashboards.charts.curves import AXIS_TITLES
from dbo.dashboards.groups import ComparisonSetting, GroupedRuns, SeedGroup
from dbo.dashboards.number_format import format_number
from dbo.dashboards.palette import AlgorithmStyle
from dbo.platform.runs.schema import METRICS, PSI_VALUES, Direction, find_direction
from dbo.platform.runs.statistics import MeanEstimate, PairedDifference, compare_seeds

_MAX_SENTENCES, _MAX_NAMES = 8, 4


@dataclass(frozen=True, slots=True)
class Criterion:
    """A metric by which algorithms are ranked: its final value, or the cost of reaching the target."""

    metric: str
    title: str
    best_title: str
    verb: str                # what the best one does
    unit: str = ""
    direction: Direction | None = None       # of a task's own metric

    @property
    def is_cost(self) -> bool:
        return self.metric in METRICS and METRICS[self.metric].is_cost

    @property
    def higher_is_better(self) -> bool:
        return (self.direction or find_direction(self.metric)) == "max"

    def measure(self, group: SeedGroup) -> MeanEstimate | None:
        return group.cost_to_target(self.metric) if self.is_cost else group.final_value(self.metric)

    def measure_seeds(self, group: SeedGroup) -> dict[str, float | None]:
        """Return the value of each seed."""
        if self.is_cost:
            found = (None if record is None else record.get(self.metric) for record in group.target_records)
        else:
            found = (run.last_value(self.metric) for run in group.runs)
        return {str(run.seed): value for run, value in zip(group.runs, found, strict=True)}

    def test(self, one: SeedGroup, other: SeedGroup) -> PairedDifference | None:
        """Return the paired difference over common seeds; None: fewer than two, which decide nothing."""
        found = compare_seeds(self.measure_seeds(one), self.measure_seeds(other))
        return found if found is not None and found.count > 1 else None

    def is_tie(self, one: SeedGroup, other: SeedGroup) -> bool:
        """Decide whether two values are equal, or the paired difference is within its interval."""
        found, mine, theirs = self.test(one, other), self.measure(one), self.measure(other)
        is_equal = mine is not None and theirs is not None and mine.mean == theirs.mean
        return is_equal or (found is not None and not found.is_significant)

    def list_approximate(self, groups: Sequence[SeedGroup]) -> list[SeedGroup]:
        """Return the groups with a ψ that missed its tolerance, if this depends on ψ; costs of its levels do too."""
        return [
            group for group in groups
            if (group.setting.target.metric if self.is_cost else self.metric) in PSI_VALUES
            and any(run.last_value("psi_converged") == 0 for run in group.runs)
        ]

    def format_number(self, value: float) -> str:
        return f"{value:.3f}" if self.higher_is_better else format_number(value)

    def format_with_unit(self, value: float) -> str:
        unit = "round" if self.unit == "rounds" and value == 1 else self.unit
        return f"{self.format_number(value)}\u00a0{unit}" if unit else self.format_number(value)

    def format_interval(self, value: MeanEstimate) -> str:
        """Return `low – high`, or nothing where there is no interval."""
        if value.low is None or value.high is None:
            return ""
        return f"{self.format_number(value.low)} – {self.format_number(value.high)}"


ROUNDS = Criterion("round", "Rounds to target", "Fewest rounds", "needs the fewest rounds", "rounds")
COMMUNICATION = Criterion(
    "comm_mb", "Communication to target", "Least communication", "sends the fewest bytes", "MB"
)
TRAINING_TIME = Criterion(
    "seconds", "Training time to target", "Least training time", "takes the least training time", "s"
)
ACCURACY = Criterion(
    "node_accuracy_mean", "Final accuracy", "Highest final accuracy", "ends with the highest accuracy"
)
PSI = Criterion("psi", "Final ψ", "Lowest final ψ", "ends with the lowest ψ")
LOSS = Criterion("upper_loss", "Final upper loss", "Lowest final loss", "ends with the lowest upper loss")


@dataclass(frozen=True, slots=True)
class Winner:
    """The best algorithm of a setting by one criterion, and the runner-up."""

    setting: ComparisonSetting
    group: SeedGroup
    value: MeanEstimate
    second: SeedGroup | None = None
    second_value: MeanEstimate | None = None
    tied: tuple[SeedGroup, ...] = ()        # whose paired difference to it is within its interval
    untested: tuple[SeedGroup, ...] = ()    # that do not have two seeds in common with it
    approximate: tuple[SeedGroup, ...] = ()     # of all that are compared, whose ψ missed its tolerance
    compared: int = 1                       # groups

    @property
    def is_undecided(self) -> bool:
        """Whether nobody wins because a ψ is approximate."""
        return bool(self.approximate) and self.compared > 1

    @property
    def is_alone(self) -> bool:
        """Whether it may be named as the winner."""
        return not self.tied and not self.is_undecided

    def describe_second(self, runs: GroupedRuns, criterion: Criterion) -> str:
        """Name the runner-up and its value, or say that it ties."""
        if self.second is None or self.second_value is None:
            return ""
        if self.second_value.mean == self.value.mean or self.second in self.tied:
            return f"tied with {runs.label_in_setting(self.second)}"
        return f"next {runs.label_in_setting(self.second)}, {criterion.format_with_unit(self.second_value.mean)}"

    def describe_test(self) -> str:
        """Say that differences were not tested, where they were not."""
        if not self.untested:
            return ""
        return "one seed: not tested" if self.value.count == 1 else "too few common seeds: not all differences tested"


@dataclass(frozen=True, slots=True)
class SummaryCard:
    """The winner by one criterion, over all settings."""

    title: str
    goal: str                # the target that a cost refers to
    value: str
    note: str
    winner: str = ""
    variant: str = ""
    style: AlgorithmStyle | None = None


@dataclass(frozen=True, slots=True)
class TableValue:
    text: str
    detail: str = ""         # small print: interval, seeds that reached the target, or the best value before it
    is_best: bool = False
    is_missing: bool = False


@dataclass(frozen=True, slots=True)
class TableRow:
    setting: str
    algorithm: str
    variant: str
    style: AlgorithmStyle
    seeds: int
    values: tuple[TableValue, ...]       # one per criterion
    worst_node: str
    test_loss: str
    total_mb: str
    status: str
    has_failures: bool


def _select_final(runs: GroupedRuns) -> Criterion:
    """Return the criterion of the final value: the target's metric if all settings share one, else accuracy or loss."""
    metrics = {setting.target.metric for setting in runs.settings}
    if len(metrics) == 1 and all(runs.has_column(metric) for metric in metrics):
        target = runs.settings[0].target
        name, best = AXIS_TITLES.get(target.metric, target.metric), "Highest" if target.is_maximized else "Lowest"
        return Criterion(
            target.metric, f"Final {name}", f"{best} final {name}", f"ends with the {best.lower()} {name}",
            direction=target.direction)
    return ACCURACY if runs.has_column("node_accuracy_mean") else LOSS


def select_criteria(runs: GroupedRuns) -> list[Criterion]:
    """Return the criteria for which these runs have data."""
    has_target = any(runs.has_column(setting.target.metric) for setting in runs.settings)
    final = _select_final(runs)
    lead = [PSI] if runs.has_column(PSI.metric) else []
    last = [final] if final.metric != PSI.metric else []
    return [*lead, *((ROUNDS, COMMUNICATION, TRAINING_TIME) if has_target else ()), *last]


def find_winner(runs: GroupedRuns, setting: ComparisonSetting, criterion: Criterion) -> Winner | None:
    """Return the best of the groups whose seeds all reached the target; if there is none, the best of the others."""
    groups = runs.in_setting(setting)
    complete = [
        group for group in groups
        if not group.has_failures and (not criterion.is_cost or group.reached_count == len(group.runs))
    ]
    partial = [group for group in groups if criterion.is_cost and group.reached_count]
    measured = [(group, value) for group in complete or partial if (value := criterion.measure(group)) is not None]
    if not measured:
        return None
    sign = -1 if criterion.higher_is_better else 1
    first, *others = sorted(measured, key=lambda pair: sign * pair[1].mean)
    second, second_value = others[0] if others else (None, None)
    tied = tuple(group for group, _ in others if criterion.is_tie(group, first[0]))
    untested = tuple(group for group, _ in others if criterion.test(group, first[0]) is None)
    # Whoever misses a level of ψ is compared too: by a ψ that may be approximate.
    compared = [group for group in groups if not group.has_failures] if criterion.is_cost else \
        [group for group, _ in measured]
    approximate = tuple(criterion.list_approximate(compared))
    return Winner(setting, *first, second, second_value, tied, untested, approximate, len(compared))


def build_cards(runs: GroupedRuns) -> list[SummaryCard]:
    """Return one card per criterion."""
    return [_build_card(runs, criterion) for criterion in select_criteria(runs)]


def _build_card(runs: GroupedRuns, criterion: Criterion) -> SummaryCard:
    winners = [winner for setting in runs.settings if (winner := find_winner(runs, setting, criterion))]
    title = criterion.best_title if len(runs.seed_groups) > len(runs.settings) else criterion.title
    goals = sorted({_describe_target(setting) for setting in runs.settings}) if criterion.is_cost else []
    card = SummaryCard(title, " / ".join(goals), value="", note="")
    if not winners:
        note = "no run reached the target" if criterion.is_cost else "every run diverged or failed"
        return replace(card, value="none", note=note)
    if len(runs.settings) > 1:
        return _count_wins(runs, winners, card)
    (winner,) = winners
    group, value = winner.group, criterion.format_with_unit(winner.value.mean)
    notes = [f"approximate: {_describe_approximate(runs, winner)}"] if winner.approximate else []
    if winner.is_undecided:
        return replace(card, title=criterion.title, value="no winner", note=notes[0])
    if interval := criterion.format_interval(winner.value):
        notes.append(f"95\u00a0%: {interval}")
    if criterion.is_cost and group.reached_count < len(group.runs):
        notes.append(f"reached by {group.reached_count} of {len(group.runs)} seeds only")
    if winner.tied:
        why = winner.describe_test() or "the paired difference is within its 95\u00a0% interval"
        notes = [f"{_join_tied(runs, winner)} ({value})", *notes, why]
        return replace(card, value="tie", note="; ".join(notes))
    notes += [winner.describe_second(runs, criterion), winner.describe_test()]
    return replace(
        card, winner=group.algorithm, variant=group.variant, style=runs.get_style(group), value=value,
        note="; ".join(filter(None, notes)),
    )


def _join_tied(runs: GroupedRuns, winner: Winner) -> str:
    return _join_names(_shorten_names(runs, (winner.group, *winner.tied)))


def _shorten_names(runs: GroupedRuns, groups: Sequence[SeedGroup]) -> list[str]:
    """Name the first groups, without commas inside of a name, and count the others; the table has them all."""
    names = [runs.label_in_setting(group).replace(", ", " ") for group in groups]
    rest = len(names) - _MAX_NAMES
    return [*names[:_MAX_NAMES], f"{rest} more"] if rest > 0 else names


def _join_names(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _describe_approximate(runs: GroupedRuns, winner: Winner) -> str:
    """Say whose ψ is approximate."""
    who = f" of {_join_names(_shorten_names(runs, winner.approximate))}" if winner.compared > 1 else ""
    return f"the solve of ψ{who} missed its tolerance"


def _count_wins(runs: GroupedRuns, winners: Sequence[Winner], card: SummaryCard) -> SummaryCard:
    """Fill a card with the algorithm that wins in most settings."""
    alone = [winner for winner in winners if winner.is_alone]
    approximate = sum(winner.is_undecided for winner in winners)
    tied = sum(bool(winner.tied) and not winner.is_undecided for winner in winners)
    ties = ", ".join([
        *([f"ties in {tied}"] if tied else []),
        *([f"approximate, ψ missed its tolerance, in {approximate}"] if approximate else []),
    ])
    if not alone:
        value = "no winner" if approximate else "tie"
        return replace(card, value=value, note=f"{ties} of {len(runs.settings)} settings")
    (name, count), *others = Counter(winner.group.algorithm for winner in alone).most_common()
    counts = [f"{other} in {number}{' too' if number == count else ''}" for other, number in others]
    note = ", ".join([*counts, *filter(None, [ties])])
    tests = dict.fromkeys(winner.describe_test() for winner in alone)
    note = "; ".join(filter(None, [note, *tests]))
    return replace(
        card, winner=name, style=runs.styles[name], value=f"in {count} of {len(runs.settings)} settings", note=note
    )


def _describe_target(setting: ComparisonSetting) -> str:
    sign = "≥" if setting.target.is_maximized else "≤"
    return f"{setting.target.metric} {sign} {setting.target.level:g}"


def summarize(runs: GroupedRuns) -> list[str]:
    """Return one sentence per setting: who wins by which criterion, and who missed the target."""
    sentences = [
        (f"{runs.label_setting(setting)}: " if len(runs.settings) > 1 else "") + _summarize_setting(runs, setting)
        for setting in runs.settings[:_MAX_SENTENCES]
    ]
    if len(runs.settings) > _MAX_SENTENCES:
        sentences.append(f"The table has the other {len(runs.settings) - _MAX_SENTENCES} settings.")
    return sentences


def _summarize_setting(runs: GroupedRuns, setting: ComparisonSetting) -> str:
    groups, criteria = runs.in_setting(setting), select_criteria(runs)
    has_several = len(runs.settings) > 1
    clauses: list[str] = []
    untested: list[str] = []
    undecided: dict[str, list[str]] = {}        # why nobody wins, by which criteria
    if len(criteria) > 1 and not any(group.reached_count for group in groups):
        clauses.append(f"no algorithm reached {_describe_target(setting)}")
    for criterion in criteria:
        winner = find_winner(runs, setting, criterion)
        if winner is None:
            continue
        if winner.is_alone:
            untested.append(winner.describe_test())
        value, name = criterion.format_with_unit(winner.value.mean), runs.label_in_setting(winner.group)
        approximate = _describe_approximate(runs, winner)
        if winner.is_undecided:
            undecided.setdefault(approximate, []).append(criterion.title.lower())
            continue
        if winner.tied:
            clauses.append(f"{_join_tied(runs, winner)} tie by {criterion.title.lower()} ({value})")
            continue
        if len(groups) == 1:
            note = f" (approximate: {approximate})" if winner.approximate else ""
            clauses.append(f"{criterion.title.lower()}: {value}{note}")
        elif has_several:
            clauses.append(f"{criterion.best_title.lower()} {name} ({value})")
        else:
            second = winner.describe_second(runs, criterion)
            clauses.append(f"{name} {criterion.verb} ({value}{f'; {second}' if second else ''})")
    clauses = [
        f"{_join_names(titles)} {'is' if len(titles) == 1 else 'are'} approximate, no winner: {why}"
        for why, titles in undecided.items()
    ] + clauses
    if not clauses:
        return "No run has an evaluation yet."
    sentence = "; ".join([*clauses, *dict.fromkeys(filter(None, untested))]) + "."
    if not has_several and not sentence.startswith(tuple(_spell(runs, groups))):       # names keep their spelling
        sentence = sentence[0].upper() + sentence[1:]
    missed = [runs.label_in_setting(group) for group in groups if not group.reached_count]
    if len(criteria) > 1 and 0 < len(missed) < len(groups):
        rest = f" and {len(missed) - _MAX_NAMES} more" if len(missed) > _MAX_NAMES else ""
        sentence += f" Not reached by {'; '.join(missed[:_MAX_NAMES])}{rest}: {_describe_target(setting)}."
    return sentence


def _spell(runs: GroupedRuns, groups: Sequence[SeedGroup]) -> list[str]:
    """Return how sentences may begin with the name of a group."""
    return [name for label in map(runs.label_in_setting, groups) for name in (label, label.replace(", ", " "))]


def build_rows(runs: GroupedRuns) -> list[TableRow]:
    """Return one table row per group of seeds, with the best value of each setting marked."""
    criteria = select_criteria(runs)
    best = {
        (setting, criterion.metric): (winner.group, *winner.tied)
        for setting in runs.settings for criterion in criteria
        if (winner := find_winner(runs, setting, criterion)) and not winner.is_undecided
    }
    return [_build_row(runs, group, criteria, best) for group in runs.seed_groups]


def _build_row(
    runs: GroupedRuns, group: SeedGroup, criteria: Sequence[Criterion],
    best: Mapping[tuple[ComparisonSetting, str], Sequence[SeedGroup]],
) -> TableRow:
    values = tuple(
        _build_value(group, criterion, any(one is group for one in best.get((group.setting, criterion.metric), ())))
        for criterion in criteria
    )
    worst, loss, total = (group.final_value(column) for column in ("node_accuracy_min", "test_loss", "comm_mb"))
    return TableRow(
        setting=runs.label_setting(group.setting) if len(runs.settings) > 1 else "", algorithm=group.algorithm,
        variant=group.variant, style=runs.get_style(group), seeds=len(group.runs), values=values,
        worst_node=f"{worst.mean:.3f}" if worst else "–", test_loss=format_number(loss.mean) if loss else "–",
        total_mb=format_number(total.mean) if total else "–", status=_describe_status(group),
        has_failures=group.has_failures,
    )


def _build_value(group: SeedGroup, criterion: Criterion, is_best: bool) -> TableValue:
    value = criterion.measure(group)
    if value is not None:
        detail = criterion.format_interval(value)
        if criterion.is_cost and group.reached_count < len(group.runs):
            detail = f"{group.reached_count} of {len(group.runs)} seeds"
        if criterion.list_approximate([group]):
            residuals = [found for run in group.runs if (found := run.last_value("psi_residual")) is not None]
            residual = f"residual {max(residuals):.1e}" if residuals and not criterion.is_cost else ""
            detail = "; ".join(filter(None, (detail, "approximate", residual)))
        return TableValue(criterion.format_number(value.mean), detail, is_best)
    if criterion is not ROUNDS:
        return TableValue("–")
    nearest = group.best_target_value()
    return TableValue("not reached", "" if nearest is None else f"best {format_number(nearest, 4)}", is_missing=True)


def _describe_status(group: SeedGroup) -> str:
    """Name what differs from `finished`."""
    parts = [
        f"{status} ×{count}" if count < len(group.runs) else status
        for status, count in group.statuses.items() if status != "finished"
    ]
    evaluations = max(len(run.records) for run in group.runs)
    if evaluations <= 1:
        parts.append("one evaluation only" if evaluations else "no evaluation yet")
    return ", ".join(parts) or "finished"
