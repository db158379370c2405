"""The trainer's log-probs of stored tokens: float32 log-softmax at the recorded temperature.

Legend: B responses, S tokens of prompt and response, T response tokens, N = Σ T, V vocabulary.
"""

from typing import TYPE_CHECKING, Any

from stages.responses import Response

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

LOGITS_AT_ONCE = 2**26  # float32 logits that may exist together: 256 MiB


def token_logprobs(
    model: "PreTrainedModel", responses: list[Response], *, bfloat16: bool
) -> "tuple[Tensor, Tensor]":
    """Log-prob of each response token and entropy of its distribution, [N], response by response.

    log softmax(logits / recorded temperature) in float32, over the full vocabulary; the head sees
    response positions only, in chunks, so that float32 [B, S, V] never exists. Pads (id 0, as good
    as any) stand on the right, where a causal model's tokens never look: no attention mask.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from torch.utils.checkpoint import checkpoint

    whole = [torch.cat([r.prompt_ids, r.response_ids]) for r in responses]
    ids_BS = pad_sequence(whole, batch_first=True).long()
    target = torch.arange(1, ids_BS.shape[1])  # position s predicts token s + 1
    start_B1 = torch.tensor([[len(r.prompt_ids)] for r in responses])
    end_B1 = torch.tensor([[len(r)] for r in responses])
    predicts_BS = ((target >= start_B1) & (target < end_B1)).to(model.device)
    temperature_N = torch.cat([torch.full(r.response_ids.shape, r.temperature) for r in responses])

    ids_BS = ids_BS.to(model.device)
    head: Any = model.get_output_embeddings()
    with torch.autocast(model.device.type, torch.bfloat16, enabled=bfloat16):
        hidden = model.base_model(input_ids=ids_BS, use_cache=False).last_hidden_state[:, :-1]
        inputs = (
            hidden[predicts_BS],
            ids_BS[:, 1:][predicts_BS],
            temperature_N.to(model.device),
        )
        size = max(1, LOGITS_AT_ONCE // head.weight.shape[0])
        chunks = list(zip(*(torch.split(tensor, size) for tensor in inputs), strict=True))
        if len(chunks) == 1:
            return score(head, *chunks[0])
        scored = [checkpoint(score, head, *chunk, use_reentrant=False) for chunk in chunks]
    logprobs, entropies = zip(*scored, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def score(
    head: Any, hidden: "Tensor", targets: "Tensor", temperatures: "Tensor"
) -> "tuple[Tensor, Tensor]":
    """For hidden states [N, H]: log-probs of `targets` [N], and entropies [N] without gradient."""
    logprobs = (head(hidden).float() / temperatures.unsqueeze(-1)).log_softmax(-1)
    fixed = logprobs.detach()
    entropies = -(fixed.exp() * fixed).sum(-1)
    return logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropies


def padded(values: "Tensor | list[Tensor]", mask_BT: "Tensor") -> "Tensor":
    """[B, T] from what stands at the mask, row by row: one [N] tensor, or one per response."""
    import torch

    flat = torch.cat(values).to(mask_BT.device) if isinstance(values, list) else values
    return flat.new_zeros(mask_BT.shape).masked_scatter(mask_BT, flat)
