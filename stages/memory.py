"""How much memory a model takes, trainer and engine, in bytes per GPU. Only arithmetic.

What a part is made of stands in its docstring. Parameters and KV bytes are exact; activations are
what autograd saves, counted tensor by tensor. The trainer's sum is at most 2 % below and a third
above the peak of a small model on a CPU (tests/stages/test_memory.py); with adapters further above.
FSDP2's working copies are reasoned, not measured; OVERHEAD, GRAPHS and ASLEEP are estimates. None
of it was measured on a GPU yet.

Legend: h hidden size, I width of the MLP, q and k widths of queries and keys (heads · head size),
V vocabulary, L layers, c bytes of a number in matrix products (bfloat16: 2), r of one in the
residual stream.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from stages.errors import InputError
from stages.settings import Machine

GIB = 2**30
FLOAT32 = 4
TILE, KEPT = 2**27, 2**26  # logits at once on a GPU and kept for backward, as in stages.logprobs
BLOCK = 16  # tokens in a block of vLLM's KV cache
VOCABULARY_PADDING = 64  # of vLLM, so that it can be split
BATCHED_TOKENS = 8192  # in one pass of the engine, if the context is not longer
OVERHEAD = 2 * GIB  # CUDA context, NCCL's buffers, gaps between tensors; in each process
GRAPHS = GIB  # CUDA graphs, where the engine is not eager
ASLEEP = 2 * GIB  # what a sleeping engine keeps: context, graphs, NCCL's buffers
QK_NORM = ("qwen3",)
KNOWN_TYPES = ("llama", "qwen2", "qwen3")

Parts = dict[str, int]  # bytes by what they are of


@dataclass(frozen=True)
class Architecture:
    """A dense decoder: what its config.json says, as far as memory depends on it."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    positions: int  # the longest sequence that it is made for, tokens
    tied: bool  # embedding and head are one matrix
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read a Hugging Face config.json. Raises `InputError` for what is missing or unknown."""
        kind = config.get("model_type")
        if kind not in KNOWN_TYPES:
            raise InputError(
                f"config.json: model_type is {kind!r}, and the memory of {', '.join(KNOWN_TYPES)} "
                "is known; plan with a model of one of these that is as large"
            )

        def number(name: str, default: int | None = None) -> int:
            value = default if config.get(name) is None else config[name]
            if not isinstance(value, int) or value < 1:
                raise InputError(f"config.json: {name} should be a whole number, found {value!r}")
            return value

        heads, hidden = number("num_attention_heads"), number("hidden_size")
        bias = bool(config.get("attention_bias")) and kind != "qwen2"
        return cls(
            model_type=str(kind),
            hidden=hidden,
            layers=number("num_hidden_layers"),
            heads=heads,
            kv_heads=number("num_key_value_heads", heads if kind == "llama" else None),
            head_dim=number("head_dim", 128 if kind == "qwen3" else hidden // heads),
            intermediate=number("intermediate_size"),
            vocabulary=number("vocab_size"),
            positions=number("max_position_embeddings"),
            tied=bool(config.get("tie_word_embeddings")),
            qkv_bias=bias or kind == "qwen2",
            output_bias=bias,
            mlp_bias=bool(config.get("mlp_bias")) and kind == "llama",
        )

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised, head by head."""
        return self.model_type in QK_NORM

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def k(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of a layer's matrices: q, k, v, o, gate, up, down."""
        h, wide = self.hidden, self.intermediate
        attention = [(h, self.q), (h, self.k), (h, self.k), (self.q, h)]
        return [*attention, (h, wide), (h, wide), (wide, h)]

    @property
    def matrix(self) -> int:
        """Parameters of the embedding, or of the head: V·h."""
        return self.vocabulary * self.hidden

    @property
    def layer(self) -> int:
        """Parameters of one layer: Σ inputs·outputs, biases, two norms h; of qwen3 two more."""
        biases = self.qkv_bias * (self.q + 2 * self.k) + self.output_bias * self.hidden
        biases += self.mlp_bias * (2 * self.intermediate + self.hidden)
        norms = 2 * self.hidden + self.qk_norm * 2 * self.head_dim
        return sum(a * b for a, b in self.linears) + biases + norms

    @property
    def outside(self) -> int:
        """Parameters outside the layers: embedding, head if it is another matrix, last norm h."""
        return self.matrix * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.outside

    def adapters(self, rank: int) -> int:
        """Parameters of adapters of that rank on all linear layers but the head, of one layer."""
        return sum(rank * (inputs + outputs) for inputs, outputs in self.linears)


# --- the trainer -------------------------------------------------------------------------------


def trainer(
    model: Architecture,
    machine: Machine,
    *,
    tokens: int,
    lora_rank: int | None = None,
    reference: bool = False,
) -> Parts:
    """What one rank holds at its fullest, while a micro-batch of `tokens` is trained on.

    Args:
        reference: whether there is a KL term, and so the run's first policy, frozen, beside it.
    """
    if machine.attention == "eager":
        raise InputError(
            "machine.attention=eager keeps scores of every pair of tokens, which no plan is made "
            "for: use sdpa or flash_attention_2"
        )
    return {
        **_states(model, machine, lora_rank=lora_rank, reference=reference),
        "working copies": working_copies(model, machine, lora_rank=lora_rank),
        "activations": activations(model, machine, tokens=tokens, lora_rank=lora_rank),
        "largest step": max(
            head(model, machine, tokens=tokens, frozen=lora_rank is not None),
            layer_step(model, machine, tokens=tokens, lora_rank=lora_rank),
        ),
        "overhead": OVERHEAD if machine.device == "cuda" else 0,
    }


def _states(
    model: Architecture, machine: Machine, *, lora_rank: int | None, reference: bool
) -> Parts:
    """float32, each rank its part: weights 4 bytes, gradients of what is trained 4, Adam's two
    moments 8 (stages.trainer, stages.ranks: master weights are float32 whatever machine.dtype).
    """
    ranks = _ranks(machine)
    adapters = model.layers * model.adapters(lora_rank) if lora_rank else 0
    trained = trainable(model, lora_rank=lora_rank)
    return {
        "weights": _ceil(FLOAT32 * (model.parameters + adapters), ranks),
        **({"reference": _ceil(FLOAT32 * model.parameters, ranks)} if reference else {}),
        "gradients": _ceil(FLOAT32 * trained, ranks),
        "optimizer": _ceil(2 * FLOAT32 * trained, ranks),
    }


def trainable(model: Architecture, *, lora_rank: int | None) -> int:
    """How many parameters are trained: all, or the adapters'."""
    return model.layers * model.adapters(lora_rank) if lora_rank else model.parameters


def working_copies(model: Architecture, machine: Machine, *, lora_rank: int | None) -> int:
    """Weights as the matrix products want them, and gradients before they are split.

    One rank, bfloat16: autocast's copies, 2 bytes of every layer, kept to the end of the forward
    pass; of frozen weights they are kept in the graph, which checkpointing cuts to one layer.
    Several ranks, FSDP2: whole weights of c bytes, of what is outside the layers and of three
    layers (in use, fetched ahead, the gather's buffer); and of what is trained the gradients, c
    bytes, and float32 ones on their way to the ranks, of one layer and of what is outside.
    """
    c = _width(machine)
    if _ranks(machine) == 1:
        if c == FLOAT32:
            return 0
        kept = 1 if lora_rank and machine.gradient_checkpointing else model.layers
        return c * kept * (model.layer + (model.adapters(lora_rank) if lora_rank else 0))
    whole = c * (model.outside + 3 * model.layer)
    moving = model.adapters(lora_rank) if lora_rank else model.outside + model.layer
    return whole + (c + FLOAT32) * moving


def activations(
    model: Architecture, machine: Machine, *, tokens: int, lora_rank: int | None = None
) -> int:
    """What the forward pass of `tokens` keeps for the backward pass.

    L · a layer's; with gradient checkpointing L · r·h, the layers' inputs. The last norm:
    (4 + r + c)·h. `packed` with sdpa adds a mask of a byte for each pair of tokens.

    Adapters are counted on top, though frozen matrices save less: an upper bound for them.
    """
    h, c, r = model.hidden, _width(machine), _residual(machine)
    checkpointed = machine.gradient_checkpointing
    one = r * h if checkpointed else _layer(model, machine, lora_rank=lora_rank)
    mask = tokens * tokens if machine.packed and machine.attention == "sdpa" else 0
    return tokens * (model.layers * one + (FLOAT32 + r + c) * h) + mask


def layer_step(
    model: Architecture, machine: Machine, *, tokens: int, lora_rank: int | None = None
) -> int:
    """The backward pass of one layer: gradients of the MLP's three wide tensors, c·3·I, and three
    of the residual stream, 4·3·h; with gradient checkpointing also what the layer saves.
    """
    step = 3 * _width(machine) * model.intermediate + 3 * FLOAT32 * model.hidden
    again = _layer(model, machine, lora_rank=lora_rank) if machine.gradient_checkpointing else 0
    return tokens * (step + again)


def _layer(model: Architecture, machine: Machine, *, lora_rank: int | None) -> int:
    """Bytes that one layer saves for each token, as transformers' llama, qwen2 and qwen3 do:

    twice a norm: its input in float32, its output: 2·(4 + r)·h, and 4 for each factor
    inputs of q, k, v, o, gate, up, down: autocast copies h for each of them, c·5·h, else c·2·h
    attention: q, k, v and the output: c·(2·q + 2·k), and 4 per head
    the MLP: gate, up, silu(gate) and their product: c·4·I
    qwen3's norms of q and k: (4 + c)·(q + k), and 4 per head
    adapters: c·rank for each of 7 matrices
    """
    h, c, r = model.hidden, _width(machine), _residual(machine)
    autocast = c != FLOAT32 and _ranks(machine) == 1
    saved = 2 * ((FLOAT32 + r) * h + FLOAT32) + c * h * (5 if autocast else 2)
    saved += c * 2 * (model.q + model.k) + FLOAT32 * model.heads + c * 4 * model.intermediate
    if model.qk_norm:
        saved += (FLOAT32 + c) * (model.q + model.k) + FLOAT32 * (model.heads + model.kv_heads)
    return saved + c * len(model.linears) * (lora_rank or 0)


def head(model: Architecture, machine: Machine, *, tokens: int, frozen: bool) -> int:
    """What stages.logprobs takes for `tokens`, tile by tile:

    logits kept from forward to backward c·min(2²⁶, tokens·V), one tile of 2²⁷ at 2·c + 8 bytes,
    hidden states and their gradient tokens·(3·4 + 2·c)·h, and, unless the head is frozen, the
    gradient of its weight: 4·V·h.
    """
    c, logits = _width(machine), tokens * model.vocabulary
    rows = tokens * (3 * FLOAT32 + 2 * c) * model.hidden
    tile = (2 * c + 2 * FLOAT32) * min(TILE, logits)
    return c * min(KEPT, logits) + tile + rows + (0 if frozen else FLOAT32 * model.matrix)


def _ranks(machine: Machine) -> int:
    return machine.nproc * machine.nnodes


def _width(machine: Machine) -> int:
    """c: bytes of a number in matrix products."""
    return 2 if machine.dtype == "bfloat16" else FLOAT32


def _residual(machine: Machine) -> int:
    """r: FSDP2 casts the embedding, and so what flows from it; autocast leaves it in float32."""
    return FLOAT32 if _ranks(machine) == 1 else _width(machine)


def _ceil(amount: int, parts: int) -> int:
    return math.ceil(amount / parts)


# --- the engine --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """vLLM on one of its GPUs: what it takes before the KV cache, and what is left for that."""

    parts: Parts
    kv_bytes: int  # for the KV cache; below 0: so much is lacking
    kv_bytes_per_token: int

    @property
    def kv_tokens(self) -> int:
        """How many tokens the KV cache holds, of all sequences together, in whole blocks."""
        return max(0, self.kv_bytes // (BLOCK * self.kv_bytes_per_token)) * BLOCK

    def sequences(self, length: int) -> int:
        """How many sequences of `length` tokens the KV cache holds at once."""
        return self.kv_tokens // (math.ceil(length / BLOCK) * BLOCK)


def engine(model: Architecture, machine: Machine, *, context: int, gpu_bytes: int) -> Engine:
    """vLLM's memory on the fullest of its GPUs, for sequences of at most `context` tokens.

    The KV cache gets what gpu_memory_utilization · `gpu_bytes` leaves (vLLM, v1/worker/
    gpu_worker.py, determine_available_memory).
    """
    parts = {
        "weights": engine_weights(model, machine),
        "activations": engine_activations(model, machine, context=context),
        "overhead": OVERHEAD + (0 if machine.enforce_eager else GRAPHS),
    }
    allowed = int(machine.gpu_memory_utilization * gpu_bytes)
    return Engine(parts, allowed - sum(parts.values()), kv_bytes_per_token(model, machine))


def engine_weights(model: Architecture, machine: Machine) -> int:
    """c bytes of each weight, matrices split over the tensor-parallel GPUs, layers over the groups.

    Norms are whole on each; k and v too where there are fewer of their heads than GPUs; the
    vocabulary is padded to a multiple of 64. The fullest group has one layer more than others, and
    embedding or head; alone, both.
    """
    tp, pp, h = machine.tensor_parallel_size, machine.pipeline_parallel_size, model.hidden
    kv = max(1, model.kv_heads // tp) * model.head_dim
    split = sum(a * b for a, b in model.linears) - 2 * h * model.k
    norms = 2 * h + model.qk_norm * 2 * model.head_dim
    biases = model.qkv_bias * (model.q // tp + 2 * kv) + model.output_bias * h
    biases += model.mlp_bias * (2 * model.intermediate // tp + h)
    layer = _ceil(split, tp) + 2 * h * kv + norms + biases
    matrix = _ceil(model.vocabulary, VOCABULARY_PADDING) * VOCABULARY_PADDING * h // tp
    matrices = 2 if pp == 1 and not model.tied else 1
    return _width(machine) * (_ceil(model.layers, pp) * layer + matrices * matrix + h)


def kv_bytes_per_token(model: Architecture, machine: Machine) -> int:
    """2 · layers · heads of k · head size · c, of the layers and heads on one GPU; at least one."""
    layers = _ceil(model.layers, machine.pipeline_parallel_size)
    heads = max(1, model.kv_heads // machine.tensor_parallel_size)
    return 2 * layers * heads * model.head_dim * _width(machine)


def engine_activations(model: Architecture, machine: Machine, *, context: int) -> int:
    """Of the largest pass, max(8192, context) tokens, one layer at a time: the residual stream
    twice and a norm's output, c·3·h, and the MLP's gate, up and product, c·3·I split; and logits of
    the sequences that are sampled, c and three float32 copies: log-probs are of what was sampled
    from.
    """
    c, tp = _width(machine), machine.tensor_parallel_size
    passing = c * (3 * model.hidden + _ceil(3 * model.intermediate, tp))
    logits = machine.max_num_seqs * model.vocabulary * (c + 3 * FLOAT32)
    return max(BATCHED_TOKENS, context) * passing + logits
