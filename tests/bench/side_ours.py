"""Our side: `Trainer.gradient` of one mini-batch, as `stages.update` calls it."""

from pathlib import Path
from typing import Any

import torch
from sides import Gradient, Prepare, Sample, serve

from stages.responses import Response
from stages.settings import Machine
from stages.trainer import Config, Trainer


def load(
    policy: Path, samples: list[Sample], options: dict[str, Any]
) -> tuple[torch.nn.Module, Prepare]:
    """`machine` and `config`: settings that differ from their defaults."""
    config = Config(mini_batch=10**9, **options.get("config", {}))
    trainer = Trainer.of(policy, config=config, machine=Machine(**options.get("machine", {})))

    def prepare(batch: list[Sample]) -> Gradient:
        responses = responses_of(batch)
        trainer.weigh_importance(responses)
        (mini_batch,) = trainer.mini_batches(responses)

        def gradient() -> dict[str, float]:
            trainer.token_records.clear()
            row = trainer.gradient(mini_batch)
            return {"loss": row["loss"], "grad_norm": row["grad_norm"]}

        return gradient

    return trainer.model, prepare


def responses_of(batch: list[Sample]) -> list[Response]:
    """The samples as the trainer sees them, old log-probs included."""
    responses = []
    for i, sample in enumerate(batch):
        old = torch.tensor(sample["old_logprobs"])
        response = Response(
            response_id=f"r{i:06d}",
            group=sample["group"],
            prompt_ids=torch.tensor(sample["prompt_ids"]),
            response_ids=torch.tensor(sample["response_ids"]),
            sampler_logprobs=old,
            advantage=sample["advantage"],
            temperature=1.0,
            fresh=True,
        )
        response.old_logprobs = old
        responses.append(response)
    return responses


if __name__ == "__main__":
    serve(load)
