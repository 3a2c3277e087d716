"""Rank the algorithms of each setting: summary cards, one sentence per setting, and the results table."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dbo.dashboards.charts.curves import AXIS_TITLES
from dbo.dashboards.groups import ComparisonSetting, GroupedRuns, SeedGroup
from dbo.dashboards.number_format import format_number
from dbo.dashboards.palette import AlgorithmStyle
from dbo.platform.runs.schema import METRICS, Direction, find_direction
from dbo.platform.runs.statistics import MeanEstimate, compare_pairs

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

    def is_tie(self, one: SeedGroup, other: SeedGroup) -> bool:
        """Decide whether the paired difference over common seeds is within its interval; one seed decides nothing."""
        mine, theirs = self.measure_seeds(one), self.measure_seeds(other)
        common = [seed for seed in mine if seed in theirs]
        found = compare_pairs([mine[seed] for seed in common], [theirs[seed] for seed in common])
        return found is not None and found.count > 1 and not found.is_significant

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

    def describe_second(self, runs: GroupedRuns, criterion: Criterion) -> str:
        """Name the runner-up and its value, or say that it ties."""
        if self.second is None or self.second_value is None:
            return ""
        if self.second_value.mean == self.value.mean or self.second in self.tied:
            return f"tied with {runs.label_in_setting(self.second)}"
        return f"next {runs.label_in_setting(self.second)}, {criterion.format_with_unit(self.second_value.mean)}"


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
    lead = [PSI] if runs.has_column("psi") and final.metric != "psi" else []
    return [*lead, *([ROUNDS, COMMUNICATION, TRAINING_TIME, final] if has_target else [final])]


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
    return Winner(setting, *first, second, second_value, tied)


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
    (winner,), notes = winners, []
    group = winner.group
    if interval := criterion.format_interval(winner.value):
        notes.append(f"95\u00a0%: {interval}")
    if second := winner.describe_second(runs, criterion):
        notes.append(second)
        if winner.tied:
            notes.append("a tie: the paired difference is within its 95\u00a0% interval")
        elif winner.value.count == 1:
            notes.append("one seed: the difference is not tested")
    if criterion.is_cost and group.reached_count < len(group.runs):
        notes.append(f"reached by {group.reached_count} of {len(group.runs)} seeds only")
    return replace(
        card, winner=group.algorithm, variant=group.variant, style=runs.get_style(group),
        value=criterion.format_with_unit(winner.value.mean), note="; ".join(notes),
    )


def _count_wins(runs: GroupedRuns, winners: Sequence[Winner], card: SummaryCard) -> SummaryCard:
    """Fill a card with the algorithm that wins in most settings."""
    alone = [winner for winner in winners if not winner.tied]
    ties = f"ties in {len(winners) - len(alone)}" if len(alone) < len(winners) else ""
    if not alone:
        return replace(card, value="tie", note=f"{ties} of {len(runs.settings)} settings")
    (name, count), *others = Counter(winner.group.algorithm for winner in alone).most_common()
    counts = [f"{other} in {number}{' too' if number == count else ''}" for other, number in others]
    note = ", ".join([*counts, *filter(None, [ties])])
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
    clauses = []
    if len(criteria) > 1 and not any(group.reached_count for group in groups):
        clauses.append(f"no algorithm reached {_describe_target(setting)}")
    for criterion in criteria:
        winner = find_winner(runs, setting, criterion)
        if winner is None:
            continue
        value, name = criterion.format_with_unit(winner.value.mean), runs.label_in_setting(winner.group)
        if winner.tied:
            names = " and ".join([name, *map(runs.label_in_setting, winner.tied)])
            clauses.append(f"{names} tie by {criterion.title.lower()} ({value})")
            continue
        if len(groups) == 1:
            clauses.append(f"{criterion.title.lower()}: {value}")
        elif has_several:
            clauses.append(f"{criterion.best_title.lower()} {name} ({value})")
        else:
            second = winner.describe_second(runs, criterion)
            clauses.append(f"{name} {criterion.verb} ({value}{f'; {second}' if second else ''})")
    if not clauses:
        return "No run has an evaluation yet."
    sentence = "; ".join(clauses) + "."
    starts_with_name = len(groups) > 1 and not sentence.startswith("no algorithm")     # names keep their spelling
    if not has_several and not starts_with_name:
        sentence = sentence[0].upper() + sentence[1:]
    missed = [runs.label_in_setting(group) for group in groups if not group.reached_count]
    if len(criteria) > 1 and 0 < len(missed) < len(groups):
        rest = f" and {len(missed) - _MAX_NAMES} more" if len(missed) > _MAX_NAMES else ""
        sentence += f" Not reached by {'; '.join(missed[:_MAX_NAMES])}{rest}: {_describe_target(setting)}."
    return sentence


def build_rows(runs: GroupedRuns) -> list[TableRow]:
    """Return one table row per group of seeds, with the best value of each setting marked."""
    criteria = select_criteria(runs)
    best = {
        (setting, criterion.metric): (winner.group, *winner.tied)
        for setting in runs.settings for criterion in criteria if (winner := find_winner(runs, setting, criterion))
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
        if criterion is PSI and any(run.last_value("psi_converged") == 0 for run in group.runs):
            detail = "; ".join(filter(None, (detail, "approximate")))
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
