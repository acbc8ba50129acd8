"""The command-line flags that several scripts share.  Each default lives here; backends.py has their meaning.

Torch-free: what a flag can be is checked before torch is imported.  The names of quantize.py and kv_cache.py
are repeated here for that; a test holds them equal.
"""
import argparse
import re
from pathlib import Path

from shell import check_input, whole

PRECISIONS = ("bf16", "fp16", "fp32")
SCHEMES = ("int8wo", "int8dq", "int4wo-32", "int4wo-64", "int4wo-128", "int4wo-256")
CACHE_KINDS = {"none": "16,16", "int8": "8,8", "int4": "4,4", "k8v4": "8,4"}
CACHE_BITS = ("16", "8", "4")
AXES = {"d": "d", "hd": "hd", "dkv": "d", "heads_and_dkv": "hd"}
CAUSAL_MASKS = ("none", "linear", "full")
STRONG = "16,8"
DEFAULT_PROMPT = "Hello, my name is"


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Which weights, in which form, where."""
    group = parser.add_argument_group("model")
    group.add_argument("--checkpoint_path", type=Path,
                       help="a model.pth, config.json and tokenizer beside it")
    group.add_argument("--random_weights", type=Path, metavar="CONFIG.json",
                       help="no checkpoint: this architecture with random weights, made quantized")
    group.add_argument("--device", type=_device,
                       help="cpu, cuda or cuda:N (default: cuda where there is one)")
    group.add_argument("--precision", choices=PRECISIONS, default="bf16",
                       help="of activations and of what is not quantized (default %(default)s)")
    add_quantization_flag(group)


def add_quantization_flag(group: argparse._ActionsContainer) -> None:
    """In which form the weights are."""
    group.add_argument("-q", "--quantization", choices=SCHEMES, metavar="SCHEME",
                       help=f"of the linear layers: {', '.join(SCHEMES)}")


def add_seed_flag(group: argparse._ActionsContainer) -> None:
    """Where random numbers start, as torch's generators take it."""
    group.add_argument("--seed", type=whole(0, 2 ** 64 - 1), default=1234, metavar="N",
                       help="of all that is drawn (default %(default)s)")


def add_cache_flags(parser: argparse.ArgumentParser) -> None:
    """How K and V are stored and read."""
    group = parser.add_argument_group("kv cache and attention")
    group.add_argument("--cache_size", type=whole(1), metavar="SLOTS",
                       help="tokens that the cache holds (default: the prompt and the new tokens)")
    group.add_argument("--kv_cache_quantization", nargs="?", const="int8", type=_cache_kind, metavar="KIND",
                       help="int8 (also when given alone), int4, k8v4, or bits K,V: 8,16 (default: 16 bits)")
    group.add_argument("--kv_quant_axis", default="d", choices=AXES, metavar="AXIS",
                       help="what shares a scale: d (token of a head) or hd (token) (default %(default)s)")
    group.add_argument("--kv_strong", default=STRONG, type=_strong, metavar="K,V",
                       help="coordinates that a 4-bit K or V keeps at 8 bits (default %(default)s)")
    group.add_argument("--kv_cache_layout", default="bhsd", type=_layout, metavar="ORDER",
                       help="storage order of axes b, h, s, d: letters, or MaxText's digits (0213 = bhsd); "
                       "one for both or K,V (default %(default)s)")
    group.add_argument("--causal_mask", choices=CAUSAL_MASKS, default="none",
                       help="none: no mask; linear: a [T, S] comparison; full: the S x S table; the last "
                       "two are slow references (default %(default)s)")
    group.add_argument("--linear_causal_mask", action="store_const", const="linear", dest="causal_mask",
                       help="the same as --causal_mask linear")
    group.add_argument("--attention", choices=("auto", "plain"), default="auto",
                       help="auto: this device's fastest kernels; plain: PyTorch (default %(default)s)")
    group.add_argument("--prefill_chunk", type=whole(1), default=512, metavar="TOKENS",
                       help="tokens of a prompt computed at a time (default %(default)s)")


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d{1,2})?", text):
        raise argparse.ArgumentTypeError(f"give cpu or cuda (or cuda:1, the second one), not {text!r}")
    return text


def _cache_kind(text: str) -> str:
    bits = text.replace(" ", "").split(",")
    if text not in CACHE_KINDS and not (len(bits) == 2 and set(bits) <= set(CACHE_BITS)):
        raise argparse.ArgumentTypeError(f"give {', '.join(CACHE_KINDS)}, or bits K,V of "
                                         f"{', '.join(CACHE_BITS)} (such as 16,8), not {text!r}")
    return text


def _strong(text: str) -> str:
    if not re.fullmatch(r"\d{0,3}[02468],\d{0,3}[02468]", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"give two even numbers K,V (such as {STRONG}), not {text!r}")
    return text


def _layout(text: str) -> str:
    orders = [order.translate(str.maketrans("0123", "bshd")) for order in text.split(",")]
    if len(orders) > 2 or any(sorted(order) != sorted("bhsd") for order in orders):
        raise argparse.ArgumentTypeError("give an order of the axes b, h, s, d (such as bhsd, or 0213), or "
                                         f"two as K,V, not {text!r}")
    return text


def check_model_flags(args: argparse.Namespace) -> None:
    """ValueError unless the flags of add_model_flags and add_cache_flags fit together and name files."""
    if (args.checkpoint_path is None) == (args.random_weights is None):
        raise ValueError("give --checkpoint_path MODEL.pth, or --random_weights CONFIG.json")
    if args.random_weights:
        check_input("--random_weights", args.random_weights, "a config.json (see configs/)")
    else:
        wanted = "a model.pth with its config.json beside it (see README.md for how to convert one)"
        check_input("--checkpoint_path", args.checkpoint_path, wanted)
        check_input("--checkpoint_path", args.checkpoint_path.with_name("config.json"), wanted)
    check_cache_flags(args)


def check_cache_flags(args: argparse.Namespace) -> None:
    """ValueError unless the flags of add_cache_flags fit together."""
    kind = args.kv_cache_quantization or "none"
    if AXES[args.kv_quant_axis] == "hd" and "4" in CACHE_KINDS.get(kind, kind):
        raise ValueError(f"--kv_quant_axis {args.kv_quant_axis} is not legal at 4 bits; leave it out, or "
                         "give --kv_cache_quantization int8")
