"""Time the recursion of `dbo replay`: many nodes and exchanges, with and without noise.

    python benchmarks/replay.py [--quick]
"""

import argparse

import numpy as np
from measure import Timed, judge, judge_number, run_in_turn, show, time_rounds

from dbo.platform.network.timing import Interval, Profile, replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a hundredth of the nodes")
    quick = parser.parse_args().quick
    small, large, exchanges = (100, 1_000, 100) if quick else (1_000, 100_000, 1_000)

    def ring(nodes: int, profile: Profile) -> Timed:
        neighbours = tuple(tuple(sorted(((i - 1) % nodes, (i + 1) % nodes))) for i in range(nodes))
        traffic = [Interval(exchanges, np.full(nodes, 1e6), np.full(nodes, 1.0))]

        def advance() -> None:
            replay(profile, neighbours, traffic)

        return time_rounds(advance, 1)

    noisy = Profile(compute_noise=0.2, latency_noise=0.2)
    times = run_in_turn(
        {
            f"{small} nodes": ring(small, Profile()), f"{large} nodes": ring(large, Profile()),
            f"{large} nodes, noise": ring(large, noisy),
        },
        repeats=3,
    )
    print(f"a ring, {exchanges} exchanges")
    show(times)
    few, many, with_noise = times.values()
    judge(f"{large} nodes : {small} nodes", many, few, most=1.5 * large / small)
    judge_number(f"{large} nodes x {exchanges} exchanges", many.best, most=60, unit=" s")
    judge_number("the same with noise", with_noise.best, most=60, unit=" s")


if __name__ == "__main__":
    main()
