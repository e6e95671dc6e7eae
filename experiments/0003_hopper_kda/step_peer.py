"""The same step of flash-linear-attention's own KDA model, in torch.

python -m experiments.0003_hopper_kda.step_peer MODE --out rows.jsonl

MODE: "bf16" (parameters and moments bfloat16 too) or "autocast" (both float32,
as ours are).
"""
import argparse
import json
import time

ROWS, TIME, WARM, TIMED = 4, 8_192, 3, 8


def run(mode):
  import torch
  from fla.models.kda import KDAConfig, KDAForCausalLM
  torch.manual_seed(0)
  model = KDAForCausalLM(KDAConfig(
      hidden_size=1_024, num_heads=8, head_dim=128, num_hidden_layers=24,
      vocab_size=32_000, safe_gate=True, lower_bound=-5.0,
      max_position_embeddings=TIME)).cuda()
  if mode == "bf16":
    model = model.to(torch.bfloat16)
    for name, leaf in model.named_parameters():
      if "A_log" in name or "dt_bias" in name:
        leaf.data = leaf.data.float()
  optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
  tokens = torch.randint(0, 32_000, (ROWS, TIME), device="cuda")
  seconds = []
  torch.cuda.reset_peak_memory_stats()
  for _ in range(WARM + TIMED):
    began = time.perf_counter()
    with torch.autocast("cuda", torch.bfloat16, enabled=mode == "autocast"):
      loss = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    seconds.append(time.perf_counter() - began)
  median = sorted(seconds[WARM:])[TIMED // 2]
  count = sum(leaf.numel() for leaf in model.parameters())
  return {"parameters": count, "tokens_per_second": ROWS * TIME / median,
          "step_ms": 1e3 * median,
          "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
          "loss": float(loss)}, torch.cuda.get_device_name()


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("mode", choices=("bf16", "autocast"))
  parser.add_argument("--commit", required=True)
  parser.add_argument("--out", required=True)
  args = parser.parse_args()
  metrics, device = run(args.mode)
  row = {"name": f"flash-linear-attention, {args.mode}",
         "config": {"rows": ROWS, "context": TIME}, "commit": args.commit,
         "device": device, "seed": 0, "wall_seconds": None,
         "metrics": {name: float(f"{x:.5g}") for name, x in metrics.items()}}
  print(json.dumps(row), flush=True)
  with open(args.out, "a", encoding="utf-8") as file:
    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
  main()
