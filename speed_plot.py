"""README's picture: decode speed by depth beside llama.cpp and transformers; memory beside torchao's llama.

    SPEED_RESULTS=benchmark_results/speed.jsonl ./benchmarks.sh peers
    python speed_plot.py benchmark_results/speed.jsonl --out docs/speed.png

The file holds rows of bench_speed.py --peers.  Memory is memory.py's plan for Llama-3.1-8B with a prompt that
fills 131072 slots; torchao's figures are what it published for an A100 (pull request 738, a prompt of 6
tokens) and, for a prompt that fills the cache, the lower end of what follows from its code (README.md).
"""
import json
import statistics
from pathlib import Path

import memory
from kv_cache import CacheSpec
from model import ModelConfig
from shell import Parser, errors

LINES = {("gpt-long", "int4"): "gpt-long, int4 cache", ("gpt-long", "int8"): "gpt-long, int8 cache",
         ("llama.cpp", "q8_0"): "llama.cpp, q8_0 cache", ("llama.cpp", "q4_0"): "llama.cpp, q4_0 cache",
         ("transformers", "bf16"): "transformers, bf16"}
COLOURS = {"gpt-long": ("#0b5394", "#3d85c6"), "llama.cpp": ("#b45f06", "#e69138"),
           "transformers": ("#666666",)}
TORCHAO = {"bf16 + bf16": (59.3, 108), "bf16 + int8": (34.2, 82), "int4 + int8": (18.9, 72)}  # GB, by prompt
SCHEMES = {"bf16 + bf16": (None, "none"), "bf16 + int8": (None, "int8"), "int4 + int8": ("int4wo-64", "int8"),
           "int4 + int4": ("int4wo-64", "int4")}  # weights + cache
CONFIG = Path(__file__).with_name("configs") / "Llama-3.1-8B.json"


def speeds(path: Path) -> dict[tuple[str, str], dict[int, float]]:
    """Decode tokens/s by depth of each system and cache, medians over turns."""
    found: dict = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        by_depth = found.setdefault((row["system"], row["kv"]), {})
        by_depth.setdefault(row["depth"], []).append(row["decode_tokens_per_s"])
    return {name: {d: statistics.median(x) for d, x in at.items()} for name, at in found.items()}


def planned_gb() -> dict[str, float]:
    """What gpt-long takes for 131072 tokens of Llama-3.1-8B, by scheme."""
    plain = memory.Setup(ModelConfig.from_json(CONFIG), CacheSpec(), 131072, source="random")
    plans = {name: memory.make_plan(memory.with_scheme(plain, *scheme)) for name, scheme in SCHEMES.items()}
    return {name: plan.tensor_bytes / 1e9 for name, plan in plans.items()}


def draw_speeds(axes: object, found: dict[tuple[str, str], dict[int, float]], processor: str) -> None:
    """The left panel, into matplotlib's Axes."""
    seen = dict.fromkeys(COLOURS, 0)
    for name in (name for name in LINES if name in found):
        system, at = name[0], found[name]
        colour = COLOURS[system][seen[system] % len(COLOURS[system])]
        seen[system] += 1
        axes.plot(list(at), list(at.values()), marker="o", markersize=4, color=colour, label=LINES[name],
                  linewidth=2.2 if system == "gpt-long" else 1.4)
    axes.set(xlabel="tokens in the cache", ylabel="decode, tokens/s", ylim=(0, None),
             title=f"SmolLM2-135M: {processor}")
    axes.legend(frameon=False, fontsize=8)


def draw_memory(axes: object) -> None:
    """The right panel."""
    ours, ticks = planned_gb(), []
    for place, name in enumerate(ours):
        bars = [("#0b5394", ours[name], "gpt-long, full prompt")]
        bars += zip(("#e69138", "#f6c28b"), TORCHAO.get(name, ()),
                    ("torchao, prompt of 6 tokens", "torchao, full prompt (computed)"), strict=False)
        ticks.append(place + 0.27 * (len(bars) - 1) / 2)
        for i, (colour, gb, label) in enumerate(bars):
            axes.barh(place + 0.27 * i, gb, 0.25, color=colour, label=label if place == 0 else None)
            text = f"{gb:.1f}" if gb < 60 else f"{gb:.0f}"
            axes.text(gb + 1, place + 0.27 * i, text, va="center", fontsize=8)
    axes.set(yticks=ticks, yticklabels=list(ours), xlabel="peak, GB", xlim=(0, 125),
             title="Llama-3.1-8B, 131072 tokens: weights + cache")
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def draw(path: Path, out: Path) -> None:
    """Both panels into a PNG."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    processor = json.loads(path.read_text(encoding="utf-8").splitlines()[0])["processor"]
    draw_speeds(left, speeds(path), processor)
    draw_memory(right)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=130)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("rows", type=Path, help="JSON lines of bench_speed.py --peers --write_result")
    parser.add_argument("--out", type=Path, default=Path("docs/speed.png"), help="default: %(default)s")
    with errors("speed_plot.py"):
        args = parser.parse_args()
        if not args.rows.is_file():
            raise ValueError(f"no file at {args.rows}; `SPEED_RESULTS=FILE ./benchmarks.sh peers` makes one")
        draw(args.rows, args.out)


if __name__ == "__main__":
    main()
