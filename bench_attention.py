"""How fast decode attention is on this CPU: the C++ kernels, PyTorch's ways, and reading the bytes once.

    python bench_attention.py                                          SmolLM2-135M's shape
    python bench_attention.py --config configs/Llama-3.1-8B.json --depths 1024,16384,131072
    python bench_attention.py --instructions avx2                      the kernels of a narrower processor

One query token over one layer's filled cache, every way in turn, the least time of all rounds (what other
processes take away does not count).  Prints a Markdown table: the time of the C++ kernel over the int8 cache,
and the other ways as multiples of it.
"""
import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import attention_cpu
from attention_cpu import CpuKVCache
from kv_cache import CacheSpec, KVCache, dequantize
from report import processor

INSTRUCTIONS = ("portable", "avx2", "avx512")  # attention_cpu.LEVELS in short


@dataclass(frozen=True)
class Shape:
    """The attention of one layer."""
    n_kv_heads: int = 3
    group: int = 3
    head_dim: int = 64

    @classmethod
    def from_config(cls, path: Path) -> "Shape":
        """From the facts in a Hugging Face config.json."""
        facts = json.loads(path.read_text())
        n_heads = facts["num_attention_heads"]
        n_kv_heads = facts.get("num_key_value_heads", n_heads)
        head_dim = facts.get("head_dim") or facts["hidden_size"] // n_heads
        return cls(n_kv_heads, n_heads // n_kv_heads, head_dim)


def filled_cache(cls: type[KVCache], spec: CacheSpec, shape: Shape, depth: int) -> KVCache:
    """A cache of one row, full with `depth` random tokens."""
    cache = cls(spec, 1, shape.n_kv_heads, depth, shape.head_dim)
    for values in (cache.k_values, cache.v_values):
        values.random_(-127, 128) if values.dtype == torch.int8 else values.normal_()
    for scales in (cache.k_scales, cache.v_scales):
        if scales is not None:
            scales.fill_(2 / 127)
    return cache


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's attention of one token over all slots, the heads of a group side by side as its rows."""
    heads, dim = k.shape[1], k.shape[3]
    return F.scaled_dot_product_attention(q.reshape(1, heads, -1, dim), k, v)


def ways(shape: Shape, depth: int, level: int) -> dict[str, Callable[[], Tensor]]:
    """What is compared: name -> one decode attention over `depth` tokens.  level: of the C++ kernels."""
    int8, bf16 = CacheSpec(8, 8), CacheSpec(16, 16)
    quantized = filled_cache(CpuKVCache, int8, shape, depth)
    plain = filled_cache(KVCache, int8, shape, depth)
    whole = filled_cache(CpuKVCache, bf16, shape, depth)
    q = torch.randn(1, shape.n_kv_heads * shape.group, 1, shape.head_dim, dtype=torch.bfloat16)
    start = torch.tensor([depth - 1])
    attend = torch.ops.gpt_long_cpu.attend.default
    eight, sixteen = (*quantized.operands[:-1], level), (*whole.operands[:-1], level)
    stored = eight[:4]  # K's values and scales, V's
    packed = CpuKVCache(CacheSpec.parse("int4"), 1, shape.n_kv_heads, depth, shape.head_dim)
    packed.write(torch.tensor([0]), *torch.randn(2, 1, shape.n_kv_heads, depth, shape.head_dim))
    four = (*packed.operands[:-1], level)

    def dequantized() -> Tensor:
        k, k_scales, v, v_scales = stored
        return sdpa(q, dequantize(k, k_scales, q.dtype), dequantize(v, v_scales, q.dtype))

    def read() -> Tensor:
        return sum(x.view(torch.int64 if x.dtype == torch.int8 else torch.int16).sum() for x in stored)

    return {
        "C++ int8": lambda: attend(start, q, *eight),
        "C++ int8, portable": lambda: attend(start, q, *eight[:-1], 0),
        "C++ int4": lambda: attend(start, q, *four),
        "C++ bf16": lambda: attend(start, q, *sixteen),
        "plain PyTorch int8": lambda: plain.attend(q, start),
        "SDPA bf16": lambda: sdpa(q, whole.k_values, whole.v_values),
        "dequantize, SDPA": dequantized,
        "reading the int8 bytes": read,
    }


@torch.inference_mode()
def measure(shape: Shape, depth: int, seconds: float, level: int = CpuKVCache.level) -> dict[str, float]:
    """Least seconds of each way, taken in turn for about `seconds` in all."""
    calls = ways(shape, depth, level)
    times = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["C++ int8"]) < 3:
        for name, call in calls.items():
            call()  # so that the caches hold this way's program, and what fits of its data
            began = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - began)
    return {name: min(values) for name, values in times.items()}


def table(results: dict[int, dict[str, float]], shape: Shape) -> str:
    """Markdown: a row per depth."""
    others = [name for name in next(iter(results.values())) if name != "C++ int8"]
    lines = ["| depth | C++ int8, us | GB/s | " + " | ".join(others) + " |", "|--:" * (3 + len(others)) + "|"]
    for depth, times in results.items():
        ours = times["C++ int8"]
        rate = CacheSpec(8, 8).nbytes(1, shape.n_kv_heads, depth, shape.head_dim) / ours / 1e9
        ratios = (f"{times[name] / ours:.2f}" for name in others)
        lines.append(f"| {depth} | {ours * 1e6:.0f} | {rate:.1f} | " + " | ".join(ratios) + " |")
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, help="config.json of a model (default: SmolLM2-135M's shape)")
    parser.add_argument("--depths", default="16,256,1024,4096,8000", help="tokens in the cache, by commas")
    parser.add_argument("--threads", type=int, help="threads of PyTorch (default: as PyTorch chooses)")
    parser.add_argument("--instructions", choices=INSTRUCTIONS, default=INSTRUCTIONS[-1],
                        help="the widest that the C++ kernels may use (default: what the processor has)")
    parser.add_argument("--seconds", type=float, default=3.0, help="time to spend on each depth")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        shape = Shape.from_config(args.config) if args.config else Shape()
        depths = [int(depth) for depth in args.depths.split(",")]
        if reason := attention_cpu.load():
            raise ValueError(reason)
    except (ValueError, KeyError, OSError) as error:
        print(f"bench_attention.py: {error}", file=sys.stderr)
        sys.exit(2)
    level = min(INSTRUCTIONS.index(args.instructions), torch.ops.gpt_long_cpu.level())
    results = {depth: measure(shape, depth, args.seconds, level) for depth in depths}
    print(f"{processor()}, kernels {attention_cpu.LEVELS[level]}; one layer of {shape.n_kv_heads} KV heads x "
          f"{shape.group} query heads x {shape.head_dim}; times as multiples of C++ int8\n\n"
          f"{table(results, shape)}")


if __name__ == "__main__":
    main()
