"""The cache: quantizer, storage orders, and attention that sees what is stored and nothing else."""
import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_cache import (
    LEVELS,
    CacheSpec,
    KVCache,
    attach,
    attend_blocks,
    default_basis,
    dequantize,
    detach,
    integers,
    parse_layout,
    quantize,
    quantize4,
)

ORDERS = ["".join(order) for order in itertools.permutations("bhsd")]
KINDS = [None, "int8", "8,16", "16,8", "int4", "k8v4"]
KINDS_AND_AXES = [*itertools.product(KINDS[:4], ["d", "hd"]), ("int4", "d"), ("k8v4", "d")]


def filled_cache(spec, B=2, H=2, S=40, D=16, length=30, **options):
    torch.manual_seed(1)
    cache = KVCache(spec, B, H, S, D, **options)
    cache.write(torch.zeros(B, dtype=torch.int64), torch.randn(B, H, length, D), torch.randn(B, H, length, D))
    return cache


def slow_attention(q, start, k, v):
    """Row by row, query by query, over dequantized k, v [B, H, S, D] in float64."""
    B, Hq, T, D = q.shape
    group = Hq // k.shape[1]
    y = torch.empty(q.shape, dtype=torch.float64)
    for b, h, t in itertools.product(range(B), range(Hq), range(T)):
        n = int(start[b]) + t + 1
        scores = k[b, h // group, :n].double() @ q[b, h, t].double() / D ** 0.5
        y[b, h, t] = scores.softmax(-1) @ v[b, h // group, :n].double()
    return y


@pytest.mark.parametrize("axis", ["d", "hd"])
def test_quantizer_error_is_at_most_half_a_step(axis):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 50, 32) * torch.logspace(-6, 4, 50)[:, None]
    x[:, 1] *= 16  # heads far apart
    values, scales = quantize(x, axis)
    assert values.dtype == torch.int8 and scales.shape == (2, 4 if axis == "d" else 1, 50)
    step = scales.float()[..., None]
    error = (dequantize(values, scales, torch.float32) - x).abs()
    assert (error <= step * 0.5 * (1 + 2e-3)).all()
    assert values.min() >= -127


def test_largest_value_keeps_its_sign():
    x = torch.zeros(1, 1, 1000, 16)
    peaks = torch.linspace(0.1, 9, 1000)
    x[0, 0, :, 3], x[0, 0, :, 5] = peaks, -peaks
    values, _ = quantize(x, "d")
    assert (values[0, 0, :, 3] >= 126).all() and (values[0, 0, :, 5] <= -126).all()


@pytest.mark.parametrize("axis", ["d", "hd"])
def test_zero_rows_stay_zero(axis):
    values, scales = quantize(torch.zeros(1, 2, 3, 16), axis)
    assert (values == 0).all() and (scales > 0).all()


def test_scale_that_divides_is_the_stored_one():
    x = torch.randn(1, 2, 64, 16)
    values, scales = quantize(x, "d")
    assert torch.equal(values.float(), (x / scales.float()[..., None]).round().clamp(-127, 127))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(KINDS_AND_AXES), st.integers(1, 4), st.integers(1, 3), st.integers(1, 9),
       st.lists(st.integers(0, 20), min_size=1, max_size=3), st.sampled_from([4, 7, 64]))
def test_attention_by_blocks_equals_the_slow_one(kind, H, G, T, starts, block):
    torch.manual_seed(2)
    B, D, start = len(starts), 16, torch.tensor(starts)
    cache = filled_cache(CacheSpec.parse(*kind, dtype=torch.float32), B, H, 32, D, 29)
    q = torch.randn(B, H * G, T, D)
    cached = (cache.k_values, cache.k_scales, cache.v_values, cache.v_scales)
    k = dequantize(cache.k_values, cache.k_scales, torch.float32, D)
    v = dequantize(cache.v_values, cache.v_scales, torch.float32, D)
    expected = slow_attention(q, start, k, v)
    y = attend_blocks(q, start, *cached, block=block)
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mask", ["none", "linear", "full"])
def test_every_storage_order_gives_the_same_numbers(mask):
    results = []
    table = torch.ones(40, 40, dtype=torch.bool).tril()
    for k_order, v_order in zip(ORDERS, reversed(ORDERS), strict=True):
        spec = CacheSpec.parse("int8", "d", f"{k_order},{v_order}", torch.float32)
        cache = filled_cache(spec, causal_mask=mask, mask_table=table)
        assert cache.k_values.shape == (2, 2, 40, 16)
        results.append(cache.attend(torch.ones(2, 6, 1, 16), torch.tensor([29, 11])))
    assert all(torch.allclose(r, results[0], atol=1e-6) for r in results)


