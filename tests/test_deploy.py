"""The files of docs/deploy: linted, valid against the schemas of their tools, without secrets, and of this version."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from dbo.version import find_version

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "docs" / "deploy"
MANIFESTS = ("kuberay.yaml", "kuberay-env.yaml")


def objects(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def pods(name: str) -> Iterator[dict[str, Any]]:
    """Yield the pod templates of the RayCluster in a manifest."""
    for found in objects(name):
        if found["kind"] == "RayCluster":
            yield found["spec"]["headGroupSpec"]["template"]
            yield from (group["template"] for group in found["spec"]["workerGroupSpecs"])


def lint(text: str) -> subprocess.CompletedProcess[str]:
    hadolint = Path(sys.executable).with_name("hadolint")
    return subprocess.run([hadolint, "-"], input=text, capture_output=True, text=True, timeout=60, check=False)


def test_dockerfile_passes_the_linter() -> None:
    done = lint((DEPLOY / "Dockerfile").read_text(encoding="utf-8"))
    assert done.returncode == 0, done.stdout


def test_linter_finds_a_planted_mistake() -> None:
    assert lint("FROM python:latest\nRUN cd /tmp\n").returncode != 0


def test_image_does_not_run_as_root() -> None:
    users = re.findall(r"^USER (\S+)", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert users == ["1000"]


def test_image_contains_every_package() -> None:
    """A folder that is missing here would be missing in the wheel of the image."""
    copied = set(re.findall(r"^COPY (\w+) \1$", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE))
    assert copied == {"algorithms", "dashboards", "dbo", "platform", "sweeps", "tasks"}


@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_objects_fit_their_schema(name: str) -> None:
    for found in objects(name):
        if found["kind"] != "RayCluster":
            kubernetes_validate.validate(found, "1.31", strict=True)
    for template in pods(name):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, "1.31", strict=True)


def test_schema_refuses_a_planted_mistake() -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": {"container": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, "1.31", strict=True)


def test_cluster_requires_a_token() -> None:
    (cluster,) = [found for found in objects("kuberay.yaml") if found["kind"] == "RayCluster"]
    assert cluster["spec"]["authOptions"] == {"mode": "token", "secretName": "dbo-ray-token"}
    for template in pods("kuberay-env.yaml"):
        names = {entry["name"] for entry in template["spec"]["containers"][0]["env"]}
        assert names == {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}


def test_autoscaling_has_limits() -> None:
    (cluster,) = [found for found in objects("kuberay.yaml") if found["kind"] == "RayCluster"]
    assert cluster["spec"]["enableInTreeAutoscaling"]
    for group in cluster["spec"]["workerGroupSpecs"]:
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] < 1000


def test_compose_publishes_on_loopback_only() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
    published = [port for service in services.values() for port in service.get("ports", ())]
    assert len(published) == 4
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_compose_mounts_exist() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    for service in compose["services"].values():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).resolve().exists(), mount


def test_no_secret_is_written_down() -> None:
    """Tokens and passwords come from the environment or from a secret of the cluster."""
    for file in DEPLOY.iterdir():
        for line in file.read_text(encoding="utf-8").splitlines():
            found = re.search(r"(?:TOKEN|PASSWORD|SECRET_ACCESS_KEY)\w*\s*[:=]\s*(\S+)", line)
            assert found is None or found[1].startswith(("${", "$(", "…", "{")), line


def test_images_have_the_version_of_the_project() -> None:
    """Every image is pinned, and ours carries this version."""
    texts = "".join(file.read_text(encoding="utf-8") for file in DEPLOY.iterdir())
    images = re.findall(r"image: (\S+)", texts)
    assert images
    assert all(":" in image.rpartition("/")[2] for image in images)
    assert {image.rpartition(":")[2] for image in images if "dbo" in image} == {find_version()}


def test_ray_version_is_allowed_by_the_project() -> None:
    import tomllib

    from packaging.requirements import Requirement

    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    (ray,) = [Requirement(entry) for entry in dependencies if entry.startswith("ray[")]
    for name in MANIFESTS:
        for found in objects(name):
            if found["kind"] == "RayCluster":
                assert found["spec"]["rayVersion"] in ray.specifier
