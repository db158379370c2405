"""Job templates of work pools, as Prefect's own workers read them."""

import asyncio
import uuid

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.utilities.templating import find_placeholders
from prefect.workers.process import ProcessWorker
from prefect_kubernetes.worker import KubernetesWorker, KubernetesWorkerJobConfiguration
from prefect_server import Server

from pipeline import pools


def job(server: Server, **variables: object) -> dict[str, object]:
    """The manifest of a run's job, as the worker would send it to a cluster."""
    wanted = {"image": "registry/dapo:1", **variables}
    with temporary_settings({PREFECT_API_URL: server.url}):
        configuration = asyncio.run(
            KubernetesWorkerJobConfiguration.from_template_and_values(pools.kubernetes({}), wanted)
        )
    configuration.prepare_for_flow_run(FlowRun(id=uuid.uuid4(), flow_id=uuid.uuid4(), name="night"))
    return configuration.job_manifest


@pytest.mark.slow
def test_a_kubernetes_job_has_gpus_the_data_and_shared_memory(server: Server) -> None:
    manifest = job(server, gpus=8, claim="artifacts", shared_memory="64Gi")
    assert not find_placeholders(manifest)  # nothing is left to fill in
    assert manifest["spec"]["backoffLimit"] == 0  # a retry is Prefect's business
    pod = manifest["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["image"] == "registry/dapo:1"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {"/data": "data", "/dev/shm": "shm"}
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert volumes["data"] == {"persistentVolumeClaim": {"claimName": "artifacts"}}
    assert volumes["shm"] == {"emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert environment["DAPO_DATA"] == "/data"
    assert environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"


@pytest.mark.slow
def test_what_is_not_asked_for_has_defaults(server: Server) -> None:
    manifest = job(server)
    [container] = manifest["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}


@pytest.mark.parametrize("kind", ["process", "kubernetes"])
def test_a_pool_keeps_its_own_settings_when_it_is_brought_up_to_date(kind: str) -> None:
    worker = {"process": ProcessWorker, "kubernetes": KubernetesWorker}[kind]
    own = worker.get_default_base_job_template()
    own["variables"]["properties"]["env"]["default"] = {"HF_HOME": "/models"}
    once = pools.TEMPLATES[kind](own)
    environment = once["variables"]["properties"]["env"]["default"]
    assert environment["HF_HOME"] == "/models"
    assert pools.TEMPLATES[kind](once) == once
