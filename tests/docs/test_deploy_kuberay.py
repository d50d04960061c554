"""The manifest in deploy/kuberay/ fits together. docs/operate.md says what of it was run."""

from pathlib import Path
from typing import Any

import yaml

from supervisor.config.file import examine_config

ROOT = Path(__file__).resolve().parents[2]
OBJECTS: list[dict[str, Any]] = list(yaml.safe_load_all((ROOT / "deploy" / "kuberay" / "modelctl.yaml").read_text()))


def named(kind: str) -> dict[str, Any]:
    (found,) = (one for one in OBJECTS if one["kind"] == kind)
    return found


CLUSTER = named("RayCluster")["spec"]
HEAD = CLUSTER["headGroupSpec"]["template"]["spec"]
GROUPS = CLUSTER["workerGroupSpecs"]
RAY, SUPERVISOR = HEAD["containers"]
WORKERS = [container for group in GROUPS for container in group["template"]["spec"]["containers"]]


FIELDS: dict[str, dict[str, type]] = {
    "RayClusterSpec": {
        "headGroupSpec": dict, "workerGroupSpecs": list, "rayVersion": str, "headServiceAnnotations": dict,
        "enableInTreeAutoscaling": bool, "autoscalerOptions": dict, "gcsFaultToleranceOptions": dict, "suspend": bool,
        "managedBy": str,
    },
    "HeadGroupSpec": {
        "rayStartParams": dict, "template": dict, "serviceType": str, "headService": dict, "enableIngress": bool,
    },
    "WorkerGroupSpec": {
        "groupName": str, "minReplicas": int, "maxReplicas": int, "rayStartParams": dict, "template": dict,
        "replicas": int, "numOfHosts": int, "idleTimeoutSeconds": int, "scaleStrategy": dict, "suspend": bool,
    },
}  # fmt: skip
"""The fields of the operator's Go types (raycluster_types.go) that older and newer versions have in common."""
REQUIRED = {
    "RayClusterSpec": {"headGroupSpec"},
    "HeadGroupSpec": {"rayStartParams", "template"},
    "WorkerGroupSpec": {"groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"},
}


def environment(container: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def test_models_yaml_is_complete_with_the_address_of_the_pod(tmp_path: Path) -> None:
    advertise = environment(SUPERVISOR)["MODELCTL_CLUSTER__ADVERTISE"]
    assert environment(SUPERVISOR)["POD_IP"]["fieldRef"]["fieldPath"] == "status.podIP"
    (tmp_path / "model").mkdir()
    file = tmp_path / "models.yaml"
    text = named("ConfigMap")["data"]["models.yaml"]
    file.write_text(text.replace("/models/Llama-3.1-8B-Instruct-exl2-6.0bpw", f"{tmp_path}/model"))
    variables = {"MODELCTL_CLUSTER__ADVERTISE": advertise.replace("$(POD_IP)", "10.1.2.3")}
    found = examine_config(file, variables)
    assert found.problems == []
    cluster = found.config.cluster
    assert cluster is not None
    ports = {port["name"]: port["containerPort"] for port in SUPERVISOR["ports"]}
    assert cluster.advertise == f"tcp://10.1.2.3:{ports['workers']}"
    assert found.config.gateway is not None
    assert found.config.gateway.listen.port == ports["http"]
    gpus = sum(group["replicas"] * int(_limits(group)["nvidia.com/gpu"]) for group in GROUPS)
    assert found.config.models["llama-8b"].config.replicas <= gpus


def _limits(group: dict[str, Any]) -> dict[str, Any]:
    limits: dict[str, Any] = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    return limits


def test_the_cluster_has_fields_that_the_operator_knows_and_replicas_that_it_accepts() -> None:
    parts = [("RayClusterSpec", CLUSTER), ("HeadGroupSpec", CLUSTER["headGroupSpec"])]
    for kind, given in [*parts, *(("WorkerGroupSpec", group) for group in GROUPS)]:
        assert {name: type(value) for name, value in given.items()}.items() <= FIELDS[kind].items()
        assert REQUIRED[kind] <= given.keys()
    assert named("RayCluster")["apiVersion"] == "ray.io/v1"
    assert all(0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] for group in GROUPS)
    for group in (CLUSTER["headGroupSpec"], *GROUPS):
        assert group["template"].keys() <= {"metadata", "spec"}
        assert "labels" not in group["rayStartParams"], "newer operators refuse it here"


def test_every_container_has_the_token_and_the_same_image() -> None:
    for container in (RAY, SUPERVISOR, *WORKERS):
        variables = environment(container)
        assert variables["RAY_AUTH_MODE"] == "token"
        assert variables["RAY_AUTH_TOKEN"] == {"secretKeyRef": {"name": "modelctl-ray", "key": "auth_token"}}
        assert container["image"] == SUPERVISOR["image"]


def test_ray_leases_no_gpu_of_the_head_and_the_driver_finds_its_node() -> None:
    assert CLUSTER["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"
    assert "nvidia.com/gpu" not in str(HEAD)
    shared = [{mount["name"]: mount["mountPath"] for mount in one["volumeMounts"]} for one in (RAY, SUPERVISOR)]
    assert all(mounts["ray"] == "/tmp/ray" and mounts["shm"] == "/dev/shm" for mounts in shared)
    for group in (CLUSTER["headGroupSpec"], *GROUPS):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values()), "the operator takes text only"


def test_models_have_the_same_path_everywhere_and_only_pods_of_the_cluster_reach_ray() -> None:
    for container in (SUPERVISOR, *WORKERS):
        (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "models")
        assert mount["mountPath"] == "/models"
        assert mount["readOnly"]
    inside, outside = named("NetworkPolicy")["spec"]["ingress"]
    assert inside["from"] == [{"podSelector": named("NetworkPolicy")["spec"]["podSelector"]}]
    assert outside["ports"] == [{"port": 8000}]
    assert named("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == {"ray.io/cluster": "modelctl"}
    assert named("Service")["spec"]["selector"] == {"ray.io/cluster": "modelctl", "ray.io/node-type": "head"}
