"""Prefill and decode speed by depth, a JSON line each; and the same beside llama.cpp and transformers.

    python bench_speed.py --checkpoint_path checkpoints/NAME/model.pth --quantization int4wo-64 \\
        --kv_cache_quantization --cache_size 8192 --compile
    python bench_speed.py ... --peers .venv-peers/bin/python --gguf MODEL.gguf     (./benchmarks.sh peers)
    python bench_speed.py ... --in_turn --caches 16,int8,int4 --rounds 20

The cache is filled by real prefills, from one depth to the next.  With --peers every system runs in a process
of its own, turn by turn, and a Markdown table of medians and ratios comes out: only ratios taken like this
mean anything on a machine that is shared.  Our own caches are closer to each other than a machine is to
itself some minutes later: --in_turn holds them side by side in one process, filled with random contents.
"""
import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import backends
import report
from cpu_extension import limit_instructions
from inference import Engine
from model import ModelConfig
from options import add_cache_flags, add_model_flags, add_seed_flag, check_model_flags
from shell import Parser, errors, whole

PEERS = Path(__file__).with_name("peers")
OURS = {"int8": "q8_0", "int4": "q4_0", "16": "f16"}  # our cache and the one of llama.cpp that it is held to


def make_parser() -> Parser:
    parser = Parser(__doc__)
    add_model_flags(parser)
    add_cache_flags(parser)
    group = parser.add_argument_group("this benchmark")
    group.add_argument("--compile", action="store_true", help="compile the decode step")
    group.add_argument("--depths", default="16,1024,4096,8000", help="default: %(default)s")
    group.add_argument("--steps", type=whole(1), default=32, metavar="N",
                       help="decode steps timed at a depth (default %(default)s)")
    group.add_argument("--peers", metavar="PYTHON",
                       help="a Python that has llama-cpp-python and transformers")
    group.add_argument("--gguf", type=Path, help="the same model for llama.cpp")
    group.add_argument("--in_turn", action="store_true", help="our own --caches in one process, by turns")
    group.add_argument("--caches", default="int8,16,int4",
                       help="ours to compare (default %(default)s); --in_turn: int8@16384 has so many slots")
    group.add_argument("--instructions", choices=("avx512", "avx2", "default"),
                       help="take at most these of the processor: the narrower kernels, on a wider machine")
    group.add_argument("--write_result", type=Path, metavar="FILE",
                       help="--peers: append all rows, a JSON line each (speed_plot.py draws them)")
    group.add_argument("--rounds", type=whole(1), default=2, metavar="N",
                       help="turns of each system (default %(default)s)")
    add_seed_flag(group)
    return parser


def measure(engine: Engine, depths: list[int], steps: int) -> Iterator[dict]:
    """A row for each depth; the tokens are random."""
    ids = torch.randint(engine.model.config.vocab_size, (1, depths[-1]))
    done = 0
    for depth in depths:
        list(engine.generate(ids[0, done:depth].tolist(), steps + 1, start=done))
        timing = engine.timing
        yield {"depth": depth, "fed": depth - done, "prefill_s": timing.prefill_s,
               "decode_tokens_per_s": timing.decode_steps / timing.decode_s}
        done = depth


def build(args: argparse.Namespace, cache_size: int) -> Engine:
    """The engine that the flags describe, ready to run."""
    device = backends.pick_device(args)
    config = ModelConfig.from_json(args.random_weights or args.checkpoint_path.with_name("config.json"))
    torch.manual_seed(args.seed)
    model, cache_class, notes = backends.load_model(args, config, device)
    print(notes, end="", file=sys.stderr)
    spec = backends.cache_spec(args)
    return Engine(model, spec, cache_size, args.causal_mask, prefill_chunk=args.prefill_chunk,
                  cache_class=cache_class, compile=args.compile)


def depths_of(args: argparse.Namespace) -> list[int]:
    """Tokens in the cache; ValueError unless they rise."""
    words = args.depths.split(",")
    depths = [int(word) for word in words if word.isdecimal()]
    if len(depths) < len(words) or depths[0] < 1 or depths != sorted(set(depths)):
        raise ValueError(f"--depths {args.depths!r}: give rising numbers of tokens such as 16,1024")
    return depths


def slots_for(need: int, given: int | None) -> int:
    """Slots of a cache: `given`, or what is needed.  ValueError when those do not do."""
    if given and need > given:
        raise ValueError(f"--depths and --steps reach {need} > cache of {given} slots; "
                         f"give --cache_size {need}")
    return given or need


