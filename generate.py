"""Generate text with a Llama-family model over a long, quantized KV cache.

    python generate.py --checkpoint_path checkpoints/NAME/model.pth --prompt "Once upon a time" \\
        --quantization int4wo-64 --kv_cache_quantization --compile

Text goes to stdout as it is made; progress and the summary go to stderr.
"""
import argparse
from pathlib import Path

from options import DEFAULT_PROMPT, add_cache_flags, add_model_flags, add_seed_flag, check_model_flags
from shell import Parser, check_input, check_output, errors, number, whole, working


def make_parser() -> Parser:
    """The flags of this script."""
    parser = Parser(__doc__)
    add_model_flags(parser)
    text = parser.add_argument_group("prompt").add_mutually_exclusive_group()
    text.add_argument("--prompt", help=f"default: {DEFAULT_PROMPT!r}")
    text.add_argument("--prompt_file", type=Path, help="a UTF-8 text file")
    text.add_argument("--prefill_size", type=whole(1), metavar="N",
                      help="a made-up prompt of N random tokens")
    text.add_argument("--assume_filled", type=whole(0), metavar="N",
                      help="start as if N tokens were in the cache, with random contents (no text comes out)")
    text.add_argument("--interactive", action="store_true", help="a chat of many turns over one cache")
    parser.add_argument("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    add_sampling_flags(parser)
    add_cache_flags(parser)
    group = parser.add_argument_group("speed and reports")
    group.add_argument("--compile", action="store_true", help="compile the decode step")
    group.add_argument("--compile_prefill", action="store_true", help="compile the prefill, too")
    group.add_argument("--profile", type=Path, metavar="FILE", help="write a Chrome trace of the last sample")
    group.add_argument("--write_result", type=Path, metavar="FILE", help="append one JSON line on this run")
    group = parser.add_argument_group("memory")
    group.add_argument("--dry_run", action="store_true",
                       help="run on fake tensors: say what it would take, allocate nothing (a prompt that "
                       "fills the cache unless one is given; --device cuda needs no CUDA device)")
    group.add_argument("--force", action="store_true", help="go on when the plan does not fit in memory")
    group.add_argument("--memory_profile", type=Path, metavar="FILE.png",
                       help="draw allocated bytes over time by part (slow: follows every operator)")
    return parser


def add_sampling_flags(parser: Parser) -> None:
    """How many tokens, and how they are chosen."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--num_samples", type=whole(1), default=1, metavar="N",
                       help="runs of the prompt (default %(default)s)")
    group.add_argument("--max_new_tokens", type=whole(0), default=200, metavar="N",
                       help="default %(default)s")
    group.add_argument("--temperature", type=number(1000, or_zero=True), default=0.8, metavar="T",
                       help="0 is greedy (default %(default)s)")
    group.add_argument("--top_k", type=whole(1), default=200, metavar="N",
                       help="draw among so many (default %(default)s)")
    group.add_argument("--top_p", type=number(1), metavar="P",
                       help="draw among the fewest tokens of this total probability")
    add_seed_flag(group)
    group.add_argument("--ignore_eos", action="store_true", help="go on after a stop token (for benchmarks)")


def check_flags(args: argparse.Namespace) -> None:
    """ValueError for what can be seen to be wrong without torch."""
    check_model_flags(args)
    if args.prompt_file:
        check_input("--prompt_file", args.prompt_file, "a UTF-8 text file")
    for flag in ("write_result", "profile", "memory_profile"):
        check_output(f"--{flag}", getattr(args, flag))


def main() -> None:
    with errors("generate.py"):
        args = make_parser().parse_args()
        check_flags(args)
        with working("importing torch"):
            import generation  # takes a second: not before the flags are known to be good
        generation.run(args)


if __name__ == "__main__":
    main()
