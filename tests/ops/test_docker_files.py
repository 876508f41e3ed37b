"""The files in docker/, checked by hadolint, Docker Compose, Kubernetes' schema and Helm."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.server.config import ServerConfig
from penstock.server.observability.metrics import Metrics
from penstock.server.ray import environment
from tests.support.image import IMAGES
from tests.support.paths import ROOT
from tests.support.serving import MODEL

DOCKER = ROOT / "docker"
CHART, MANIFESTS = DOCKER / "helm" / "penstock", DOCKER / "k8s"
BASE = MANIFESTS / "base"
_INSTALL = "install the tools of these tests: pip install -e '.[ops]'"
_SHUTDOWN_TIMEOUT_S = ServerConfig(served_model_names=("any",)).shutdown_timeout_s
# Defined by operators installed in a cluster, so Kubernetes' own schema does not have them.
_FOREIGN = ("ServiceMonitor",)
_ALL_ON: dict[str, Any] = {
    "serviceMonitor": {
        "enabled": True,
        "labels": {"release": "prometheus"},
        "sendApiKey": True,
    },
    "networkPolicy": {"extraEgress": [{"ports": [{"port": 4318, "protocol": "TCP"}]}]},
    "autoscaling": {"enabled": True},
    "existingSecret": "keys",
    "runtimeClassName": "nvidia",
    "imagePullSecrets": [{"name": "registry"}],
    "podAnnotations": {"a": "b"},
    "nodeSelector": {"gpu": "h200"},
    "tolerations": [{"key": "spot", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"nodeAffinity": {}},
    "extraArgs": ["--max-num-seqs", "128"],
    "cache": {"storageClass": "fast", "accessMode": "ReadWriteMany"},
}
_SMALL: dict[str, Any] = {
    "model": "",
    "gpus": 0,
    "cache": {"existingClaim": "models"},
    "podDisruptionBudget": {"enabled": False},
    "networkPolicy": {"enabled": False},
}


def test_hadolint_finds_nothing_in_the_dockerfiles() -> None:
    hadolint = _tool("hadolint", _INSTALL)
    assert _output(hadolint, "--failure-threshold", "style", *_dockerfiles()) == ""


def test_hadolint_reports_a_container_that_runs_as_root(tmp_path: Path) -> None:
    dockerfile = tmp_path / "Dockerfile"
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    dockerfile.write_text(text.replace("USER 10001:10001", "USER root"), encoding="utf-8")
    done = subprocess.run([_tool("hadolint", _INSTALL), dockerfile], capture_output=True, text=True)
    assert done.returncode != 0 and "DL3002" in done.stdout


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_compose_accepts_its_file_and_its_grace_period_covers_a_drain(profile: str) -> None:
    compose = _tool("docker-compose", "install docker-compose, Debian's package")
    file = DOCKER / "compose.yaml"
    config = yaml.safe_load(_output(compose, "-f", str(file), "--profile", profile, "config"))
    service = config["services"][f"penstock-{profile}"]
    assert service["image"] == IMAGES[profile]
    assert int(service["stop_grace_period"].removesuffix("s")) > _SHUTDOWN_TIMEOUT_S
    assert (DOCKER / ".." / service["build"]["dockerfile"]).is_file()
    for name in config["services"]:
        assert ":" in config["services"][name]["image"].rpartition("/")[2], f"{name} has no tag"


def test_the_files_that_compose_mounts_exist() -> None:
    config = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
    sources = [
        volume.split(":")[0]
        for service in config["services"].values()
        for volume in service.get("volumes", [])
    ]
    files = [DOCKER / source for source in sources if source.startswith("..")]
    assert len(files) == 3 and all(file.exists() for file in files), files


def test_compose_names_match_prometheus_and_grafana() -> None:
    compose, prometheus, dashboards, sources = (
        _documents(ROOT / name)[0]
        for name in (
            "docker/compose.yaml",
            "configs/prometheus/prometheus.yml",
            "configs/grafana/provisioning/dashboards/penstock.yaml",
            "configs/grafana/provisioning/datasources/prometheus.yaml",
        )
    )
    targets = [job["static_configs"][0]["targets"][0] for job in prometheus["scrape_configs"]]
    for profile in ("cpu", "gpu"):
        service = compose["services"][f"penstock-{profile}"]
        alias = service["networks"]["default"]["aliases"][0]
        assert f"{alias}:8000" in targets
    assert sources["datasources"][0]["url"] == "http://prometheus:9090"
    directory = dashboards["providers"][0]["options"]["path"]
    mounts = compose["services"]["grafana"]["volumes"]
    assert any(mount.split(":")[1].startswith(directory + "/") for mount in mounts)


def test_kubernetes_accepts_every_manifest(tmp_path: Path) -> None:
    files = sorted([*MANIFESTS.glob("*.yaml"), *BASE.glob("*.yaml")])
    documents = [d for file in files for d in _documents(file)]
    objects = [d for d in documents if "apiVersion" in d and d["kind"] != "Kustomization"]
    assert len(objects) == 7
    _validate(objects, tmp_path)


def test_kubernetes_rejects_an_unknown_field(tmp_path: Path) -> None:
    deployment = _documents(BASE / "deployment.yaml")[0]
    deployment["spec"]["replica"] = 1
    with pytest.raises(AssertionError, match="replica"):
        _validate([deployment], tmp_path)


@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
def test_kustomize_builds_each_overlay(overlay: str, tmp_path: Path) -> None:
    objects = _built(overlay)
    _validate(objects, tmp_path)
    assert len(objects) == 5
    pod = _one(objects, "Deployment")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["image"] == IMAGES[overlay]
    limits = container["resources"]["limits"]
    assert ("nvidia.com/gpu" in limits, "tolerations" in pod) == (overlay == "gpu",) * 2
    assert ("cpu" in limits) == (overlay == "cpu")


def test_kubernetes_accepts_the_pods_of_the_ray_cluster(tmp_path: Path) -> None:
    spec = _documents(MANIFESTS / "ray" / "rayservice.yaml")[0]["spec"]
    cluster = spec["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
        for group in groups
    ]
    _validate(pods, tmp_path)
    [application] = yaml.safe_load(spec["serveConfigV2"])["applications"]
    drain_s = application["args"]["shutdown-timeout"]
    assert spec["rayClusterDeletionDelaySeconds"] > drain_s
    assert pods[1]["spec"]["terminationGracePeriodSeconds"] > drain_s
    for pod in pods:
        given = {each["name"]: each["value"] for each in pod["spec"]["containers"][0]["env"]}
        assert given == environment.variables(drain_s)
        assert pod["spec"]["enableServiceLinks"] is False


def test_the_inference_pool_selects_the_pods_and_their_port(tmp_path: Path) -> None:
    objects = _built("inference-extension")
    _validate([o for o in objects if o["kind"] != "InferencePool"], tmp_path)
    pod = _one(objects, "Deployment")["spec"]["template"]
    pool = _one(objects, "InferencePool")["spec"]
    assert pool["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    [container] = pod["spec"]["containers"]
    assert pool["targetPorts"] == [{"number": container["ports"][0]["containerPort"]}]
    assert pod["metadata"]["labels"]["llm-d.ai/engine-type"] == "vllm"
    assert container["args"][-2:] == ["--metrics-alias", "vllm"]
    text = Metrics(MODEL, has_vllm_names=True).text().decode()
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert f"# TYPE vllm:{name} gauge" in text


def test_no_service_puts_variables_into_the_pod_that_the_server_would_read_as_flags() -> None:
    """Kubernetes sets PENSTOCK_PORT=tcp://... for a Service named penstock."""
    for deployment in (_one(_built("gpu"), "Deployment"), _one(_rendered({}), "Deployment")):
        assert deployment["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_the_charts_image_follows_whether_there_are_gpus() -> None:
    for values, image in (({}, IMAGES["gpu"]), (_cpu_values(), IMAGES["cpu"])):
        pod = _one(_rendered(values), "Deployment")["spec"]["template"]["spec"]
        assert pod["containers"][0]["image"] == image


def test_the_charts_values_for_cpus_are_those_of_the_overlay(tmp_path: Path) -> None:
    objects = _rendered(_cpu_values())
    _validate(objects, tmp_path)
    chart = _one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    [overlay] = _one(_built("cpu"), "Deployment")["spec"]["template"]["spec"]["containers"]
    assert chart["resources"] == overlay["resources"]
    assert chart["args"] == ["--shutdown-timeout=30"]


def test_the_manifests_grace_period_covers_a_drain() -> None:
    pod = _documents(BASE / "deployment.yaml")[0]["spec"]["template"]["spec"]
    before = int(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > before + _SHUTDOWN_TIMEOUT_S


def test_a_first_download_is_not_a_failed_rollout() -> None:
    for spec in (
        _documents(BASE / "deployment.yaml")[0]["spec"],
        _one(_rendered({"startupSeconds": 7200}), "Deployment")["spec"],
    ):
        probe = spec["template"]["spec"]["containers"][0]["startupProbe"]
        assert spec["progressDeadlineSeconds"] > probe["periodSeconds"] * probe["failureThreshold"]


def test_the_autoscalers_metric_is_supplied_by_the_adapter_and_exported_by_the_server() -> None:
    hpa = _documents(MANIFESTS / "hpa.yaml")[0]
    rule = _documents(MANIFESTS / "prometheus-adapter-rule.yaml")[0]["rules"]["custom"][0]
    metric = hpa["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert rule["seriesQuery"].startswith(metric + "{")
    assert f"# TYPE {metric} gauge" in Metrics(MODEL).text().decode()
    assert rule["name"] == {"matches": "^(.*)$", "as": "$1"}  # keeps the name
    chart = _one(_rendered({"autoscaling": {"enabled": True}}), "HorizontalPodAutoscaler")
    assert chart["spec"] == hpa["spec"]


def test_the_charts_monitor_sends_the_servers_key() -> None:
    values = {"existingSecret": "keys", "serviceMonitor": {"enabled": True, "sendApiKey": True}}
    [endpoint] = _one(_rendered(values), "ServiceMonitor")["spec"]["endpoints"]
    secret = {"name": "keys", "key": "PENSTOCK_API_KEY"}
    assert endpoint["authorization"] == {"credentials": secret}
    with pytest.raises(Exception, match="sendApiKey requires existingSecret"):
        _rendered({**values, "existingSecret": ""})


def test_the_charts_policy_allows_extra_egress() -> None:
    out = [{"ports": [{"port": 4318, "protocol": "TCP"}]}]
    plain = _documents(BASE / "networkpolicy.yaml")[0]["spec"]
    for extra in ([], out):
        policy = _one(_rendered({"networkPolicy": {"extraEgress": extra}}), "NetworkPolicy")
        assert policy["spec"]["egress"] == plain["egress"] + extra
        assert policy["spec"]["ingress"] == plain["ingress"]


@pytest.mark.parametrize("values", [{}, _ALL_ON, _SMALL], ids=["default", "all on", "small"])
def test_helm_renders_what_kubernetes_accepts(values: dict[str, Any], tmp_path: Path) -> None:
    objects = _rendered(values)
    _validate(objects, tmp_path)
    kinds = {o["kind"] for o in objects}
    assert ("HorizontalPodAutoscaler" in kinds) == (values is _ALL_ON)
    assert ("ServiceMonitor" in kinds) == (values is _ALL_ON)
    assert ("NetworkPolicy" in kinds) == (values is not _SMALL)
    assert ("PersistentVolumeClaim" in kinds) == (values is not _SMALL)


def test_the_chart_renders_the_pod_of_the_manifests() -> None:
    deployment = next(o for o in _rendered({}) if o["kind"] == "Deployment")
    chart = deployment["spec"]["template"]["spec"]
    plain = _one(_built("gpu"), "Deployment")["spec"]["template"]["spec"]
    ours, theirs = chart["containers"][0], plain["containers"][0]
    for key in ("ports", "resources", "securityContext", "lifecycle", "volumeMounts"):
        assert ours[key] == theirs[key], key
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert ours[probe] == theirs[probe], probe
    for key in ("terminationGracePeriodSeconds", "securityContext", "tolerations", "volumes"):
        assert _without_claims(chart)[key] == _without_claims(plain)[key], key


def test_the_charts_grace_period_covers_its_drain() -> None:
    deployment = next(o for o in _rendered({"shutdownTimeout": 300}) if o["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    assert "--shutdown-timeout=300" in pod["containers"][0]["args"]
    assert pod["terminationGracePeriodSeconds"] > 310


@pytest.mark.parametrize(
    "values",
    [
        {"replica": 2},
        {"gpus": 8},
        {"cache": {"size": "big"}},
        {"image": {"tag": 1}},
        {"serviceMonitor": {"key": "secret"}},
        {"networkPolicy": {"extraEgress": 4318}},
    ],
)
def test_the_charts_schema_rejects(values: dict[str, Any]) -> None:
    helm = pytest.importorskip("helm_python", reason=_INSTALL)
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmError, match=next(iter(values))):
        chart.validate_schema(values)


def test_helm_lint_reports_nothing() -> None:
    helm = pytest.importorskip("helm_python", reason=_INSTALL)
    report = helm.lint(CHART, strict=True)
    info = 1  # the only one of Helm's severities below a warning
    assert not report["errors"], report
    assert all(message["severity"] == info for message in report["messages"]), report


def _built(overlay: str) -> list[dict[str, Any]]:
    """What `kubectl apply -k` would apply."""
    kubectl = _tool("kubectl", "install kubectl 1.27 or later")
    return list(yaml.safe_load_all(_output(kubectl, "kustomize", str(MANIFESTS / overlay))))


def _cpu_values() -> dict[str, Any]:
    return _documents(CHART / "values-cpu.yaml")[0]


def _rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    helm = pytest.importorskip("helm_python", reason=_INSTALL)
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name="penstock", namespace="llm")
    notes = next(text for name, text in files.items() if name.endswith("NOTES.txt"))
    assert "port-forward service/penstock" in notes
    manifests = (text for name, text in files.items() if name.endswith(".yaml"))
    return [o for text in manifests for o in yaml.safe_load_all(text) if o]


def _one(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    [found] = [one for one in objects if one["kind"] == kind]
    return found


def _without_claims(pod: dict[str, Any]) -> dict[str, Any]:
    """Without the claims, whose names differ."""
    volumes = [volume for volume in pod["volumes"] if "persistentVolumeClaim" not in volume]
    return {**pod, "volumes": volumes}


def _documents(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text(encoding="utf-8")))


def _validate(objects: list[dict[str, Any]], directory: Path) -> None:
    """Checks objects against Kubernetes' own schema, which lists every field."""
    pytest.importorskip("kubernetes_validate", reason=_INSTALL)
    files = []
    for number, one in enumerate(o for o in objects if o["kind"] not in _FOREIGN):
        files.append(directory / f"{number}.yaml")
        files[-1].write_text(json.dumps(one), encoding="utf-8")
    assert files
    _output(_tool("kubernetes-validate", _INSTALL), "--strict", *map(str, files))


def _dockerfiles() -> list[str]:
    return [str(DOCKER / f"Dockerfile{kind}") for kind in ("", ".cpu", ".ray")]


def _tool(name: str, install: str) -> str:
    """Finds a program beside this Python or on the path; skips the test without it."""
    here = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which(name, path=here)
    if found is None:
        pytest.skip(install)
    return found


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
