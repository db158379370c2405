"""The base of every stage's `Config`, and the machine's knobs, which identify no artifact."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """Flat, frozen and typo-proof: an unknown key or a wrong type fails before anything wakes."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Machine(Settings):
    """How to execute, not what to compute: two machines may differ here and share artifacts."""

    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = Field(
        1, ge=1
    )  # of torch; vLLM on CPU heeds OMP_NUM_THREADS, else takes all cores
    micro_batch_tokens: int = Field(16384, ge=1)  # tokens in one forward pass, padding included
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
    # vLLM
    tensor_parallel_size: int = Field(1, ge=1)
    gpu_memory_utilization: float = Field(0.05, gt=0, le=1)
    kv_cache_gib: int = Field(1, ge=1)  # on CPU
    max_num_seqs: int = Field(512, ge=1)
    enforce_eager: bool = True
    # on one GPU: the engine ends before an update starts, and the trainer before a rollout
    one_process_at_a_time: bool = False
    # a stage in a worker process is killed, with its children, after so long
    stage_timeout_s: float | None = Field(None, gt=0)
