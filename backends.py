"""Which kernels a device has: the cache class and the linear layers to use, or why the plain ones stay."""
import argparse

import torch

import attention_cpu
import attention_cuda
import linear_cpu
import quantize
from kv_cache import KVCache
from load import MakeLinear, Progress, load_checkpoint, random_model
from model import ModelConfig, Transformer
from options import PRECISIONS


def fastest_cache(device: torch.device) -> tuple[type[KVCache], str]:
    """The cache class with the fastest attention on `device`; a line of reason when that is the plain one."""
    if device.type == "cpu":
        reason = attention_cpu.load()
        return (KVCache, reason) if reason else (attention_cpu.CpuKVCache, "")
    if device.type == "cuda":
        reason = attention_cuda.available(device)
        return (KVCache, reason) if reason else (attention_cuda.TritonKVCache, "")
    return KVCache, f"no attention kernels for {device.type}: the plain path"


def fastest_linear(device: torch.device) -> tuple[MakeLinear, str]:
    """What makes the fastest quantized layers of `device`; a line of reason when PyTorch's own stay."""
    reason = linear_cpu.load() if device.type == "cpu" else ""
    return (quantize.linear, reason) if reason or device.type != "cpu" else (linear_cpu.LinearFactory(), "")


def load_model(args: argparse.Namespace, config: ModelConfig, device: torch.device,
               progress: Progress = iter) -> tuple[Transformer, type[KVCache], str]:
    """The model that the flags of options.py ask for, the cache class to use, and lines for a person on why
    something is slower than it might be.  --attention plain: PyTorch alone."""
    options = (config, device, PRECISIONS[args.precision], args.quantization, progress)
    plain = args.attention == "plain"
    cache_class, no_attention = (KVCache, "") if plain else fastest_cache(device)
    make_linear, no_linear = (quantize.linear, "") if plain else fastest_linear(device)
    if args.random_weights:
        model = random_model(*options, make_linear)
    else:
        model = load_checkpoint(args.checkpoint_path, *options, make_linear)
    if not plain and device.type == "cpu" and not no_linear:
        linear_cpu.widen(model)
    return model, cache_class, "".join(f"note: {reason}\n" for reason in (no_attention, no_linear) if reason)
