"""The command-line flags that several scripts share, and what they mean.  Each default lives here."""
import argparse
from pathlib import Path

import torch

from kv_cache import CAUSAL_MASKS, K_STRONG, V_STRONG, CacheSpec
from quantize import SCHEMES, check_scheme

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Parser(argparse.ArgumentParser):
    """argparse, but an error is one line and no abbreviation of a flag is guessed."""

    def __init__(self, doc: str, **more: str) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter,
                         allow_abbrev=False,
                         **more)

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message} (--help lists the flags)\n")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Which weights, in which form, where."""
    group = parser.add_argument_group("model")
    group.add_argument("--checkpoint_path", type=Path,
                       help="a model.pth, config.json and tokenizer beside it")
    group.add_argument("--random_weights", type=Path, metavar="CONFIG.json",
                       help="no checkpoint: this architecture with random weights, made quantized")
    group.add_argument("--device", help="default: cuda where there is one, else cpu")
    group.add_argument("--precision", choices=PRECISIONS, default="bf16",
                       help="of activations and of what is not quantized (default %(default)s)")
    group.add_argument("-q", "--quantization", metavar="SCHEME",
                       help=f"of the linear layers: {', '.join(SCHEMES)}")


def add_cache_flags(parser: argparse.ArgumentParser) -> None:
    """How K and V are stored and read."""
    group = parser.add_argument_group("kv cache and attention")
    group.add_argument("--cache_size", type=int, metavar="SLOTS",
                       help="tokens that the cache holds (default: the prompt and the new tokens)")
    group.add_argument("--kv_cache_quantization", nargs="?", const="int8", metavar="KIND",
                       help="int8 (also when given alone), int4, k8v4, or bits K,V: 8,16 (default: 16 bits)")
    group.add_argument("--kv_quant_axis", default="d", metavar="AXIS",
                       help="what shares a scale: d (token of a head) or hd (token) (default %(default)s)")
    group.add_argument("--kv_strong", default=f"{K_STRONG},{V_STRONG}", metavar="K,V",
                       help="coordinates that a 4-bit K or V keeps at 8 bits (default %(default)s)")
    group.add_argument("--kv_cache_layout", default="bhsd", metavar="ORDER",
                       help="storage order of axes b, h, s, d: letters, or MaxText's digits (0213 = bhsd); "
                       "one for both or K,V (default %(default)s)")
    group.add_argument("--causal_mask", choices=CAUSAL_MASKS, default="none",
                       help="none: no mask; linear: a [T, S] comparison; full: the S x S table; the last "
                       "two are slow references (default %(default)s)")
    group.add_argument("--linear_causal_mask", action="store_const", const="linear", dest="causal_mask",
                       help="the same as --causal_mask linear")
    group.add_argument("--attention", choices=("auto", "plain"), default="auto",
                       help="auto: this device's fastest kernels; plain: PyTorch (default %(default)s)")
    group.add_argument("--prefill_chunk", type=int, default=512, metavar="TOKENS",
                       help="tokens of a prompt computed at a time (default %(default)s)")


def cache_spec(args: argparse.Namespace) -> CacheSpec:
    """The cache that the flags describe; ValueError names what is not legal."""
    return CacheSpec.parse(args.kv_cache_quantization, args.kv_quant_axis, args.kv_cache_layout,
                           PRECISIONS[args.precision], args.kv_strong)


def check_model_flags(args: argparse.Namespace) -> None:
    """ValueError unless the flags of add_model_flags and add_cache_flags fit together."""
    if (args.checkpoint_path is None) == (args.random_weights is None):
        raise ValueError("give --checkpoint_path MODEL.pth, or --random_weights CONFIG.json")
    check_scheme(args.quantization)
    if args.prefill_chunk < 1:
        raise ValueError(f"--prefill_chunk is {args.prefill_chunk}; give 1 or more")
    if args.cache_size is not None and args.cache_size < 1:
        raise ValueError(f"--cache_size is {args.cache_size}; give 1 or more")


def pick_device(args: argparse.Namespace) -> torch.device:
    """--device, or cuda where there is one; ValueError when it cannot be had (--dry_run does without)."""
    if args.device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(args.device)
    except RuntimeError as e:
        raise ValueError(f"--device {args.device!r} is no device; give cpu or cuda") from e
    if device.type == "cuda" and not torch.cuda.is_available():
        if getattr(args, "dry_run", False):
            return torch.device("cuda", device.index or 0)  # torch asks the driver for a missing index
        raise ValueError("--device cuda: this torch sees no CUDA device; give --device cpu")
    return device
