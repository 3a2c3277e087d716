"""SPARKLE: SOBA over a network, one loop, with a heterogeneity correction of its own for each of x, y and v.

S. Zhu, B. Kong, S. Lu, X. Huang, K. Yuan: SPARKLE: A Unified Single-Loop Primal-Dual Framework for Decentralized
Bilevel Optimization, NeurIPS 2024, arXiv 2411.14166. The abstract gives the framework and the three corrections; the
lines are our reading. With W̃ = (I + W) / 2, a the step size of a variable s and D its direction, where x uses a
moving average r of D_x:

    ed      exact diffusion:    s⁺ = W̃ (2 s − s_last − a (D − D_last)),      first s⁺ = W̃ (s − a D)
    extra   EXTRA:              s⁺ = W̃ (2 s − s_last) − a (D − D_last),      first s⁺ = W̃ s − a D
    gt      gradient tracking:  s⁺ = W s − a T,  T⁺ = W T + D⁺ − D

It reaches the minimiser of ψ exactly, whatever the heterogeneity and the rules.

Each rule keeps one array per variable besides s and its direction. ed: ψ = s − a D of the last round, so that the line
above is s⁺ = W̃ (ψ + s − ψ_last). extra: q, the sum of all s − W̃ s, so that it is s⁺ = W̃ s − a D − q. Both forms
have the same iterates; they keep mean(s⁺ − s) = −a mean(D) where a changes with the rounds. gt: the tracker T.

Per round a node sends x, y and v in 1 packet: d_x + 2 d_y values, and each variable with the rule gt once more.
Oracles: 3 partial gradients, 1 Hessian- and 1 Jacobian-vector product. With mini-batches one batch per round serves
the three directions.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from dbo.algorithms.api import (
    MINIMISER,
    Array,
    Claim,
    ErrorTerms,
    Noise,
    Shard,
    algorithm,
    counter,
    mean,
    mix,
    param,
    round_key,
)
from dbo.algorithms.parts.soba import Directions, directions
from dbo.algorithms.references import hessian_methods as references

Rule: TypeAlias = Literal["ed", "extra", "gt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The rules are those that the paper recommends; numbers are ours."""

    eta_x: float = param(0.01, gt=0, help="step size of x (the paper's α)", schedule=True)
    eta_y: float = param(0.1, gt=0, help="step size of y (the paper's β)", schedule=True)
    eta_v: float = param(
        0.1, gt=0, help="step size of v, the solution of the Hessian system (the paper's γ)", schedule=True
    )
    theta: float = param(0.3, gt=0, le=1, help="weight of the new hypergradient in the moving average", schedule=True)
    rule_x: Rule = param("ed", help="consensus of x: exact diffusion, EXTRA, or gradient tracking (twice the values)")
    rule_y: Rule = param("ed", help="consensus of y")
    rule_v: Rule = param("ed", help="consensus of v")


@dataclass(frozen=True, slots=True)
class State:
    t: Array
    x: Array
    y: Array
    v: Array
    d: Directions             # D (x: r), with gt what T has taken in
    memory: Directions        # ed: ψ, extra: q; with gt no columns
    track: Directions         # gt: T; with ed and extra no columns

    @property
    def along(self) -> Directions:
        """The directions of the next steps: T where there is one, otherwise D."""
        pairs = ((self.track.x, self.d.x), (self.track.y, self.d.y), (self.track.v, self.d.v))
        return Directions(*(track if track.shape[1] else d for track, d in pairs))

    @property
    def direction(self) -> Array:
        return self.along.x


@dataclass(frozen=True, slots=True)
class Level:
    """One of the three variables: s, its direction D, and what its rule remembers."""

    name: str
    rule: Rule
    step: float
    s: Array
    d: Array
    memory: Array
    track: Array

    @property
    def along(self) -> Array:
        """The direction of the next step."""
        return self.track if self.rule == "gt" else self.d

    def send(self) -> dict[str, Array]:
        """Return the channels of this variable."""
        if self.rule == "ed":
            return {self.name: self.corrected}
        return {self.name: self.s} | ({f"t_{self.name}": self.track} if self.rule == "gt" else {})

    @property
    def local(self) -> Array:
        """ψ = s − a D."""
        stepped: Array = self.s - self.step * self.along
        return stepped

    @property
    def corrected(self) -> Array:
        """ψ + s − ψ_last."""
        corrected: Array = self.local + (self.s - self.memory)
        return corrected

    def move(self, mixed: Array) -> tuple[Array, Array]:
        """Return s⁺ and the rule's new memory; gt has its tracker instead."""
        if self.rule == "ed":
            return 0.5 * (self.corrected + mixed), self.local
        if self.rule == "extra":
            half: Array = 0.5 * (self.s + mixed)                                        # W̃ s
            q = self.memory + (self.s - half)
            return half - self.step * self.along - q, q
        return mixed - self.step * self.along, self.memory


