"""One GRPO step in torch on samples of a Tokengrove server: claim, loss, new weights, acknowledge.

The trainer needs the folder of the weights that the server runs. With the samples of examples/calculator_agent.py:

    tokengrove serve --model MODEL_FOLDER
    python examples/calculator_agent.py --rollouts 8
    python examples/grpo_step.py --model MODEL_FOLDER --out NEW_FOLDER
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM

from tokengrove import Client, Export

CLIP = 0.2


def per_token(export: Export, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Advantage x weight, temperature and whether to train, each [B, L]. Turns whose logprobs the model alone does not
    give, because of penalties for example, are left out; those under a grammar are context by default."""
    gain, heat, train = torch.zeros(shape), torch.ones(shape), torch.zeros(shape, dtype=torch.bool)
    for row, sample in enumerate(export.samples):
        for turn in sample.turns:
            if turn["recomputable"] is None and turn["span"] is not None:
                span = slice(*turn["span"])
                gain[row, span] = (sample.advantage or 0.0) * sample.weight
                heat[row, span] = turn["sampling"].get("temperature", 1.0) or 1.0
                train[row, span] = torch.from_numpy(sample.loss_mask[span] == 1)
    return gain, heat, train


def grpo_loss(model: torch.nn.Module, export: Export, entropy: float = 0.0) -> tuple[torch.Tensor, float]:
    """The clipped objective (Schulman et al. 2017, equation 7) with group-relative advantages (Shao et al. 2024), and
    how far the farthest importance ratio is from 1. `entropy`: the weight of a bonus for it."""
    batch = export.to_torch()
    gain, heat, train = (values[:, 1:] for values in per_token(export, batch["input_ids"].shape))
    ids = batch["input_ids"].long()
    logits = model(input_ids=ids, attention_mask=batch["attention_mask"]).logits[:, :-1]
    logprobs = (logits[train] / heat[train].unsqueeze(-1)).log_softmax(-1)
    sampled = logprobs.gather(-1, ids[:, 1:][train].unsqueeze(-1)).squeeze(-1)
    ratio = (sampled - batch["logprobs"][:, 1:][train]).exp()
    surrogate = torch.minimum(ratio * gain[train], ratio.clamp(1 - CLIP, 1 + CLIP) * gain[train])
    bonus = -(logprobs.exp() * logprobs).sum(-1).mean() if entropy else 0.0
    return -surrogate.mean() - entropy * bonus, float((ratio.detach() - 1).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--model", required=True, help="folder of the weights that the server runs")
    parser.add_argument("--out", required=True, help="folder for the new weights; the server must be able to read it")
    parser.add_argument("--group", default="calculator-0", help="claim sessions of this group only")
    parser.add_argument("--sessions", type=int, default=64, help="most sessions to claim")
    asked = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype="float32", local_files_only=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with Client(asked.url) as client:
        how = {"layout": "concat", "advantages": "grpo"}
        claim = client.claim(
            filter={"group_id": asked.group}, limit=asked.sessions, wait_s=60, consumer="grpo-step", export=how
        )
        if claim.export is None or not claim.export.samples:
            parser.exit(1, f"no session of group {asked.group} has ended within 60 s\n")
        loss, off = grpo_loss(model, claim.export)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.save_pretrained(asked.out)
        version = client.update_weights(asked.out)
        client.acknowledge(claim)
    print(f"{len(claim.export.samples)} samples, loss {loss:.6f}, ratio 1 +- {off:.0e}, now weight version {version}")


if __name__ == "__main__":
    main()