def test_storage_order_is_the_one_asked_for():
    cache = KVCache(CacheSpec(k_layout="0231", v_layout="sbhd"), 2, 3, 5, 16)
    assert cache.k_values.permute(0, 1, 3, 2).is_contiguous()  # bhds
    assert cache.v_values.permute(2, 0, 1, 3).is_contiguous()


@pytest.mark.parametrize("kind,axis", KINDS_AND_AXES)
def test_planned_bytes_are_measured_bytes(kind, axis):
    spec = CacheSpec.parse(kind, axis)
    assert KVCache(spec, 3, 2, 33, 16).nbytes == spec.nbytes(3, 2, 33, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_slots_past_the_filled_length_never_matter(kind):
    spec = CacheSpec.parse(kind, dtype=torch.float32)
    clean, poisoned = filled_cache(spec), filled_cache(spec)
    for row, filled in enumerate((12, 25)):
        both = ((poisoned.k_values, poisoned.k_scales), (poisoned.v_values, poisoned.v_scales))
        for values, scales in both:
            values[row, :, filled:] = torch.nan if values.is_floating_point() else 127
            if scales is not None:
                scales[row, :, filled:] = torch.nan
    q, start = torch.randn(2, 4, 5, 16), torch.tensor([7, 20])
    assert torch.equal(poisoned.attend(q, start), clean.attend(q, start))


@pytest.mark.parametrize("kind,axis,order,mask", [
    *itertools.product([None, "int8"], ["d", "hd"], ["bhsd", "dhsb"], ["none", "linear", "full"]),
    *itertools.product(["int4", "k8v4"], ["d"], ["bhsd", "dhsb"], ["none", "linear"])])
def test_chunked_is_one_shot_is_token_by_token(kind, axis, order, mask):
    model = tiny_model()
    ids = torch.randint(0, 300, (1, 40), generator=torch.Generator().manual_seed(3))
    outputs = []
    for cuts in ([40], [40], [7, 20, 13], [1] * 40):
        attach(model, CacheSpec.parse(kind, axis, order, torch.float32), 1, 64, mask)
        parts, position = [], 0
        for n in cuts:
            parts.append(model(ids[:, position:position + n], torch.tensor([position]), all_logits=True))
            position += n
        outputs.append(torch.cat(parts, 1))
    assert torch.equal(outputs[0], outputs[1])
    for other in outputs[2:]:
        torch.testing.assert_close(other, outputs[0], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_second_call_overwrites_the_first(kind):
    model = tiny_model()
    attach(model, CacheSpec.parse(kind, dtype=torch.float32), 1, 64)
    a, b = torch.randint(0, 300, (2, 1, 30))
    zero = torch.tensor([0])
    first = model(a, zero)
    model(b, zero)
    assert torch.equal(model(a, zero), first)


@pytest.mark.parametrize("kind,mask", [
    ("int8", "none"), ("int8", "linear"), ("int8", "full"), ("int4", "none")])
def test_batch_rows_of_different_lengths_are_as_if_alone(kind, mask):
    model = tiny_model()
    spec = CacheSpec.parse(kind, dtype=torch.float32)
    prompts = torch.randint(0, 300, (2, 20))
    lengths, token = [20, 9], torch.tensor([[5], [6]])
    alone = []
    for row, n in enumerate(lengths):
        attach(model, spec, 1, 64, mask)
        model(prompts[row:row + 1, :n], torch.tensor([0]))
        alone.append(model(token[row:row + 1], torch.tensor([n])))
    attach(model, spec, 2, 64, mask)
    model(prompts, torch.tensor([0, 0]))  # the shorter row's tail is overwritten by what follows
    together = model(token, torch.tensor(lengths))
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_attach_replaces_what_was_there():
    model = tiny_model()
    attach(model, CacheSpec.parse("int8"), 1, 32)
    attach(model, CacheSpec(dtype=torch.float32), 2, 16)
    cache = model.layers[0].attention.cache
    assert cache.k_values.dtype == torch.float32 and cache.k_values.shape == (2, 2, 16, 16)
    assert cache.k_scales is None


def test_a_foreign_cache_works():
    class Growing:
        """Keeps everything in lists; shares nothing with KVCache but two methods."""
        def __init__(self):
            self.k, self.v = [], []

        def write(self, start, k, v):
            self.k.append(k)
            self.v.append(v)

        def attend(self, q, start):
            group = q.shape[1] // self.k[0].shape[1]
            k, v = (torch.cat(x, 2).repeat_interleave(group, 1) for x in (self.k, self.v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    model, ids, zero = tiny_model(), torch.randint(0, 300, (1, 12)), torch.tensor([0])
    attach(model, CacheSpec(dtype=torch.float32), 1, 16)
    expected = model(ids, zero)
    detach(model)
    for layer in model.layers:
        layer.attention.cache = Growing()
    torch.testing.assert_close(model(ids, zero), expected, atol=1e-5, rtol=1e-5)


def test_model_without_cache_says_what_to_do():
    with pytest.raises(ValueError, match="attach"):
        tiny_model()(torch.tensor([[1]]), torch.tensor([0]))


@pytest.mark.parametrize("text,letters", [
    ("bhsd", "bhsd"), ("0213", "bhsd"), ("0231", "bhds"), ("3120", "dshb")])
def test_layouts_as_letters_and_digits(text, letters):
    assert parse_layout(text) == letters


@pytest.mark.parametrize("arguments", [
    ("int3",), ("7,8",), ("8,8,8",), ("int4", "hd"), ("k8v4", "hd"), ("int8", "x"), ("int8", "d", "bhs"),
    ("int8", "d", "bhss"),
    ("int8", "d", "bhsd,bhsd,bhsd")])
def test_bad_specs_are_refused(arguments):
    with pytest.raises(ValueError, match="supported|known|axes|order|legal"):
        CacheSpec.parse(*arguments)


def test_maxtext_axis_names():
    assert CacheSpec.parse("int8", "heads_and_dkv") == CacheSpec.parse("int8", "hd")


@pytest.mark.parametrize("D", [16, 32, 64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("strong", [0, 8])
def test_four_bit_basis_inverts_and_leaves_scores_alone(D, strong):
    into, back = default_basis(D, strong)
    torch.testing.assert_close(into @ back.mT, torch.eye(D), atol=1e-5, rtol=0)
    q, k = torch.randn(2, 50, D)
    torch.testing.assert_close((q @ back) @ (k @ into).mT, q @ k.mT, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("strong", [0, 8, 16])
def test_four_bit_packing_inverts(strong):
    torch.manual_seed(0)
    x = torch.randn(3, 2, 40, 64) * torch.logspace(-5, 3, 40)[:, None]
    values, scales = quantize4(x, strong)
    assert values.dtype == torch.uint8 and values.shape == (3, 2, 40, (64 + strong) // 2)
    numbers = integers(values, 64)
    levels, step = torch.tensor(LEVELS), scales.float()[..., None]
    expected = (x[..., :strong] / step).round()
    assert torch.equal(numbers[..., :strong].float(), expected)
    nearest = (x[..., strong:, None] / step[..., None] - levels).abs().argmin(-1)
    assert torch.equal(numbers[..., strong:], levels.to(torch.int8)[nearest])
    error = dequantize(values, scales, torch.float32, 64) - x
    assert error.square().sum() < 0.012 * x.square().sum()  # a Gaussian at four bits: 0.0095


def test_four_bits_of_nothing_and_of_outliers():
    values, scales = quantize4(torch.zeros(1, 1, 2, 32), 8)
    assert (dequantize(values, scales, torch.float32, 32) == 0).sum() == 16 and scales.float().max() < 1e-6
    x = torch.randn(1, 1, 100, 64)
    x[..., 3] = 50.0  # a strong coordinate far outside of what was foreseen
    back = dequantize(*quantize4(x, 8), torch.float32, 64)
    torch.testing.assert_close(back[..., 3], x[..., 3], rtol=0.01, atol=0)


def test_four_bit_attention_is_near_the_exact_one():
    torch.manual_seed(0)
    k, v, q = torch.randn(1, 2, 200, 64), torch.randn(1, 2, 200, 64), torch.randn(1, 4, 1, 64)
    k[..., 7] += 12  # an outlier channel, as real keys have
    start, out = torch.tensor([199]), {}
    for kind in (None, "int4"):
        cache = KVCache(CacheSpec.parse(kind, dtype=torch.float32), 1, 2, 200, 64)
        cache.write(torch.tensor([0]), k, v)
        out[kind] = cache.attend(q, start)
    assert (out["int4"] - out[None]).norm() / out[None].norm() < 0.2
