"""The tables of the speed and the accuracy benchmarks."""
import json

import pytest
import torch
from conftest import tiny_model

import accuracy_plot
import attention_cpu
import bench_attention
from bench_speed import in_turn, make_parser, measure, table
from cpu_extension import find_compiler
from inference import Engine
from kv_cache import CacheSpec


def row(system, kv, depth, fed, prefill_s, decode):
    return {"system": system, "kv": kv, "depth": depth, "fed": fed, "prefill_s": prefill_s,
            "decode_tokens_per_s": decode}


def test_ratios_are_of_medians_and_prefill_is_the_average_over_all_tokens():
    rows = [row("gpt-long", "int8", 16, 16, 0.1, d) for d in (90, 100, 300)]
    rows += [row("gpt-long", "int8", 1000, 984, 0.9, 80)]
    rows += [row("llama.cpp", "q8_0", 16, 16, 1, 50), row("llama.cpp", "q8_0", 1000, 984, 9, 20)]
    text = table(rows, [16, 1000])
    assert "| gpt-long, int8 cache | 100.0 | 80.0 | 1000.0 |" in text
    assert "| **int8 / llama.cpp q8_0** | 2.00 | 4.00 | 10.00 |" in text


def test_depths_are_reached_by_prefill_and_decode_starts_there():
    engine = Engine(tiny_model(), CacheSpec.parse("int8"), 64)
    torch.manual_seed(0)
    found = list(measure(engine, [8, 30], 4))
    assert [(r["depth"], r["fed"]) for r in found] == [(8, 8), (30, 22)]
    assert engine.timing.depth == 30 and engine.timing.decode_steps == 4


def test_our_caches_take_turns_in_one_process(tiny_checkpoint):
    flags = ["--checkpoint_path", str(tiny_checkpoint), "--caches", "16,int8,int8@40", "--depths", "4,20",
             "--steps", "3", "--rounds", "2"]
    lines = in_turn(make_parser().parse_args(flags)).splitlines()
    assert lines[0] == "| decode tokens/s | depth 4 | depth 20 |" and len(lines) == 7
    assert lines[2].startswith("| 16 |") and lines[2].count("(1.00)") == 2
    assert lines[4].startswith("| int8@40 |") and lines[4].count("(") == 2


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_every_way_of_attention_runs():
    assert attention_cpu.load() == ""
    shape = bench_attention.Shape(2, 2, 32)
    text = bench_attention.table({20: bench_attention.measure(shape, 20, 0)}, shape)
    assert "C++ int4" in text and text.splitlines()[2].startswith("| 20 |")


def test_bits_follow_from_bytes_and_each_system_has_its_own_baseline(tmp_path):
    ours = [{"cache": kind, "bytes_per_token": n, "perplexity": p, "kl": kl, "kl_p99": kl, "top1": 1.0}
            for kind, n, p, kl in (("bf16", 64, 50.0, 0.0), ("int4", 20, 51.0, 0.01))]
    peer = [{"system": "llama.cpp", "cache": kind, "bits": bits, "perplexity": p, "kl": kl, "top1": 1.0}
            for kind, bits, p, kl in (("f16", 16, 40.0, 0.0), ("q4_0", 4.5, 44.0, 0.05))]
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"rows": ours}, {"rows": ours}, *peer])))
    rows = accuracy_plot.read_rows(path)
    assert [r["cache"] for r in rows] == ["bf16", "int4", "int4", "f16", "q4_0"] and rows[1]["bits"] == 5
    text = accuracy_plot.table(rows)
    assert "+2.00 %" in text and "+10.00 %" in text
    pytest.importorskip("matplotlib")
    accuracy_plot.draw(rows, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
