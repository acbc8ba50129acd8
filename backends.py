"""What the flags of options.py ask for: the cache, the device, and the model with that device's fastest
kernels, or why the plain ones stay."""
import argparse

import torch

import attention_cpu
import linear_cpu
import quantize
from kv_cache import CacheSpec, KVCache
from load import MakeLinear, Progress, load_checkpoint, random_model
from model import ModelConfig, Transformer
from shell import working

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}  # by --precision


def cache_spec(args: argparse.Namespace) -> CacheSpec:
    """The cache that the flags describe; ValueError names what is not legal."""
    return CacheSpec.parse(args.kv_cache_quantization, args.kv_quant_axis, args.kv_cache_layout,
                           DTYPES[args.precision], args.kv_strong)


def pick_device(args: argparse.Namespace) -> torch.device:
    """--device, or cuda where there is one; ValueError when it cannot be had (--dry_run does without)."""
    if args.device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(args.device)
    if device.type == "cpu":
        return device
    if getattr(args, "dry_run", False) and not torch.cuda.is_available():
        return torch.device("cuda", device.index or 0)  # torch asks the driver for a missing index
    if (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {args.device}: this torch sees {torch.cuda.device_count()} CUDA devices; "
                         "give --device cpu, or a smaller number")
    return device


def fastest_cache(device: torch.device) -> tuple[type[KVCache], str]:
    """The cache class with the fastest attention on `device`; a line of reason when that is the plain one."""
    if device.type == "cpu":
        with working("compiling the attention kernels for this processor, once"):
            reason = attention_cpu.load()
        return (KVCache, reason) if reason else (attention_cpu.CpuKVCache, "")
    if device.type == "cuda":
        import attention_cuda  # it imports triton, which the CPU does without
        reason = attention_cuda.available(device)
        return (KVCache, reason) if reason else (attention_cuda.TritonKVCache, "")
    return KVCache, f"no attention kernels for {device.type}: the plain path"


def fastest_linear(device: torch.device) -> tuple[MakeLinear, str]:
    """What makes the fastest quantized layers of `device`; a line of reason when PyTorch's own stay."""
    if device.type != "cpu":
        return quantize.linear, ""
    with working("compiling the linear layers' kernels for this processor, once"):
        reason = linear_cpu.load()
    return (quantize.linear, reason) if reason else (linear_cpu.LinearFactory(), "")


def load_model(args: argparse.Namespace, config: ModelConfig, device: torch.device,
               progress: Progress = iter) -> tuple[Transformer, type[KVCache], str]:
    """The model that the flags of options.py ask for, the cache class to use, and lines for a person: what of
    config.json is not read, what is slower than it might be.  --attention plain: PyTorch alone."""
    options = (config, device, DTYPES[args.precision], args.quantization, progress)
    plain = args.attention == "plain"
    cache_class, no_attention = (KVCache, "") if plain else fastest_cache(device)
    make_linear, no_linear = (quantize.linear, "") if plain else fastest_linear(device)
    if args.random_weights:
        model = random_model(*options, make_linear)
    else:
        model = load_checkpoint(args.checkpoint_path, *options, make_linear)
    if not plain and device.type == "cpu" and not no_linear:
        linear_cpu.widen(model)
    reasons = "".join(f"note: {reason}\n" for reason in (no_attention, no_linear) if reason)
    return model, cache_class, config.notes + reasons
