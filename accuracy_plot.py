"""KL divergence against bits per value, from what evaluate.py and peers/llama_cpp_quality.py print.

    python accuracy_plot.py results.jsonl --out docs/accuracy.png

Each line of the file is an object of {"rows": [...]} (evaluate.py perplexity --json) or one row of a peer.
"""
import argparse
import json
import sys
from pathlib import Path

from metrics import markdown_table


def read_rows(path: Path) -> list[dict]:
    """Rows with system, cache, bits, perplexity, kl, top1; the 16-bit baseline of each system first.

    Bits per value of our own rows follow from their bytes per token and the baseline's, which has 16.
    """
    rows = []
    for line in filter(None, map(str.strip, path.read_text(encoding="utf-8").splitlines())):
        found = json.loads(line)
        if "rows" not in found:
            rows.append(found)
            continue
        bits = 16 / found["rows"][0]["bytes_per_token"]
        known = any(row["system"] == "gpt-long" for row in rows)  # each evaluation brings the same baseline
        rows += [{"system": "gpt-long", "bits": bits * row["bytes_per_token"], **row}
                 for row in found["rows"][known:]]
    return rows


def table(rows: list[dict]) -> str:
    """Markdown: every cache, perplexity against the same system's 16-bit cache."""
    base = {row["system"]: row["perplexity"] for row in rows if row["bits"] == 16}
    out = []
    for row in rows:
        change = 100 * (row["perplexity"] / base[row["system"]] - 1)
        out.append({"cache": f"{row['system']} {row['cache']}", "bits per value": f"{row['bits']:.2f}",
                    "bytes per token": f"{row['bytes_per_token']:.0f}" if "bytes_per_token" in row else "",
                    "perplexity": f"{row['perplexity']:.2f}", "change": f"{change:+.2f} %" if change else "",
                    "KL": f"{row['kl']:.5f}", "KL 99 %": f"{row['kl_p99']:.3f}" if "kl_p99" in row else "",
                    "top-1": f"{row['top1']:.3f}"})
    return markdown_table(out)


def draw(rows: list[dict], out: Path) -> None:
    """A point for each cache; both axes linear in bits, logarithmic in KL."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(figsize=(7, 4.2), constrained_layout=True)
    for system, marker in (("gpt-long", "o"), ("llama.cpp", "s")):
        mine = [row for row in rows if row["system"] == system and row["kl"] > 0]
        axes.plot([row["bits"] for row in mine], [row["kl"] for row in mine], marker, label=system)
        for row in mine:
            axes.annotate(row["cache"], (row["bits"], row["kl"]), xytext=(6, 3), textcoords="offset points",
                          fontsize=8)
    axes.set(yscale="log", xlabel="bits per value, scales included",
             ylabel="mean KL to the 16-bit cache, nats")
    axes.grid(True, which="both", alpha=0.25)
    axes.legend()
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, help="a PNG to draw; the table goes to stdout")
    args = parser.parse_args()
    try:
        rows = read_rows(args.results)
    except (OSError, KeyError, json.JSONDecodeError) as e:
        print(f"accuracy_plot.py: {args.results} holds no such results: {e}", file=sys.stderr)
        sys.exit(2)
    print(table(rows))
    if args.out:
        draw(rows, args.out)


if __name__ == "__main__":
    main()
