"""TRL's side: GRPOTrainer's loss and backward on a mini-batch padded and split as it does it.

Of its buffer of generations TRL makes one rectangle, prompts padded on the left and completions on
the right to the longest of all, and cuts it into parts of `per_device_train_batch_size` rows
(`_generate_and_score_completions`, `split_tensor_dict`). The padding is not timed.

TRL computes log-probs in tiles without being asked. On a CPU its head sees every position, prompts
and pads too, and its Triton and Liger kernels (`use_liger_kernel`, `use_kernels`) do not run: what
is left to save memory is `gradient_checkpointing`, its default, and fewer rows at once.
"""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sides import Gradient, Prepare, Sample, serve
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import pad, split_tensor_dict


def load(
    policy: Path, samples: list[Sample], options: dict[str, Any]
) -> tuple[torch.nn.Module, Prepare]:
    """`rows`: of one forward pass; `gradient_checkpointing`, TRL's default, may be left out."""
    rows = options.get("rows", len(samples))
    checkpointing = options.get("gradient_checkpointing", False)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    trainer = GRPOTrainer(
        model=str(policy),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * len(samples)}),
        processing_class=tokenizer,
        args=GRPOConfig(
            output_dir=str(policy.parent / "trl"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=checkpointing,
            report_to="none",
            loss_type="dapo",
            epsilon=0.2,
            epsilon_high=0.28,
            beta=0.0,
            temperature=1.0,
            num_generations=2,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=len(samples) // rows,
        ),
    )
    model = trainer.model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)

    def prepare(batch: list[Sample]) -> Gradient:
        inputs = rectangle(batch, tokenizer.pad_token_id)
        parts = split_tensor_dict(inputs, max(1, len(batch) // rows))
        trainer.current_gradient_accumulation_steps = len(parts)
        trainer.args.steps_per_generation = len(parts)

        def gradient() -> dict[str, float]:
            model.zero_grad(set_to_none=True)
            total = torch.zeros(())
            for part in parts:
                loss = trainer.compute_loss(model, part)
                trainer.accelerator.backward(loss)
                total += loss.detach()
            norm = trainer.accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
            return {"loss": total.item(), "grad_norm": norm.item()}

        return gradient

    return model, prepare


def rectangle(batch: list[Sample], pad_id: int) -> dict[str, torch.Tensor]:
    """The inputs of `compute_loss`, named as TRL does."""

    def padded(values: list[torch.Tensor], value: float, side: str) -> torch.Tensor:
        return pad(values, padding_value=value, padding_side=side)

    prompts = [torch.tensor(s["prompt_ids"]) for s in batch]
    completions = [torch.tensor(s["response_ids"]) for s in batch]
    old = [torch.tensor(s["old_logprobs"]) for s in batch]
    return {
        "prompt_ids": padded(prompts, pad_id, "left"),
        "prompt_mask": padded([torch.ones_like(p) for p in prompts], 0, "left"),
        "completion_ids": padded(completions, pad_id, "right"),
        "completion_mask": padded([torch.ones_like(c) for c in completions], 0, "right"),
        "old_per_token_logps": padded(old, 0.0, "right"),
        "advantages": torch.tensor([s["advantage"] for s in batch]),
        "num_items_in_batch": torch.tensor(sum(map(len, completions))),
    }


if __name__ == "__main__":
    serve(load)
