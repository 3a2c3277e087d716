"""Edge-triggered primal-dual consensus: an entry is corrected on an edge when one of its ends has just sent it.

A loop follows v ← v − η (∇ + D) + β (v − v_old) − κ e with a dual D whose sum over the nodes is 0. A node publishes a
reference point h, which all neighbours rebuild from its messages, bit for bit. With m_i the entries that node i has
just sent,

    e_i = Σ_j w_ij [m_i or m_j] (h_i − h_j)        D_i ← D_i + γ/(2η) e_i.

The bracket is the same at both ends of an edge and W is symmetric, so the corrections cancel and mean(D) stays 0. An
entry that neither end has sent has stale references; without the trigger they push on in every step. The dual goes on
pushing between two messages of an entry: an integral controller with few samples swings. κ e, which acts once per
message, damps it (docs/beyond.md).
"""

from dataclasses import dataclass
from typing import NamedTuple

from array_api_compat import array_namespace

from dbo.algorithms.compression.compressors import Compressor
from dbo.algorithms.gossip import Message, Neighbours, Packed
from dbo.algorithms.protocol import Array
from dbo.algorithms.rng import Key


@dataclass(frozen=True, slots=True)
class Loop:
    """State of one variable."""

    v: Array          # the node's own iterate
    old: Array        # the one before
    dual: Array       # D, sums to 0 over the nodes
    ref: Array        # h, the public copy of v
    near: Array       # (nodes, places, dim) the neighbours' h


class Step(NamedTuple):
    """Sizes of a step."""

    eta: float
    gamma: float
    momentum: float = 0.0
    triggered: bool = True
    damping: float = 0.0      # κ


class Published(NamedTuple):
    """What a node sends in a step, and its reference point after it."""

    message: Message | Packed
    change: Array     # h after − h before, as the message and what explains it give it
    ref: Array


def start(v: Array, places: int) -> Loop:
    """Start a loop at a common point, which all nodes know."""
    xp = array_namespace(v)
    near = xp.stack([v] * places, axis=1) if places else xp.zeros_like(v)[:, None][:, :0]
    return Loop(v=v + 0, old=v + 0, dual=0 * v, ref=v + 0, near=near + 0)


def publish(
    loop: Loop, grad: Array, step: Step, q: Compressor, key: Key, channel: str, explained: Array | None = None
) -> Published:
    """Compress the residual of the step's target; `explained` is a part of it that all neighbours know already."""
    target = loop.v - step.eta * (grad + loop.dual) + step.momentum * (loop.v - loop.old)
    residual = target - loop.ref if explained is None else target - loop.ref - explained
    message = q(residual, key, channel)
    change = message.values if explained is None else explained + message.values
    return Published(message, change, loop.ref + change)


def advance(
    loop: Loop, grad: Array, step: Step, sent: Published, got: Neighbours, explained: Array | None = None
) -> Loop:
    """Update copies, dual and iterate from the neighbours' messages; `explained` are the parts known before."""
    xp = array_namespace(loop.v)
    news = got.rows if explained is None else explained + got.rows
    near = loop.near + news          # the sums that the neighbours' `publish` computes, with the same rounding
    own_sent, error = sent.change != 0, 0 * loop.v
    for place in range(near.shape[1]):
        apart = sent.ref - near[:, place]
        if step.triggered:
            apart = xp.where(own_sent | (news[:, place] != 0), apart, 0.0)
        error = error + got.weights[:, place] * apart
    dual = loop.dual + step.gamma / (2 * step.eta) * error
    v = loop.v - step.eta * (grad + dual) + step.momentum * (loop.v - loop.old)
    if step.damping:
        v = v - step.damping * error
    return Loop(v=v, old=loop.v, dual=dual, ref=sent.ref, near=near)
