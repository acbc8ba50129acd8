"""evaluate.py, metrics.py and needle.py on tiny random models, against figures computed the slow way."""
import builtins
import json
import math
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

import evaluate
import metrics
from kv_cache import CacheSpec, attach
from load import random_model
from model import ModelConfig, Transformer
from needle import Needle, hit_rates, make_needles
from tokenizer import load_tokenizer

CONFIG = ModelConfig(vocab_size=258, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32,
                     intermediate_size=96, max_position_embeddings=512)
SPECS = {"bf16": CacheSpec(), "int8:d": CacheSpec.parse("int8"), "int8:hd": CacheSpec.parse("int8", "hd")}
CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
TEXT = "It is a way I have of driving off the spleen. The sea was calm, and the whale slept. " * 30


def make_model() -> Transformer:
    """Float32 and random, its output layer loud enough that predictions are not all alike."""
    torch.manual_seed(0)
    model = random_model(CONFIG, dtype=torch.float32)
    model.lm_head.weight.mul_(3)
    return model


def make_windows(count: int = 2, length: int = 90) -> torch.Tensor:
    return torch.randint(CONFIG.vocab_size, (count, length), generator=torch.Generator().manual_seed(1))


def write_checkpoint(folder: Path, chat: bool = True) -> Path:
    """A checkpoint with a tokenizer of single bytes; the path of its model.pth."""
    torch.save(make_model().state_dict(), folder / "model.pth")
    (folder / "config.json").write_text(json.dumps(CONFIG.to_dict()))
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tok = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tok.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", **({"chat_template": CHATML} if chat else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "text.txt").write_text(TEXT)
    return folder / "model.pth"


def run(folder: Path, task: str, *flags: str) -> None:
    evaluate.main([task, "--checkpoint_path", str(folder / "model.pth"), "--text", str(folder / "text.txt"),
                   "--device", "cpu", *flags])


def last_rows(capsys: pytest.CaptureFixture) -> list[dict]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]


@torch.inference_mode()
def slow_log_probs(model: Transformer, window: torch.Tensor, spec: CacheSpec) -> torch.Tensor:
    """float64 [W, V]: all logits of a window computed at once."""
    attach(model, spec, 1, len(window))
    logits = model(window[None], torch.tensor([0]), all_logits=True)
    return logits[0].double().log_softmax(-1)


def test_figures_equal_the_slow_twin() -> None:
    model, windows = make_model(), make_windows()
    rows = evaluate.compare_caches(model, windows, SPECS, chunk=32)
    assert [row["cache"] for row in rows] == list(SPECS)
    for row in rows:
        nll, kl, top = [], [], []
        for window in windows:
            a, b = (slow_log_probs(model, window, SPECS[name]) for name in ("bf16", row["cache"]))
            nll += [-b[t, window[t + 1]].item() for t in range(len(window) - 1)]
            kl += (a.exp() * (a - b)).sum(-1).tolist()
            top += (a.argmax(-1) == b.argmax(-1)).tolist()
        expected = math.exp(np.mean(nll))
        assert row["perplexity"] == pytest.approx(expected, rel=1e-5)
        stderr = expected * np.std(nll, ddof=1) / len(nll) ** 0.5
        assert row["perplexity_stderr"] == pytest.approx(stderr, rel=1e-4)
        assert row["kl"] == pytest.approx(np.mean(kl), rel=1e-3, abs=1e-9)
        assert row["kl_p99"] == pytest.approx(np.percentile(kl, 99), rel=1e-3, abs=1e-9)
        assert row["top1"] == pytest.approx(np.mean(top), abs=1 / len(top))
    assert rows[1]["kl"] > 1e-6  # the quantized cache was read


def test_baseline_against_itself_is_zero() -> None:
    specs = {"bf16": CacheSpec(), "again": CacheSpec()}
    base, twin = evaluate.compare_caches(make_model(), make_windows(), specs)
    for row in (base, twin):
        assert (row["kl"], row["kl_p99"], row["top1"]) == (0, 0, 1)
    assert base["perplexity"] == twin["perplexity"]


@pytest.mark.parametrize("chunk", [1, 7, 32, 512])
def test_chunks_do_not_change_the_figures(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, windows = make_model(), make_windows(2, 40)
    whole = evaluate.compare_caches(model, windows, SPECS, chunk=40)
    monkeypatch.setattr(evaluate, "LOGIT_ROWS", 5)
    for a, b in zip(whole, evaluate.compare_caches(model, windows, SPECS, chunk=chunk), strict=True):
        # A value that rounds the other way after a different summation order moves a little.
        assert b["perplexity"] == pytest.approx(a["perplexity"], rel=1e-4)
        assert b["kl"] == pytest.approx(a["kl"], rel=0.02, abs=1e-6)
        assert b["bytes_per_token"] == a["bytes_per_token"]


def test_windows_do_not_see_each_other() -> None:
    model, windows = make_model(), make_windows(3)
    alone = [evaluate.compare_caches(model, window[None], SPECS)[1] for window in windows]
    together = evaluate.compare_caches(model, windows, SPECS)[1]
    assert together["kl"] == pytest.approx(np.mean([row["kl"] for row in alone]), rel=1e-5)
    assert math.log(together["perplexity"]) == pytest.approx(
        np.mean([math.log(row["perplexity"]) for row in alone]), rel=1e-6)


def test_logits_are_made_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = make_model(), []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.shape[0]))
    evaluate.compare_caches(model, make_windows(1, 200), SPECS, chunk=150)
    assert max(seen) <= evaluate.LOGIT_ROWS and sum(seen) == 200 * len(SPECS)


