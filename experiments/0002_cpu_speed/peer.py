"""Tokens/s of one optimiser step of transformers' kimi_linear on this CPU.

Needs torch and transformers 5.23 in an environment of its own:
python experiments/0002_cpu_speed/peer.py BATCH CONTEXT [--steps N]
    [--dtype bfloat16] [--save FOLDER]
"""
import argparse
import json
import pathlib
import time

import numpy as np
import torch
from transformers.models import kimi_linear

SIZES = dict(
    vocab_size=272, hidden_size=256, intermediate_size=768,
    moe_intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=4, kv_lora_rank=64, q_lora_rank=None,
    qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32,
    num_local_experts=8, num_experts_per_token=2, n_shared_experts=1,
    linear_head_dim=32, linear_num_heads=4, max_position_embeddings=65_536,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
    layer_types=["linear_attention"] * 3 + ["full_attention"])


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("batch", type=int)
  parser.add_argument("context", type=int)
  parser.add_argument("--steps", type=int, default=6)
  parser.add_argument("--dtype", default="float32",
                      help="of matmuls; bfloat16 by torch.autocast")
  parser.add_argument("--save", default="", help="folder for the checkpoint "
                      "and its logits; nothing is timed then")
  args = parser.parse_args()
  torch.manual_seed(0)
  model = kimi_linear.KimiLinearForCausalLM(
      kimi_linear.KimiLinearConfig(**SIZES)).float()
  tokens = torch.randint(3, 256, (args.batch, args.context))
  if args.save:
    model.save_pretrained(args.save)
    with torch.no_grad():
      logits = model(tokens, use_cache=False).logits
    np.savez(pathlib.Path(args.save) / "logits.npz", tokens=tokens.numpy(),
             logits=logits.numpy())
    return
  optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
  half = torch.autocast("cpu", torch.bfloat16, args.dtype == "bfloat16")
  times = []
  for _ in range(args.steps):
    began = time.perf_counter()
    with half:
      loss = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.perf_counter() - began)
  seconds = sorted(times[1:])[len(times[1:]) // 2]
  print(json.dumps({
      "batch": args.batch, "context": args.context, "dtype": args.dtype,
      "params": sum(x.numel() for x in model.parameters()),
      "step_seconds": round(seconds, 4),
      "tokens_per_second": round(args.batch * args.context / seconds, 1)}))


if __name__ == "__main__":
  main()
