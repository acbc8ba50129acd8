"""Result lines of generate.py as Markdown tables, and peak memory against context as a plot.

    python benchmark_report.py results.jsonl [--plot peak.png]

Each row says how its memory was taken: measured, from a run on fake tensors (dry run), or planned only.
The seed's published peaks (Llama-3.1-8B, an A100, a prompt of 6 tokens) stand beside the rows they belong to.
"""
import argparse
import json
import sys
from pathlib import Path

# GB by slots, from torchao's _models/llama README; keys: weights, bits of the cache, mask mode.
SEED = {
    (None, 16, "full"): {8192: 17.86, 16384: 19.81, 32768: 23.83, 65536: 33.5, 131072: 59.27},
    (None, 8, "full"): {8192: 17.52, 16384: 18.75, 32768: 21.72, 65536: 29.54, 131072: 52.62},
    (None, 8, "linear"): {8192: 17.47, 16384: 18.48, 32768: 20.64, 65536: 25.24, 131072: 34.18},
    ("int4wo-64", 8, "linear"): {131072: 18.9},
}
MARKS = {"planned, not run": "planned", "dry run": "dry run"}  # anything else was measured


def read_rows(path: Path) -> list[dict]:
    """The result objects of generate.py in a file.  ValueError names a line that is none."""
    if not path.is_file():
        raise ValueError(f"no results at {path}; ./benchmarks.sh makes some")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            row["cache"]["size"], row["peak_memory_bytes"]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(f"{path}, line {number}: no result line of generate.py") from None
        rows.append(row)
    return rows


def how(row: dict) -> str:
    """measured, dry run, or planned."""
    return MARKS.get(row["peak_memory_how"], "measured")


def cache_name(cache: dict) -> str:
    """int8, 16 bit, k8v4 ..., with the scale axis where it is not d."""
    k, v = cache["k_bits"], cache["v_bits"]
    name = {16: "16 bit", 8: "int8", 4: "int4"}[k] if k == v else f"k{k}v{v}"
    return name if cache["axis"] == "d" or k == v == 16 else f"{name} {cache['axis']}"


def seed_gb(row: dict) -> float | None:
    """What the seed published for the nearest of its configurations: for mask mode none its best one."""
    if "Llama-3.1-8B" not in row["model"]:
        return None
    cache, mask = row["cache"], row["causal_mask"]
    if mask == "none":
        mask = "linear" if cache["k_bits"] == 8 else "full"
    bits = cache["k_bits"] if cache["k_bits"] == cache["v_bits"] else None
    return SEED.get((row["quantization"], bits, mask), {}).get(cache["size"])


def peak_bytes(row: dict) -> int:
    """What the run itself takes: above Python and torch where that was measured."""
    return row.get("peak_above_start_bytes", row["peak_memory_bytes"])


def series(row: dict) -> tuple[str, str, str, str]:
    """Weights, cache, mask, prompt: what stays the same while the context grows."""
    tokens = row["prompt_tokens"] + row.get("assumed_tokens", 0)
    prompt = "fills" if tokens > row["cache"]["size"] // 2 else "short"
    return row["quantization"] or "16 bit", cache_name(row["cache"]), row["causal_mask"], prompt


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def memory_table(rows: list[dict]) -> str:
    """Markdown: peak memory of each run, the plan's figure, the seed's, and the speeds."""
    head = ("weights", "cache", "mask", "prompt", "slots", "peak GB", "how", "plan GB", "seed, short prompt",
            "prefill tokens/s", "decode tokens/s")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in sorted(rows, key=lambda row: (*series(row), row["cache"]["size"])):
        planned = row.get("planned_bytes")
        lines.append("| " + " | ".join([
            *series(row), str(row["cache"]["size"]), _number(peak_bytes(row) / 1e9, 2), how(row),
            _number(planned and planned / 1e9, 2), _number(seed_gb(row), 2),
            _number(row.get("prefill_tokens_per_s"), 1), _number(row.get("decode_tokens_per_s"), 1)]) + " |")
    return "\n".join(lines)


def report(rows: list[dict]) -> str:
    """One table per model and device."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["device"]), []).append(row)
    parts = []
    for (model, device), group in groups.items():
        name = Path(model).parent.name if model.endswith(".pth") else Path(model).stem
        made_up = ", random weights" if group[0].get("random_weights") else ""
        parts.append(f"### {name}{made_up}, {device}\n\n{memory_table(group)}")
    return "\n\n".join(parts) + "\n\nPeak: on a CPU above what Python and torch take. GB are 1e9 bytes.\n"


def plot(rows: list[dict], path: Path) -> None:
    """Peak against context, a line per series; what was not measured is hollow.  Needs matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot draws with matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(9, 5.5), dpi=110, layout="constrained")
    lines: dict[tuple, list[dict]] = {}
    for row in rows:
        lines.setdefault(series(row), []).append(row)
    for i, (name, group) in enumerate(sorted(lines.items())):
        group.sort(key=lambda row: row["cache"]["size"])
        points = [(row["cache"]["size"], peak_bytes(row) / 1e9) for row in group]
        axes.plot(*zip(*points, strict=True), color=f"C{i % 10}", linestyle=("-", "--", ":")[i // 10 % 3],
                  linewidth=1.2, label=", ".join(name))
        for row, point in zip(group, points, strict=True):
            fill = f"C{i % 10}" if how(row) == "measured" else "white"
            axes.plot(*point, "o", color=f"C{i % 10}", markerfacecolor=fill, markersize=5)
    axes.set_xscale("log", base=2)
    sizes = sorted({row["cache"]["size"] for row in rows})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("slots of the cache")
    axes.set_ylabel("peak, GB (hollow: not measured but planned or a dry run)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, title="weights, cache, mask, prompt", title_fontsize=8)
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="files of result lines (.jsonl)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw peak memory against context")
    args = parser.parse_args()
    try:
        rows = [row for path in args.results for row in read_rows(path)]
        if not rows:
            raise ValueError(f"no result lines in {', '.join(map(str, args.results))}")
        print(report(rows), end="")
        if args.plot:
            plot(rows, args.plot)
    except ValueError as e:
        print(f"benchmark_report.py: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