def test_bytes_per_token() -> None:
    rows = evaluate.compare_caches(make_model(), make_windows(1, 64), SPECS)
    values, layers = 2 * CONFIG.n_kv_heads * CONFIG.head_dim, CONFIG.n_layers
    assert [row["bytes_per_token"] for row in rows] == [
        layers * 2 * values, layers * (values + 2 * CONFIG.n_kv_heads * 2), layers * (values + 2 * 2)]


def test_baseline_stores_bfloat16_whatever_the_precision(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    for precision in ([], ["--precision", "bf16"]):
        args = evaluate.make_parser().parse_args(
            ["perplexity", "--checkpoint_path", str(path), "--compare", "int8,16,8:hd, 8,8", *precision])
        specs = evaluate.plan(args).specs
        assert args.precision == (precision or ["", "fp32"])[1]
        assert {spec.dtype for spec in specs.values()} == {torch.bfloat16}
        assert list(specs) == ["bf16", "int8", "16,8:hd", "8,8"]
        assert [(s.k_bits, s.v_bits, s.axis) for s in specs.values()] == [
            (16, 16, "d"), (8, 8, "d"), (16, 8, "hd"), (8, 8, "d")]


def test_perplexity_prints_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_checkpoint(tmp_path)
    flags = ["--window", "64", "--windows", "2", "--json"]
    run(tmp_path, "perplexity", *flags, "--compare", "int8:d,int8:hd")
    out = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in out[:-1]] == ["cache", "---", "bf16", "int8:d", "int8:hd"]
    rows = json.loads(out[-1])["rows"]
    assert list(rows[0]) == ["cache", "perplexity", "perplexity_stderr", "kl", "kl_p99", "top1",
                             "bytes_per_token"]
    run(tmp_path, "perplexity", *flags, "--kv_cache_quantization", "--kv_quant_axis", "hd",
        "--prefill_chunk", "20")
    base, quantized = last_rows(capsys)
    assert (base["cache"], quantized["cache"]) == ("bf16", "int8:hd")
    assert quantized["kl"] == pytest.approx(rows[2]["kl"], rel=0.02)


@pytest.mark.parametrize("task, flags, expected", [
    ("perplexity", ["--window", "500", "--windows", "9"], "4500"),
    ("perplexity", ["--window", "64", "--compare", "int8:d,int9"], "int9"),
    ("perplexity", ["--window", "64", "--compare", "int8:x"], "'x'"),
    ("perplexity", ["--window", "64", "--compare", ","], "names no cache"),
    ("perplexity", ["--compare", "int8", "--kv_cache_quantization", "int8"], "not both"),
    ("perplexity", ["--window", "600"], "512"),
    ("perplexity", ["--window", "64", "--cache_size", "32"], "--cache_size"),
    ("perplexity", ["--window", "1"], "--window"),
    ("perplexity", ["--windows", "0"], "--windows"),
    ("rouge", ["--prompts", "1000"], "256000"),
    ("rouge", ["--prompt_tokens", "500", "--prompts", "2"], "564"),
    ("rouge", ["--data", "nowhere.jsonl"], "nowhere.jsonl"),
    ("rouge", ["--chat"], "--data"),
    ("needle", ["--context", "100"], "--context"),
    ("needle", ["--context", "5000"], "5000"),
    ("needle", ["--text", "nowhere.txt"], "nowhere.txt")])
def test_errors_are_one_line_before_the_model_is_loaded(
        task: str, flags: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture,
        monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path)
    monkeypatch.setattr(evaluate.backends, "load_model", lambda *args: pytest.fail("loaded"))
    with pytest.raises(SystemExit) as exit_:
        run(tmp_path, task, *flags)
    captured = capsys.readouterr()
    assert exit_.value.code == 2 and captured.out == ""
    assert captured.err.count("\n") == 1 and expected in captured.err


@pytest.mark.parametrize("line", ["no json", "[1]", '{"prompt": "a"}', '{"prompt": "a", "reference": 1}'])
def test_bad_data_names_its_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "reference": "b\\u2028c"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match="line 3"):
        evaluate.read_pairs(path)


