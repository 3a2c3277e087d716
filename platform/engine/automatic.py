"""Show the values of parameters that are `auto`; blocks derive the same ones before the first round."""

from collections.abc import Mapping

from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.block import describe_network
from dbo.platform.network.topology import Network
from dbo.tasks.api import Problem


def derive_values(experiment: Experiment, problem: Problem, network: Network) -> dict[str, float]:
    """Return the number behind each parameter of the algorithm that is `auto`."""
    parts, facts = experiment.parts, describe_network(network)
    return parts.schedules.derive(parts.config, facts, problem.dim_x, problem.dim_y)


def describe_derived(values: Mapping[str, float]) -> str | None:
    """Return one line, such as `derived from the network: gamma_in = 0.0982`."""
    shown = ", ".join(f"{name} = {value:.3g}" for name, value in values.items())
    return f"derived from the network: {shown}" if shown else None
