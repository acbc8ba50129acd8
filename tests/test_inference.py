"""Prefill, decode and sampling; compiled steps against eager ones."""
import gc
import weakref

import pytest
import torch
from conftest import tiny_config, tiny_model
from torch._dynamo.utils import counters

from backends import fastest_cache
from inference import COLDEST, Engine, check_limits, greedy, make_sampler
from kv_cache import CacheSpec

INT8 = CacheSpec.parse("int8", dtype=torch.float32)
PROMPT = list(range(3, 40))


def tokens(engine, count=20, **options):
    return list(engine.generate(PROMPT, count, **options))


@pytest.mark.parametrize("mask", ["none", "linear"])
def test_compiled_tokens_are_the_eager_ones(mask):
    model = tiny_model(n_layers=6)  # two groups
    eager = tokens(Engine(model, INT8, 64, mask))
    engine = Engine(model, INT8, 64, mask, compile=True, compile_prefill=True, prefill_chunk=16)
    assert engine.warm_up() > 0
    assert tokens(engine) == eager and tokens(engine) == eager


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_compiled_from_nothing_with_the_fastest_cache(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # a warm cache hides what does not compile
    model, spec = tiny_model(), CacheSpec.parse(kind, dtype=torch.float32)
    options = {"cache_class": fastest_cache(torch.device("cpu"))[0], "calibrated": False}
    eager = tokens(Engine(model, spec, 64, **options))
    assert tokens(Engine(model, spec, 64, compile=True, **options)) == eager


def test_two_compiled_engines_do_not_share_graphs():
    model = tiny_model()
    expected = tokens(Engine(model, CacheSpec(dtype=torch.float32), 64))
    first = Engine(model, INT8, 64, compile=True)
    tokens(first)
    assert tokens(Engine(model, CacheSpec(dtype=torch.float32), 64, compile=True)) == expected


def test_decode_compiles_once_for_all_positions():
    counters.clear()
    engine = Engine(tiny_model(n_layers=6), INT8, 256, compile=True)
    assert len(tokens(engine, 200)) == 200
    assert counters["stats"]["unique_graphs"] == 1


def test_a_compiled_engine_goes_with_its_caches():
    engine = Engine(tiny_model(), INT8, 64, compile=True)
    tokens(engine)
    cache = weakref.ref(engine.model.layers[1].attention.cache.k_values)
    other = Engine(engine.model, INT8, 64)  # it has other caches
    with pytest.raises(ValueError, match="make a new Engine"):
        tokens(engine)
    del engine
    gc.collect()
    assert cache() is None and len(tokens(other)) == 20


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_prefill_chunk_does_not_change_the_tokens(chunk):
    model = tiny_model()
    assert tokens(Engine(model, INT8, 64, prefill_chunk=chunk)) == tokens(Engine(model, INT8, 64))


def test_counts_and_timing():
    engine = Engine(tiny_model(), INT8, 64)
    assert tokens(engine, 0) == []
    assert len(tokens(engine, 1)) == 1 and engine.timing.decode_steps == 0
    assert len(tokens(engine, 5)) == 5 and engine.timing.decode_steps == 4
    assert engine.timing.depth == len(PROMPT) and engine.timing.time_to_first_token_s > 0


def test_generation_ends_with_a_stop_token():
    engine = Engine(tiny_model(), INT8, 64)
    free = tokens(engine)
    stop = free[4]
    assert tokens(engine, stop_ids={stop}) == free[:free.index(stop) + 1]


def test_a_second_turn_feeds_only_what_is_new():
    model = tiny_model()
    engine = Engine(model, INT8, 128)
    reply = tokens(engine, 10)
    history = PROMPT + reply + [7, 8, 9]
    fresh = list(Engine(model, INT8, 128).generate(history, 10))
    engine = Engine(model, INT8, 128)
    tokens(engine, 10)
    kept = len(PROMPT) + 9  # the last token of the reply was sampled, not fed
    assert list(engine.generate(history[kept:], 10, start=kept)) == fresh
    assert engine.timing.fed == len(history) - kept


def test_assumed_depth_costs_no_prefill_and_reads_the_filled_slots():
    engine = Engine(tiny_model(), INT8, 256)
    torch.manual_seed(0)
    engine.assume_filled(200)
    assert len(list(engine.generate([5], 10, start=200))) == 10
    cache = engine.model.layers[1].attention.cache
    assert (cache.k_values[0, 0, :200] != 0).any(-1).all()


def test_greedy_and_top_k_of_one_agree():
    logits = torch.randn(5, 100)
    assert torch.equal(make_sampler(0)(logits), greedy(logits))
    assert torch.equal(make_sampler(1.0, top_k=1)(logits), greedy(logits))
    assert torch.equal(make_sampler(1.0, top_p=1e-6)(logits), greedy(logits))
    assert torch.equal(make_sampler(1e-300)(logits), greedy(logits))
    assert torch.equal(make_sampler(COLDEST)(logits), greedy(logits))


def test_sampling_follows_the_probabilities():
    torch.manual_seed(0)
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(20000, 4)
    share = make_sampler(1.0)(logits).bincount(minlength=4) / 20000
    torch.testing.assert_close(share, torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.02, rtol=0)
    share = make_sampler(1.0, top_k=2)(logits).bincount(minlength=4) / 20000
    torch.testing.assert_close(share, torch.tensor([0.625, 0.375, 0, 0]), atol=0.02, rtol=0)
    share = make_sampler(1.0, top_p=0.85)(logits).bincount(minlength=4) / 20000
    torch.testing.assert_close(share, torch.tensor([0.526, 0.316, 0.158, 0]), atol=0.02, rtol=0)
    share = make_sampler(0.5)(logits).bincount(minlength=4) / 20000
    torch.testing.assert_close(share, torch.tensor([0.685, 0.247, 0.062, 0.007]), atol=0.02, rtol=0)


@pytest.mark.parametrize("options", [
    {"temperature": -1}, {"temperature": float("nan")}, {"temperature": float("inf")},
    {"top_k": 0}, {"top_p": 0}, {"top_p": 1.5}, {"top_p": float("nan")}])
def test_bad_sampling_is_refused(options):
    with pytest.raises(ValueError, match="sampling"):
        make_sampler(**options)


@pytest.mark.parametrize("prompt,new,size,message", [
    (0, 5, 64, "--prompt"), (60, 5, 64, "--cache_size 65"), (300, 5, 256, "256 positions"),
    (10, -1, 64, "--max_new_tokens"), (10, 5, 300, "--cache_size 256")])
def test_limits_name_the_flag_that_helps(prompt, new, size, message):
    with pytest.raises(ValueError, match=message):
        check_limits(prompt, new, size, tiny_config())
