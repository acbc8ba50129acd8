"""Prefill and decode speed of transformers by depth (bf16, random weights): a JSON line per depth.

    python transformers_speed.py CONFIG.json [--depths 16,1024]
"""
import argparse
import json
import time

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

STEPS, CHUNK = 16, 512


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--depths", default="16,1024,4096,8000")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = LlamaConfig.from_json_file(args.config)
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    past, done = DynamicCache(config=config), 0
    for depth in (int(depth) for depth in args.depths.split(",")):
        ids = torch.randint(0, config.vocab_size, (1, depth - done))
        began = time.perf_counter()
        for lo in range(0, ids.shape[1], CHUNK):
            model(ids[:, lo:lo + CHUNK], past_key_values=past, use_cache=True, logits_to_keep=1)
        fed, prefill_s = depth - done, time.perf_counter() - began
        began = time.perf_counter()
        for _ in range(STEPS):
            model(ids[:, -1:], past_key_values=past, use_cache=True)
        decode, done = STEPS / (time.perf_counter() - began), depth + STEPS
        print(json.dumps({"system": "transformers", "kv": "bf16", "depth": depth, "fed": fed,
                          "prefill_s": prefill_s, "decode_tokens_per_s": decode}), flush=True)


if __name__ == "__main__":
    main()
