"""Prefill and decode speed of llama.cpp by depth, for one type of KV cache: a JSON line per depth.

    python llama_cpp_speed.py MODEL.gguf --kv q8_0 [--depths 16,1024]
"""
import argparse
import json
import time

import numpy as np
from llama_cpp import Llama

GGML_TYPES = {"f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf")
    parser.add_argument("--kv", choices=GGML_TYPES, default="q8_0")
    parser.add_argument("--depths", default="16,1024,4096,8000")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=32, help="decode steps timed at each depth")
    args = parser.parse_args()
    depths = [int(depth) for depth in args.depths.split(",")]
    llm = Llama(args.gguf, n_ctx=depths[-1] + 192, n_threads=args.threads, n_threads_batch=args.threads,
                n_batch=512, type_k=GGML_TYPES[args.kv], type_v=GGML_TYPES[args.kv], flash_attn=True,
                verbose=False)
    tokens = np.random.default_rng(0).integers(100, 49000, depths[-1] + args.steps).tolist()
    done = 0
    for depth in depths:
        began = time.perf_counter()
        llm.eval(tokens[done:depth])
        fed, prefill_s, done = depth - done, time.perf_counter() - began, depth
        began = time.perf_counter()
        for _ in range(args.steps):
            llm.eval([tokens[done]])
            done += 1
        decode = args.steps / (time.perf_counter() - began)
        print(json.dumps({"system": "llama.cpp", "kv": args.kv, "depth": depth, "fed": fed,
                          "prefill_s": prefill_s, "decode_tokens_per_s": decode}), flush=True)


if __name__ == "__main__":
    main()