def levels(st: State, cfg: Config) -> tuple[Level, Level, Level]:
    return (
        Level("x", cfg.rule_x, cfg.eta_x, st.x, st.d.x, st.memory.x, st.track.x),
        Level("y", cfg.rule_y, cfg.eta_y, st.y, st.d.y, st.memory.y, st.track.y),
        Level("v", cfg.rule_v, cfg.eta_v, st.v, st.d.v, st.memory.v, st.track.v),
    )


def init(shard: Shard, cfg: Config) -> State:
    """Initialize v = 0, r = D_x and T = D; ψ = s and q = 0 make the first step that of each rule."""
    t, x, y = counter(shard), shard.x0, shard.y0
    v = 0 * y
    d = directions(shard.sample(round_key(shard, t)), x, y, v)

    def remember(rule: Rule, s: Array) -> Array:
        return {"ed": s, "extra": 0 * s, "gt": 0 * s[:, :0]}[rule]

    def track(rule: Rule, new: Array) -> Array:
        return new if rule == "gt" else 0 * new[:, :0]

    memory = Directions(x=remember(cfg.rule_x, x), y=remember(cfg.rule_y, y), v=remember(cfg.rule_v, v))
    trackers = Directions(x=track(cfg.rule_x, d.x), y=track(cfg.rule_y, d.y), v=track(cfg.rule_v, d.v))
    return State(t=t, x=x, y=y, v=v, d=d, memory=memory, track=trackers)


def invariants(before: State, after: State, shard: Shard, cfg: Config) -> dict[str, Array]:
    """Each mean steps along that of the directions, and each memory has the mean that its rule needs."""
    found, d = dict[str, Array](), directions(shard, after.x, after.y, after.v)
    for old, new, local in zip(levels(before, cfg), levels(after, cfg), (d.x, d.y, d.v), strict=True):
        s = new.name
        found[f"mean({s}) steps by −η_{s} mean(d_{s})"] = mean(new.s - old.s) + old.step * mean(old.along)
        if s == "x":
            local = (1 - cfg.theta) * before.d.x + cfg.theta * d.x
        if new.rule == "ed":
            found[f"mean(ψ_{s}) = mean({s})"] = mean(new.memory - new.s)
        elif new.rule == "extra":
            found[f"mean(q_{s}) = 0"] = mean(new.memory)
        found[f"mean(d_{s}) = mean(D_{s},i)"] = mean(new.along - local)
    return found


def list_trackers(st: State) -> dict[str, Array]:
    """Return the trackers by name: those of the variables whose rule is gt."""
    trackers = {"tracker_x": st.track.x, "tracker_y": st.track.y, "tracker_v": st.track.v}
    return {name: rows for name, rows in trackers.items() if rows.shape[1]}


@algorithm(
    "sparkle", config=Config, state=State, init=init,
    packets=lambda cfg: 1, batches=lambda cfg: 1,
    family="soba", oracles="second_order", citation="Zhu et al. 2024, NeurIPS, arXiv 2411.14166",
    errors=ErrorTerms(consensus=lambda st: {"v": st.v} | list_trackers(st)),
    reference=references.sparkle,
    claim=Claim(
        limit=MINIMISER, invariants=invariants, rounds=300, steps={"eta_x": 0.2, "eta_y": 0.4, "eta_v": 0.4},
        noise=Noise(
            scale=("eta_x", "eta_y", "eta_v"), steps={"eta_x": 0.08, "eta_y": 0.12, "eta_v": 0.12, "theta": 1.0},
            rounds=400,
        ),
    ),
)
async def sparkle(st: State, shard: Shard, cfg: Config) -> State:
    """SPARKLE: SOBA in one loop; exact diffusion, EXTRA or gradient tracking on each of x, y and v."""
    old = levels(st, cfg)
    channels = {name: rows for level in old for name, rows in level.send().items()}
    mixed = dict(zip(channels, await mix(**channels), strict=True))
    (x, memory_x), (y, memory_y), (v, memory_v) = (level.move(mixed[level.name]) for level in old)

    t = st.t + 1
    d = directions(shard.sample(round_key(shard, t)), x, y, v)
    new = Directions(x=(1 - cfg.theta) * st.d.x + cfg.theta * d.x, y=d.y, v=d.v)        # moving average of D_x
    track = Directions(*(
        mixed[f"t_{level.name}"] + (local - level.d) if level.rule == "gt" else level.track
        for level, local in zip(old, (new.x, new.y, new.v), strict=True)
    ))
    return State(t=t, x=x, y=y, v=v, d=new, memory=Directions(x=memory_x, y=memory_y, v=memory_v), track=track)
