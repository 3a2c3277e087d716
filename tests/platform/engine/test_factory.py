"""Requests that a machine can never fulfil are refused before anything starts."""

import os

import pytest

from dbo.platform.config.engines import LocalSettings, RaySettings
from dbo.platform.engine import factory
from dbo.platform.errors import InputError


@pytest.fixture(autouse=True)
def _own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(factory.sys, "modules", {})       # another test may have connected to Ray


@pytest.mark.parametrize("settings", [
    RaySettings(gpus_per_node=0.5), RaySettings(gpus_per_node=1, nodes_per_actor=1), LocalSettings(device="cuda"),
])
def test_a_gpu_is_refused_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, settings: RaySettings | LocalSettings
) -> None:
    """The error names the key and what there is; with enough GPUs there is none."""
    monkeypatch.setattr(factory, "_count_gpus", lambda: 0)
    with pytest.raises(InputError, match=r"engine\.(gpus_per_node|device): .* is not allowed; .*(has 0|no GPU)"):
        factory.check_request(settings, 2)
    monkeypatch.setattr(factory, "_count_gpus", lambda: 2)
    factory.check_request(settings, 2)


def test_more_cpus_than_the_machine_has_are_refused() -> None:
    """Only with a fixed number of nodes per actor: auto packs as many nodes as fit."""
    with pytest.raises(InputError, match=r"cpus_per_node: 1.0 .* 10 nodes need 10 CPUs, this machine has 4"):
        factory.check_request(RaySettings(cpus_per_node=1.0, nodes_per_actor=1), 10)
    factory.check_request(RaySettings(cpus_per_node=1.0), 10)


def test_a_cluster_may_still_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is requested of a cluster is not compared with this machine."""
    monkeypatch.setattr(factory, "_count_gpus", lambda: 0)
    factory.check_request(RaySettings(gpus_per_node=1, address="127.0.0.1:6379"), 2)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    factory.check_request(RaySettings(gpus_per_node=1), 2)
