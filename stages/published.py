"""Published architectures: the config.json of well-known models, to plan without a copy.

Source: huggingface.co/Qwen/<name>/blob/main/config.json, written down without fetching it: tests
hold it against the parameter count of each card. A directory that exists is read instead.
"""

from typing import Any

_QWEN2_5: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
_SMALL = {"tie_word_embeddings": True, "vocab_size": 151936}
_SHORT = {**_SMALL, "max_position_embeddings": 32768}
_MATH = {"max_position_embeddings": 4096, "rope_theta": 1e4}


def _shaped(
    family: dict[str, Any], hidden: int, layers: int, heads: int, wide: int, **rest: Any
) -> dict[str, Any]:
    return {
        **family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": wide,
        **rest,
    }


_1_5B = _shaped(_QWEN2_5, 1536, 28, 12, 8960, num_key_value_heads=2, **_SMALL)
_7B = _shaped(_QWEN2_5, 3584, 28, 28, 18944, num_key_value_heads=4)
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": _shaped(_QWEN2_5, 896, 24, 14, 4864, num_key_value_heads=2, **_SHORT),
    "Qwen2.5-1.5B": _1_5B,
    "Qwen2.5-3B": _shaped(_QWEN2_5, 2048, 36, 16, 11008, num_key_value_heads=2, **_SHORT),
    "Qwen2.5-7B": _7B,
    "Qwen2.5-14B": _shaped(_QWEN2_5, 5120, 48, 40, 13824, num_key_value_heads=8),
    "Qwen2.5-32B": _shaped(_QWEN2_5, 5120, 64, 40, 27648, num_key_value_heads=8),
    "Qwen2.5-72B": _shaped(_QWEN2_5, 8192, 80, 64, 29568, num_key_value_heads=8),
    "Qwen2.5-Math-1.5B": _1_5B | _MATH,
    "Qwen2.5-Math-7B": _7B | _MATH,
    "Qwen3-0.6B": _shaped(_QWEN3, 1024, 28, 16, 3072, tie_word_embeddings=True),
    "Qwen3-1.7B": _shaped(_QWEN3, 2048, 28, 16, 6144, tie_word_embeddings=True),
    "Qwen3-4B": _shaped(_QWEN3, 2560, 36, 32, 9728, tie_word_embeddings=True),
    "Qwen3-8B": _shaped(_QWEN3, 4096, 36, 32, 12288),
    "Qwen3-14B": _shaped(_QWEN3, 5120, 40, 40, 17408),
    "Qwen3-32B": _shaped(_QWEN3, 5120, 64, 64, 25600),
}