def test_rouge_of_known_strings() -> None:
    pytest.importorskip("rouge_score")
    scores = metrics.rouge(["the cat sat", "running dogs\nblue sky", " same "],
                           ["the cat ran away", "blue sky\nrun dog", "same"])
    # 2 of 3 and 2 of 4 words, 1 of 2 and 1 of 3 pairs; stems agree, and only Lsum forgives the lines' order.
    expected = {"rouge1": [400 / 7, 100, 100], "rouge2": [40, 200 / 3, 0], "rougeL": [400 / 7, 50, 100],
                "rougeLsum": [400 / 7, 100, 100]}
    for kind, values in expected.items():
        assert scores[kind] == pytest.approx(values), kind


def test_missing_rouge_score_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: object, **more: object) -> object:
        if name.startswith("rouge_score"):
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match="pip install rouge-score"):
        metrics.check_rouge()


def test_bootstrap_interval() -> None:
    assert metrics.bootstrap_interval(np.full(9, 2.5)) == (2.5, 2.5)
    differences = np.random.default_rng(3).normal(1, 2, 400)
    low, high = metrics.bootstrap_interval(differences)
    half = 1.96 * differences.std() / 20  # the normal approximation
    assert (low, high) == pytest.approx((differences.mean() - half, differences.mean() + half), abs=0.03)
    assert metrics.bootstrap_interval(differences) == (low, high)
    assert metrics.bootstrap_interval(differences, level=0.5)[1] < high


def test_perplexity_of_known_numbers() -> None:
    value, stderr = metrics.perplexity(np.log([2.0, 8.0]))
    assert value == pytest.approx(4) and stderr == pytest.approx(4 * math.log(2))


def test_rouge_rows_pair_each_cache_with_the_baseline() -> None:
    pytest.importorskip("rouge_score")
    references = ["one two three four"] * 4
    replies = {"bf16": references, "other": references[:1] + ["one two"] * 3}
    base, other = evaluate.rouge_rows(replies, references, seed=0)
    assert base["rouge1"] == 100 and base["difference"]["rouge1"] == {"mean": 0, "low": 0, "high": 0}
    assert other["rouge1"] == 75 and other["rouge2"] == 62.5  # F of 2 of 4 words is 2/3, of 1 of 3 pairs 1/2
    assert other["difference"]["rouge1"]["low"] < other["difference"]["rouge1"]["mean"] == -25
    assert (other["gen_len"], other["gen_num"]) == (18 + 3 * 7, 4)


@pytest.mark.parametrize("from_file", [False, True])
def test_rouge_task(from_file: bool, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("rouge_score")
    write_checkpoint(tmp_path)
    flags = ["--prompts", "2", "--prompt_tokens", "20"]
    if from_file:
        path = tmp_path / "data.jsonl"
        rows = [{"prompt": prompt, "reference": "whale"} for prompt in ("The sea", "A")]
        path.write_text("\n".join(map(json.dumps, rows)))
        flags = ["--data", str(path), "--chat"]
    run(tmp_path, "rouge", *flags, "--max_new_tokens", "8", "--compare", "int8:d", "--json")
    base, other = last_rows(capsys)
    assert [base["cache"], other["cache"]] == ["bf16", "int8:d"]
    assert base["gen_num"] == 2 and set(base["difference"]) == set(metrics.ROUGE_KINDS)


def test_prompts_cut_from_a_text() -> None:
    assert evaluate.cut_prompts(range(20), 2, 3, None) == [[0, 1, 2], [10, 11, 12]]
    assert evaluate.cut_prompts(range(20), 2, 3, 99) == [[99, 0, 1], [99, 10, 11]]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("depth", [0, 0.5, 1])
def test_needle_lies_at_its_depth(chat: bool, depth: float, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, chat)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode(TEXT)
    prompt = Needle("Lima", 12345, depth).prompt(ids, tokenizer, 700)
    text = tokenizer.decode(prompt)
    assert 690 < len(prompt) <= 700
    before, after = text.split("The secret number of Lima is 12345. ")
    assert after.count("secret number of Lima") == (1 if chat else 2)
    assert before.removeprefix("user\n") == "" if depth == 0 else depth == 1 or before.endswith(". ")
    share = len(before) / (len(before) + after.index("\n\n"))
    assert share == pytest.approx(depth, abs=0.12)


def test_hit_rates() -> None:
    needles = make_needles(depths=3, trials=2, seed=0)
    assert [n.depth for n in needles] == [0, 0, 0.5, 0.5, 1, 1] and needles == make_needles(3, 2, 0)
    replies = [f"It is {n.number:,}." if i in (0, 1, 4) else "I do not know." for i, n in enumerate(needles)]
    result = hit_rates(needles, replies)
    assert result["hit_rate"] == 0.5 and result["asked"] == 6
    assert [row["hit_rate"] for row in result["by_depth"]] == [1, 0, 0.5]


def test_needle_task(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_checkpoint(tmp_path)
    flags = ["--context", "400", "--depths", "2", "--trials", "1", "--max_new_tokens", "4", "--json"]
    run(tmp_path, "needle", *flags, "--compare", "int8:hd")
    rows = last_rows(capsys)
    assert [row["cache"] for row in rows] == ["bf16", "int8:hd"]
    assert [r["depth"] for r in rows[0]["by_depth"]] == [0, 1]
