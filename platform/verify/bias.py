"""Check how far from ψ's minimiser an algorithm ends, as a power of one of its parameters.

A penalty method ends O(1/λ) away, a central difference O(1/λ²). The claim is checked by a second run with twice the
parameter: the distance must fall to 2^−p of what it was.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from dbo.algorithms.api import Algorithm

ORDER_TOLERANCE = 0.1       # of the exponent: at λ = 10 terms of the next order change it by a few percent


def check_bias(algorithm: Algorithm, distance: float, measure: Callable[[Algorithm], float]) -> Iterator[str]:
    """Yield a failure unless twice the parameter divides the distance to ψ's minimiser by 2^p, as is claimed."""
    claim = algorithm.claim
    if claim is None or claim.bias is None:
        return
    name, order = claim.bias
    value = getattr(algorithm.config(**claim.steps), name)
    nearer = measure(replace(algorithm, claim=replace(claim, steps={**claim.steps, name: 2 * value})))
    found = float(np.log2(distance / nearer))
    if not abs(found - order) <= ORDER_TOLERANCE * order:
        yield f"bias falls like {name}^−{found:.2g} instead of {name}^−{order:g}: {distance:.1e}, then {nearer:.1e}"
