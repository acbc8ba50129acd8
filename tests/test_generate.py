"""generate.py as a person at the shell meets it: streams, messages, exit codes, results."""
import io
import json
import re

import pytest
import torch

import bench_speed
import generate
from chat import print_tokens
from tokenizer import load_tokenizer

FIELDS = {"argv", "model", "device", "torch", "precision", "quantization", "cache", "causal_mask", "bytes",
          "new_tokens", "load_s", "compile_s", "time_to_first_token_s", "prefill_tokens_per_s",
          "decode_tokens_per_s", "depth", "prompt_tokens", "peak_memory_bytes", "peak_memory_how",
          "bandwidth_bytes_per_s"}


@pytest.fixture
def run(monkeypatch, capsys, tiny_checkpoint):
    """Call main with these arguments; (exit code, stdout, stderr)."""
    def call(*arguments: object, checkpoint: bool = True) -> tuple[int, str, str]:
        first = ["--checkpoint_path", str(tiny_checkpoint), "--device", "cpu"] if checkpoint else []
        monkeypatch.setattr("sys.argv", ["generate.py", *first, *map(str, arguments)])
        code = 0
        try:
            generate.main()
        except SystemExit as e:
            code = e.code
        out, err = capsys.readouterr()
        return code, out, err
    return call


def test_text_goes_to_stdout_and_the_summary_to_stderr(run, tmp_path):
    code, out, err = run("--prompt", "ab", "--max_new_tokens", 8, "--write_result", tmp_path / "r.jsonl")
    assert code == 0 and out.strip() and "tokens/s" in err
    row = json.loads((tmp_path / "r.jsonl").read_text())
    assert FIELDS <= row.keys()
    assert {"weights", "embedding", "kv_cache", "kv_scales", "mask"} <= row["bytes"].keys()
    assert row["argv"][0] == "generate.py" and row["prompt_tokens"] == 2 and row["is_text"]


