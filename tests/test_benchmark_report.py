"""Tables and plots of result lines."""
import json
import subprocess
from pathlib import Path

import pytest

import benchmark_report

ROOT = Path(__file__).parent.parent


def row(**changes: object) -> dict:
    made = {"model": "configs/Llama-3.1-8B.json", "random_weights": True, "device": "cuda",
            "quantization": "int4wo-64",
            "cache": {"k_bits": 8, "v_bits": 8, "axis": "d", "size": 131072}, "causal_mask": "none",
            "prompt_tokens": 131000, "assumed_tokens": 0, "peak_memory_bytes": 14_100_000_000,
            "peak_memory_how": "dry run", "planned_bytes": 14_200_000_000}
    return made | changes


def test_planned_dry_and_measured_rows_are_told_apart():
    table = benchmark_report.memory_table([
        row(), row(peak_memory_how="planned, not run"), row(peak_memory_how="cuda max reserved"),
        row(peak_memory_how="peak resident size of the process", peak_above_start_bytes=13_500_000_000)])
    marks = [line.split(" | ")[6] for line in table.splitlines()[2:]]
    assert marks == ["dry run", "planned", "measured", "measured"]
    assert "| 13.50 | measured | 14.20 | 18.90 |" in table  # above Python and torch, where that is known


def test_the_seeds_figures_stand_beside_their_rows():
    cache16 = {"k_bits": 16, "v_bits": 16, "axis": "d", "size": 131072}
    assert benchmark_report.seed_gb(row()) == 18.9
    assert benchmark_report.seed_gb(row(quantization=None)) == 34.18
    assert benchmark_report.seed_gb(row(quantization=None, causal_mask="full")) == 52.62
    assert benchmark_report.seed_gb(row(quantization=None, cache=cache16)) == 59.27
    assert benchmark_report.seed_gb(row(quantization="int8wo")) is None
    assert benchmark_report.seed_gb(row(model="configs/SmolLM2-135M.json")) is None


def test_rows_group_by_model_and_device_and_sort_by_size():
    small = row(cache={"k_bits": 8, "v_bits": 4, "axis": "d", "size": 8192}, prompt_tokens=6)
    text = benchmark_report.report([row(), small, row(device="CPU"), row(model="checkpoints/Some/model.pth")])
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "### Llama-3.1-8B, random weights, cuda", "### Llama-3.1-8B, random weights, CPU",
        "### Some, random weights, cuda"]
    assert "| int4wo-64 | k8v4 | none | short | 8192 |" in text


def test_bad_files_are_named(tmp_path, capsys, monkeypatch):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(row()) + "\n{broken\n")
    monkeypatch.setattr("sys.argv", ["benchmark_report.py", str(path)])
    with pytest.raises(SystemExit) as stopped:
        benchmark_report.main()
    assert stopped.value.code == 2 and "line 2" in capsys.readouterr().err
    with pytest.raises(ValueError, match="benchmarks.sh"):
        benchmark_report.read_rows(tmp_path / "none.jsonl")


def test_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row(cache={"k_bits": 8, "v_bits": 8, "axis": "d", "size": n}, prompt_tokens=n) for n in (64, 128)]
    benchmark_report.plot(rows, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_benchmarks_sh_names_what_it_knows():
    done = subprocess.run(["bash", "benchmarks.sh", "nonsense"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "nonsense" in done.stderr
