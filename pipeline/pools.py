"""What a run's process or pod gets from its work pool: base job templates for Prefect's workers."""

import pipeline.prefect_defaults  # noqa: F401, I001  before Prefect

from typing import Any

from prefect.workers.process import ProcessWorker

from stages.errors import InputError

Template = dict[str, Any]
HEARTBEAT_S = 30
DATA, SHARED_MEMORY = "/data", "/dev/shm"


def process(template: Template) -> Template:
    """Runs as processes beside their worker; each reports that it is alive.

    `template`: the pool's own, to go on from; empty: there is none yet.
    """
    return _alive(template or ProcessWorker.get_default_base_job_template(), {})


def kubernetes(template: Template) -> Template:
    """Runs as Kubernetes jobs: GPUs, a volume for the artifacts, and room in shared memory.

    Job variables, all with defaults but the first: `image` with dapo-pipeline in it, `gpus`,
    `claim` (the volume claim that holds the data root), `shared_memory`, and those of Prefect's
    worker. A pod that is evicted or out of memory is not started again by Kubernetes: a retry of
    the flow run goes on from the claim.

    Raises `InputError` if prefect-kubernetes is not installed.
    """
    try:
        from prefect_kubernetes.worker import KubernetesWorker
    except ImportError as error:
        raise InputError(
            f"{error}; install the extra, pip install 'dapo-pipeline[kubernetes]'"
        ) from error
    template = template or KubernetesWorker.get_default_base_job_template()
    template = _alive(template, {"DAPO_DATA": DATA})
    template["variables"]["properties"] |= {
        "gpus": {"type": "integer", "default": 1, "minimum": 0, "title": "GPUs"},
        "claim": {
            "type": "string",
            "default": "dapo-data",
            "title": "Claim",
            "description": "The persistent volume claim that holds the data root.",
        },
        "shared_memory": {
            "type": "string",
            "default": "16Gi",
            "title": "Shared memory",
            "description": "For NCCL and vLLM's workers; a pod's own is 64 MiB.",
        },
    }
    template["variables"]["properties"]["backoff_limit"]["default"] = 0
    pod = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    pod["volumes"] = [
        {"name": "data", "persistentVolumeClaim": {"claimName": "{{ claim }}"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "{{ shared_memory }}"}},
    ]
    pod["containers"][0] |= {
        "resources": {"limits": {"nvidia.com/gpu": "{{ gpus }}"}},
        "volumeMounts": [
            {"name": "data", "mountPath": DATA},
            {"name": "shm", "mountPath": SHARED_MEMORY},
        ],
    }
    return template


def _alive(template: Template, environment: dict[str, str]) -> Template:
    known = template["variables"]["properties"]["env"]
    known["default"] = {
        **(known.get("default") or {}),
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
        **environment,
    }
    return template


TEMPLATES = {"process": process, "kubernetes": kubernetes}
