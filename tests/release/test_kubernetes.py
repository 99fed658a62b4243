"""The manifests of examples/: fields that Kubernetes 1.36 and JobSet publish, and what fits.

An API server refuses unknown fields, and a run hangs whose numbers do not fit. The names are those
of the published schemas.
"""

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="no yaml: pip install pyyaml")
ROOT = Path(__file__).parents[2]
FIELDS = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "JobSet": {"network", "failurePolicy", "replicatedJobs", "successPolicy", "suspend"},
    "network": {"enableDNSHostnames", "publishNotReadyAddresses", "subdomain"},
    "failurePolicy": {"maxRestarts", "restartStrategy", "rules"},
    "replicatedJobs": {"name", "replicas", "template", "dependsOn", "groupName"},
    "Job": {"completionMode", "completions", "parallelism", "backoffLimit", "template",
            "backoffLimitPerIndex", "maxFailedIndexes", "podFailurePolicy"},
    "Pod": {"restartPolicy", "subdomain", "terminationGracePeriodSeconds", "containers", "volumes"},
    "containers": {"name", "image", "command", "args", "env", "resources", "volumeMounts"},
    "env": {"name", "value", "valueFrom"},
    "volumeMounts": {"name", "mountPath", "readOnly", "subPath"},
    "volumes": {"name", "emptyDir", "persistentVolumeClaim"},
    "Service": {"clusterIP", "publishNotReadyAddresses", "selector", "ports"},
}  # fmt: skip
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def read(name):
    return list(yaml.safe_load_all((ROOT / "examples" / name).read_text()))


def known(kind, *objects):
    """The objects, whose fields a schema has."""
    for found in objects:
        assert set(found) <= FIELDS[kind], kind
    return objects


def the_job(spec, coordinator):
    """Checks an Indexed Job whose first pod has an address."""
    known("Job", spec)
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    (pod,) = known("Pod", spec["template"]["spec"])
    assert pod["restartPolicy"] in ("Never", "OnFailure")  # a Job takes no other
    (container,) = known("containers", *pod["containers"])
    env = {row["name"]: row for row in known("env", *container["env"])}
    assert env["NUM_HOSTS"]["value"] == str(spec["completions"])  # variables are texts
    assert env["HOST_ID"]["valueFrom"]["fieldRef"]["fieldPath"] == INDEX
    assert re.fullmatch(re.escape(coordinator) + r":\d+", env["COORDINATOR"]["value"])
    mounts = {
        row["name"]: row["mountPath"] for row in known("volumeMounts", *container["volumeMounts"])
    }  # noqa: E501
    volumes = {row["name"]: row for row in known("volumes", *pod["volumes"])}
    assert mounts.keys() == volumes.keys()
    (memory,) = [mounts[name] for name, row in volumes.items() if "emptyDir" in row]
    assert volumes["memory"]["emptyDir"] == {"medium": "Memory"}
    assert env["DYNAMIQ_JAX_COPIES"]["value"].startswith(f"{memory}/")
    for word in container["command"]:
        assert "/" not in word or (ROOT / word).exists(), word
    for limit in container["resources"]["limits"].values():
        assert isinstance(limit, str)
    return pod


def test_the_job_set_names_fields_that_there_are_and_its_first_pod():
    (made,) = known("", *read("jobset.yaml"))
    assert (made["apiVersion"], made["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (spec,) = known("JobSet", made["spec"])
    known("network", spec["network"])
    known("failurePolicy", spec["failurePolicy"])
    (job,) = known("replicatedJobs", *spec["replicatedJobs"])
    name = made["metadata"]["name"]
    the_job(job["template"]["spec"], f"{name}-{job['name']}-0-0.{name}")


def test_the_indexed_job_has_a_service_that_publishes_its_pods():
    service, job = known("", *read("indexed_job.yaml"))
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    known("Service", service["spec"])
    names = job["metadata"]["name"], service["metadata"]["name"]
    assert service["spec"] == {
        "clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": names[0]}
    }  # fmt: skip
    pod = the_job(job["spec"], f"{names[0]}-0.{names[1]}")
    assert pod["subdomain"] == names[1]