def test_same_seed_same_text(run):
    texts = [run("--prompt", "ab", "--max_new_tokens", 12, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("flags", [
    ["--kv_cache_quantization"], ["--kv_cache_quantization", "int8", "--kv_quant_axis", "hd"],
    ["--kv_cache_layout", "0231,0213"], ["--linear_causal_mask"], ["--causal_mask", "full"],
    ["-q", "int8wo"], ["-q", "int8dq"], ["--quantization", "int4wo-32"], ["--precision", "fp32"],
    ["--precision", "fp32", "-q", "int4wo-64"], ["--precision", "fp16"], ["--prefill_size", "40"],
    ["--kv_cache_quantization", "int4"], ["--kv_cache_quantization", "k8v4", "--kv_strong", "8,0"],
    ["--assume_filled", "100"], ["--chat", "--prompt", "hi"], ["--num_samples", "2"],
    ["--prefill_chunk", "3"], ["--attention", "plain", "-q", "int4wo-32"],
    ["--temperature", "0"], ["--top_k", "3", "--top_p", "0.5"], ["--ignore_eos"]])
def test_flags_work(run, flags):
    code, out, err = run(*flags, "--max_new_tokens", 4)
    assert code == 0, err
    assert "decode" in err


def test_compile_and_profile(run, tmp_path):
    plain = run("--prompt", "ab", "--temperature", 0, "--max_new_tokens", 6)[1]
    code, out, err = run("--prompt", "ab", "--temperature", 0, "--max_new_tokens", 6, "--compile",
                         "--profile", tmp_path / "trace.json")
    assert code == 0 and out == plain
    assert "traceEvents" in (tmp_path / "trace.json").read_text()


def test_random_weights_need_no_checkpoint(run, tiny_checkpoint, tmp_path):
    code, out, err = run("--random_weights", tiny_checkpoint.with_name("config.json"), "-q", "int4wo-32",
                         "--max_new_tokens", 3, "--device", "cpu", "--write_result", tmp_path / "r",
                         checkpoint=False)
    assert code == 0 and "not text" in err
    row = json.loads((tmp_path / "r").read_text())
    assert row["random_weights"] and not row["is_text"]


@pytest.mark.parametrize("flags,message", [
    (["--prompt", "a" * 300], "256 positions"),
    (["--cache_size", "8", "--prompt", "abcd"], "--cache_size 204"),
    (["--cache_size", "1000"], "--cache_size 256"), (["-q", "int4"], "int4wo-64"),
    (["--kv_cache_quantization", "int7"], "int8"), (["--kv_cache_quantization", "3,8"], "16, 8"),
    (["--kv_quant_axis", "z"], "'d', 'hd'"),
    (["--kv_quant_axis", "hd", "--kv_cache_quantization", "k8v4"], "--kv_quant_axis hd"),
    (["--kv_strong", "7,8"], "--kv_strong"), (["--kv_cache_layout", "bhs"], "bhsd"),
    (["--prompt", ""], "--prompt"),
    (["--prompt_file", "nowhere.txt"], "nowhere.txt"), (["--temperature", "-1"], "temperature"),
    (["--device", "abacus"], "cpu or cuda"), (["--no_such_flag"], "--help"),
    (["--device", "cpu:1"], "cpu or cuda"), (["--device", "cuda:"], "cpu or cuda"),
    (["--prefill_chunk", "0"], "from 1 to"), (["--prefill_chunk", "1e3"], "--prefill_chunk"),
    (["--num_samples", "0"], "from 1 to"), (["--max_new_tokens", "-2"], "--max_new_tokens"),
    (["--temperature", "nan"], "--temperature"), (["--temperature", "inf"], "--temperature"),
    (["--top_p", "nan"], "--top_p"), (["--top_p", "0"], "--top_p"), (["--top_k", "0"], "--top_k"),
    (["--seed", "-1"], "--seed"), (["--seed", str(2 ** 64)], str(2 ** 64 - 1)),
    (["--prefill_size", "9" * 30], "--prefill_size"), (["--prefill_size", "2000000000"], "256 positions"),
    (["--assume_filled", "2000000000"], "--max_new_tokens"), (["--cache_size", "9" * 9], "--cache_size 256"),
    (["--prompt_file", "."], "--prompt_file: . is a folder"), (["--write_result", "."], "folder"),
    (["--write_result", "nowhere/r.jsonl"], "no folder nowhere"), (["--profile", "nowhere/t"], "--profile"),
    (["--random_weights", "x.json"], "--checkpoint_path")])
def test_mistakes_get_one_line_and_exit_code_2(run, flags, message):
    code, out, err = run(*flags)
    assert code == 2 and out == "" and message in err
    assert len(err.strip().splitlines()) <= 2 and "Traceback" not in err


def test_missing_files_are_named(run, tmp_path):
    code, _, err = run("--checkpoint_path", tmp_path / "model.pth", checkpoint=False)
    assert code == 2 and "model.pth does not exist" in err
    (tmp_path / "model.pth").touch()
    code, _, err = run("--checkpoint_path", tmp_path / "model.pth", checkpoint=False)
    assert code == 2 and "config.json does not exist" in err
    code, _, err = run("--checkpoint_path", tmp_path, checkpoint=False)
    assert code == 2 and "is a folder" in err
    code, _, err = run("--random_weights", tmp_path / "c.json", checkpoint=False)
    assert code == 2 and "c.json does not exist" in err


def test_a_prompt_file_of_another_encoding_is_named(run, tmp_path):
    (tmp_path / "latin1.txt").write_bytes("naïve".encode("latin-1"))
    code, out, err = run("--prompt_file", tmp_path / "latin1.txt")
    assert code == 2 and "latin1.txt is no UTF-8" in err and len(err.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_cuda_without_a_device(run):
    code, _, err = run("--device", "cuda")
    assert code == 2 and "--device cpu" in err


def test_keys_of_config_json_that_are_not_read_are_named(run, tiny_checkpoint, tmp_path):
    facts = json.loads(tiny_checkpoint.with_name("config.json").read_text()) | {"frobnication": 3}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    code, _, err = run("--random_weights", tmp_path / "config.json", "--max_new_tokens", 1, checkpoint=False)
    assert code == 0 and len([line for line in err.splitlines() if "frobnication" in line]) == 1


def test_zero_and_one_new_token(run):
    code, out, err = run("--prompt", "ab", "--max_new_tokens", 0)
    assert code == 0 and out.strip() == "" and "no decode step" in err
    assert run("--prompt", "ab", "--max_new_tokens", 1)[0] == 0


def test_a_character_cut_by_the_last_token_is_not_shown(tiny_checkpoint, capsys):
    tokenizer = load_tokenizer(tiny_checkpoint.parent)
    ids = tokenizer.encode("a\N{SLIGHTLY SMILING FACE}")
    for cut, text in ((0, "a\N{SLIGHTLY SMILING FACE}\n"), (1, "a\n"), (4, "a\n")):
        assert print_tokens(ids[:len(ids) - cut], tokenizer, frozenset()) == len(ids) - cut
        assert capsys.readouterr().out == text


@pytest.mark.parametrize("flags", [[], ["-q", "int4wo-64"], ["-q", "int8wo", "--assume_filled", "40"]])
def test_the_seed_reaches_all_that_is_random(run, flags, tiny_checkpoint):
    """Weights, the made-up prompt and assumed contents; greedy, so that sampling hides nothing."""
    def tokens(seed: int, *more: str) -> str:
        code, out, err = run("--random_weights", tiny_checkpoint.with_name("config.json"), *flags, *more,
                             "--temperature", 0, "--max_new_tokens", 12, "--device", "cpu", "--seed", seed,
                             checkpoint=False)
        assert code == 0, err
        return out
    first = tokens(1)
    torch.rand(5)  # what ran before must not matter
    assert tokens(1) == first != tokens(2)
    assert tokens(2 ** 64 - 1) != first


def test_the_seed_reaches_the_weights_of_bench_speed(tiny_checkpoint):
    flags = ["--random_weights", str(tiny_checkpoint.with_name("config.json")), "--device", "cpu"]

    def tokens(seed: str) -> list[int]:
        args = bench_speed.make_parser().parse_args([*flags, "--seed", seed])
        return list(bench_speed.build(args, 64).generate([5], 12))
    assert tokens("1") == tokens("1") != tokens("2")


def test_prompt_from_a_file(run, tmp_path):
    (tmp_path / "p.txt").write_text("ab", encoding="utf-8")
    flags = ("--temperature", 0, "--max_new_tokens", 6)
    assert run("--prompt_file", tmp_path / "p.txt", *flags)[1] == run("--prompt", "ab", *flags)[1]


def test_chat_turns_keep_the_cache(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nand you?\n\n"))
    code, out, err = run("--interactive", "--max_new_tokens", 5, "--temperature", 0)
    assert code == 0 and len(err.split("tokens fed")) == 3
    kept = [int(n) for n in re.findall(r"(\d+) kept", err)]
    assert kept[0] == 0 and kept[1] > 8


def test_chat_stops_when_the_cache_is_full(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n" * 50))
    code, out, err = run("--interactive", "--max_new_tokens", 5, "--cache_size", 64)
    assert code == 0 and "--cache_size" in err
