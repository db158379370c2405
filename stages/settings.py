"""The base of every stage's `Config`, and the machine's knobs, which identify no artifact."""

import re
from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    field_validator,
    model_validator,
)


class Settings(BaseModel):
    """Flat, frozen and typo-proof: an unknown key or a wrong type fails before anything wakes."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def without_credentials(address: object, variable: str) -> object:
    """`address`. Raises `ValueError`, without repeating it, if it holds a user or a password.

    Settings are saved beside the data and shown in user interfaces, so secrets are none.
    """
    if isinstance(address, str) and re.search(r"://[^/]*@", address):
        raise ValueError(
            "the address holds a user or a password (before the @), which would be saved with the "
            f"run; take it out, and put what is secret into the environment variable {variable}"
        )
    return address


class Machine(Settings):
    """How to execute, not what to compute: two machines may differ here and share artifacts."""

    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = Field(
        1, ge=1
    )  # of torch; vLLM on CPU heeds OMP_NUM_THREADS, else takes all cores
    micro_batch_tokens: int = Field(4096, ge=1)  # tokens in one forward pass, padding included
    gradient_checkpointing: bool = False
    attention: str = "sdpa"  # of the trainer, by transformers' names, such as flash_attention_2
    packed: bool = False  # sequences end to end without padding; worth it with varlen attention
    compile: bool = False  # the trainer's model, by torch.compile
    deterministic: bool = True  # on CUDA: the same bits each time, where torch has such kernels
    # the trainer's processes (torchrun): FSDP2 over nproc × nnodes ranks
    nproc: int = Field(1, ge=1)  # on this node, one per GPU
    nnodes: int = Field(1, ge=1)
    rdzv_endpoint: str | None = None  # HOST:PORT where nodes meet; none: this node alone
    rdzv_id: str = "dapo"
    # the engine
    tensor_parallel_size: int = Field(1, ge=1)  # GPUs that share each of vLLM's layers
    pipeline_parallel_size: int = Field(1, ge=1)  # groups of them that share the layers out
    gpu_memory_utilization: float = Field(0.05, gt=0, le=1)
    kv_cache_gib: int = Field(1, ge=1)  # on CPU
    max_num_seqs: int = Field(512, ge=1)  # sequences that are sampled at once
    enforce_eager: bool = True
    # engines that share a round's groups, in a process each; on CUDA each with GPUs of its own
    engines: int = Field(1, ge=1)
    task_runner: Literal["threads", "ray"] = "threads"  # where they run: here, or on a Ray cluster
    # of rollout=endpoint: a server's address, without /v1; its key is no setting, see the engine
    endpoint: str | None = Field(None, pattern=r"^https?://[^/@]+(/[^@]*)?$")
    checkers: int | None = Field(None, ge=1)  # processes that judge responses; None: one per core
    # |engine - trainer| log-prob, in nats, that a token of a policy's probe may have
    max_probe_gap: float = Field(1e-3, gt=0)
    # what the engine does while the trainer works. Unless both stay, only one of them has memory on
    # the device at a time: the trainer's process ends before the engine works
    engine_between: Literal["stay", "sleep", "exit"] = "stay"
    # a stage is killed, with its children, after so long; by its name, if that differs
    stage_timeout_s: float | None = Field(None, gt=0)
    stage_timeouts_s: dict[str, PositiveFloat] = {}
    # more tries at a stage that ended by what may pass: a process that died, memory, storage
    retries: int = Field(1, ge=0)

    def timeout_s(self, stage: str) -> float | None:
        """How long `stage` may take, in seconds; None: for ever."""
        return self.stage_timeouts_s.get(stage, self.stage_timeout_s)

    @field_validator("endpoint", mode="before")
    @classmethod
    def _without_password(cls, endpoint: object) -> object:
        return without_credentials(endpoint, "DAPO_ENDPOINT_KEY")

    @model_validator(mode="after")
    def _sleeps_where_it_can(self) -> "Machine":
        if self.engine_between == "sleep" and self.device == "cpu":
            raise ValueError(
                "engine_between=sleep: vLLM's sleep mode gives GPU memory back, and there is none "
                "on device=cpu; use stay, or exit to free main memory"
            )
        if self.engine_between == "exit" and self.task_runner == "ray":
            raise ValueError("engine_between=exit: Ray's workers end when Ray does; stay or sleep")
        return self