def read_speed(model: torch.nn.Module) -> float:
    """Bytes per second of adding up all weights as integers, the best of five: what memory gives."""
    tensors = (*model.parameters(), *model.buffers())
    weights = {id(t): t for t in tensors if t.ndim == 2 and t.nbytes >= 1 << 16}
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        for tensor in weights.values():
            tensor.detach().view(torch.uint8).view(-1)[:tensor.nbytes // 8 * 8].view(torch.int64).sum()
        seconds.append(time.perf_counter() - began)
    return sum(tensor.nbytes for tensor in weights.values()) / min(seconds)


def run_here(args: argparse.Namespace) -> None:
    """This project's speeds, one JSON line a depth."""
    depths = depths_of(args)
    engine = build(args, slots_for(depths[-1] + args.steps + 1, args.cache_size))
    compile_s = engine.warm_up()
    parts, can_read = report.model_bytes(engine.model), read_speed(engine.model)
    for row in measure(engine, depths, args.steps):
        kv = args.kv_cache_quantization or "16"
        reads = report.speeds(engine, [engine.timing], parts)["bandwidth_bytes_per_s"]
        print(json.dumps({"system": "gpt-long", "kv": kv, **row, "compile_s": compile_s,
                          "bandwidth_bytes_per_s": reads, "plain_read_bytes_per_s": can_read}), flush=True)


def in_turn(args: argparse.Namespace) -> str:
    """Decode speeds of our caches by turns; Markdown: medians, and those of a turn's ratios to the first."""
    depths, engines, lines = depths_of(args), {}, {}
    for name in args.caches.split(","):
        kind, at, slots = name.partition("@")
        if at and not slots.isdecimal():
            raise ValueError(f"--caches {name!r}: give kinds such as int8, or int8@16384 with its slots")
        flags = vars(args) | {"kv_cache_quantization": None if kind == "16" else kind}
        slots = slots_for(depths[-1] + args.steps, int(slots) if slots else args.cache_size)
        engines[name] = build(argparse.Namespace(**flags), slots)
        engines[name].warm_up()
        lines[name] = f"| {name} |"
    for depth in depths:
        speeds = {name: [] for name in engines}
        for engine in engines.values():
            engine.assume_filled(depth)
        for _ in range(args.rounds):
            for name, engine in engines.items():
                list(engine.generate([5], args.steps + 1, start=depth - 1))
                speeds[name].append(engine.timing.decode_steps / engine.timing.decode_s)
        first = next(iter(speeds.values()))
        for name, mine in speeds.items():
            ratio = statistics.median(a / b for a, b in zip(mine, first, strict=True))
            lines[name] += f" {statistics.median(mine):.1f} ({ratio:.2f}) |"
    head = ["| decode tokens/s |" + "".join(f" depth {d} |" for d in depths)]
    head.append("|---|" + "---:|" * len(depths))
    note = f"On {report.processor()}; medians of {args.rounds} turns, in brackets of the ratio to the first."
    return "\n".join([*head, *lines.values(), "", note])


def rows_of(command: list[str]) -> list[dict]:
    """The JSON lines that a command prints."""
    print("$", *command, file=sys.stderr, flush=True)
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def commands(args: argparse.Namespace) -> list[list[str]]:
    """One process a system, in the order of a turn."""
    flags = ["--depths", args.depths, "--threads", str(torch.get_num_threads())]
    config = args.checkpoint_path.with_name("config.json")
    own = [sys.executable, __file__, "--checkpoint_path", str(args.checkpoint_path), "--compile",
           "--quantization", args.quantization or "int4wo-64", "--depths", args.depths,
           "--cache_size", str(args.cache_size or 8192)]
    llama_cpp = [args.peers, str(PEERS / "llama_cpp_speed.py"), str(args.gguf), *flags, "--kv"]
    turn = [[args.peers, str(PEERS / "transformers_speed.py"), str(config), *flags]]
    for cache in args.caches.split(","):
        turn.append([*own, *(["--kv_cache_quantization", cache] if cache != "16" else [])])
        if cache in OURS:
            turn.append([*llama_cpp, OURS[cache]])
    return turn


def compare(args: argparse.Namespace) -> str:
    """All systems, turn by turn; Markdown."""
    rows = [row for _ in range(args.rounds) for command in commands(args) for row in rows_of(command)]
    for row in rows if args.write_result else ():
        report.append_json(args.write_result, row | {"processor": report.processor()})
    return table(rows, depths_of(args))


def table(rows: list[dict], depths: list[int]) -> str:
    """Medians over turns: decode tokens/s by depth, the average prefill, and our ratios to each peer."""
    def speeds(system: str, kv: str) -> list[float]:
        mine = [row for row in rows if (row["system"], row["kv"]) == (system, kv)]
        by_depth = [[row for row in mine if row["depth"] == depth] for depth in depths]
        decode = [statistics.median(row["decode_tokens_per_s"] for row in at) for at in by_depth]
        seconds = sum(statistics.median(row["prefill_s"] for row in at) for at in by_depth)
        return [*decode, sum(at[0]["fed"] for at in by_depth) / seconds]

    names = list(dict.fromkeys((row["system"], row["kv"]) for row in rows))
    found = {name: speeds(*name) for name in names}
    lines = ["| decode tokens/s | " + " | ".join(f"depth {d}" for d in depths) + " | prefill, average |",
             "|---|" + "---:|" * (len(depths) + 1)]
    lines += [f"| {system}, {kv} cache | " + " | ".join(f"{x:.1f}" for x in found[system, kv]) + " |"
              for system, kv in names]
    for mine in (name for name in names if name[0] == "gpt-long"):
        peers = [("llama.cpp", OURS.get(mine[1])), ("transformers", "bf16")]
        for peer in (peer for peer in peers if peer in found):
            ratios = " | ".join(f"{a / b:.2f}" for a, b in zip(found[mine], found[peer], strict=True))
            lines.append(f"| **{mine[1]} / {peer[0]} {peer[1]}** | {ratios} |")
    return "\n".join([*lines, "", f"On {report.processor()}; each figure is the median of its turns."])


def main() -> None:
    with errors("bench_speed.py"):
        args = make_parser().parse_args()
        if args.instructions:
            limit_instructions(args.instructions)
        check_model_flags(args)
        if args.random_weights and args.peers:
            raise ValueError("peers have no --random_weights; give --checkpoint_path MODEL.pth")
        if args.peers and args.gguf is None:
            raise ValueError("--peers needs --gguf MODEL.gguf, the same model for llama.cpp")
        if args.peers:
            print(compare(args))
        elif args.in_turn:
            print(in_turn(args))
        else:
            run_here(args)


if __name__ == "__main__":
    main()
