"""Perplexity, KL and top-1 agreement of llama.cpp's KV cache types against its own f16 cache, as JSON lines.

    python llama_cpp_quality.py MODEL.gguf TEXT [--window 2048 --windows 3]
"""
import argparse
import json
import math
from pathlib import Path

import numpy as np
from llama_cpp import Llama

# ggml's numbers of the types of K and V
KINDS = {"f16": (1, 1), "q8_0": (8, 8), "k q8_0, v q4_0": (8, 2), "q4_1": (3, 3), "q4_0": (2, 2)}
BITS = {"f16": 16, "q8_0": 8.5, "k q8_0, v q4_0": 6.5, "q4_1": 5, "q4_0": 4.5}  # per value, scales included


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis, float32."""
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def log_probs(llm: Llama, windows: list[list[int]]) -> list[np.ndarray]:
    """For each window the log probabilities of the next token, [W, V]."""
    out = []
    for window in windows:
        llm.reset()
        llm.eval(window)
        out.append(log_softmax(np.array(llm.scores[:len(window)], dtype=np.float32)))
    return out


def figures(windows: list[list[int]], base: list[np.ndarray], logs: list[np.ndarray]) -> dict:
    """Means over all positions."""
    nll = -sum(b[np.arange(len(w) - 1), w[1:]].sum() for w, b in zip(windows, logs, strict=True))
    kl = np.mean([(np.exp(a) * (a - b)).sum(-1).mean() for a, b in zip(base, logs, strict=True)])
    top1 = np.mean([(a.argmax(-1) == b.argmax(-1)).mean() for a, b in zip(base, logs, strict=True)])
    predicted = sum(len(w) - 1 for w in windows)
    return {"perplexity": math.exp(float(nll) / predicted), "kl": float(kl), "top1": float(top1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf")
    parser.add_argument("text", type=Path)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--windows", type=int, default=3)
    args = parser.parse_args()
    windows = base = None
    for name, (k, v) in KINDS.items():
        llm = Llama(args.gguf, n_ctx=args.window, n_batch=512, n_threads=2, n_threads_batch=2, type_k=k,
                    type_v=v, flash_attn=True, logits_all=True, verbose=False)
        if windows is None:
            ids = llm.tokenize(args.text.read_text(encoding="utf-8").encode(), add_bos=False)
            windows = [ids[i * args.window:(i + 1) * args.window] for i in range(args.windows)]
        logs = log_probs(llm, windows)
        base = logs if base is None else base
        print(json.dumps({"system": "llama.cpp", "cache": name, "bits": BITS[name],
                          **figures(windows, base, logs)}), flush=True)


if __name__ == "__main__":
    main()
