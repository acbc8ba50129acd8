"""Packed linear layers against the same weights unpacked by hand."""
import pytest
import torch
from conftest import tiny_model

import quantize
from kv_cache import CacheSpec, attach
from load import load_checkpoint, random_model
from quantize import SCHEMES, Int4Linear, legal_group, linear, pack, round_groups


def unpack(tensors: dict, scheme: str) -> torch.Tensor:
    """The weight that packed tensors stand for, float32 [N, K], independent of the layers' own code."""
    if scheme.startswith("int8"):
        return tensors["weight"].float() * tensors["scales"].float()[:, None]
    N, K = tensors["weight"].shape[0], tensors["weight"].shape[1] * 2
    weight = torch.empty(N, K)
    weight[:, ::2], weight[:, 1::2] = tensors["weight"] % 16, tensors["weight"] // 16
    both = tensors["scales_and_zeros"].float().repeat_interleave(K // len(tensors["scales_and_zeros"]), dim=0)
    return (weight - 8) * both[..., 0].t() + both[..., 1].t()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("N,K", [(96, 64), (48, 288), (40, 256), (1056, 4096)])
def test_layer_equals_its_unpacked_weight(scheme, N, K):
    torch.manual_seed(0)
    tensors = pack(torch.randn(N, K) / K ** 0.5, scheme)
    layer, weight = linear(tensors, scheme, bias=torch.ones(N)), unpack(tensors, scheme)
    bf16, fp32 = (torch.bfloat16, 0.02), (torch.float32, 1e-4)
    for rows, (dtype, tolerance) in ((1, bf16), (3, fp32), (33, bf16), (40, fp32)):
        x = torch.randn(rows, K).to(dtype)
        if scheme == "int8dq":
            step = x.float().abs().amax(-1, keepdim=True) / 127
            expected = (x.float() / step).round() * step @ weight.t() + 1
        else:
            expected = x.float() @ weight.t() + 1
        y = layer(x[None])
        assert y.shape == (1, rows, N)
        torch.testing.assert_close(y[0].float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("scheme,error", [("int8wo", 0.01), ("int4wo-32", 0.075), ("int4wo-128", 0.1)])
def test_packed_weight_is_near_the_original(scheme, error):
    torch.manual_seed(0)
    weight = torch.randn(64, 256)
    assert (unpack(pack(weight, scheme), scheme) - weight).norm() / weight.norm() < error


def test_rounding_beats_minimum_and_maximum():
    torch.manual_seed(0)
    w = torch.randn(200, 4, 64)
    nibbles, scale, zero = round_groups(w)
    ours = ((nibbles.float() - 8) * scale[..., None] + zero[..., None] - w).square().mean()
    lo, hi = w.aminmax(dim=-1, keepdim=True)
    step = (hi - lo) / 15
    plain = (((w - lo) / step).round() * step + lo - w).square().mean()
    assert ours < 0.9 * plain


def test_equal_weights_and_exact_grids_survive():
    w = torch.zeros(3, 1, 32)
    w[1], w[2] = 0.5, torch.arange(32) % 16
    nibbles, scale, zero = round_groups(w)
    back = (nibbles.float() - 8) * scale[..., None] + zero[..., None]
    torch.testing.assert_close(back, w, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("n_inputs,group,legal", [
    (288, 256, 32), (576, 256, 64), (4096, 256, 256), (64, 64, 64)])
def test_group_that_does_not_divide_becomes_the_largest_that_does(n_inputs, group, legal):
    assert legal_group(n_inputs, group) == legal
    layer = linear(pack(torch.randn(32, n_inputs), f"int4wo-{group}"), f"int4wo-{group}")
    assert isinstance(layer, Int4Linear) and layer.group == legal


def test_bad_schemes_and_sizes_are_refused():
    with pytest.raises(ValueError, match="int8wo.*int4wo-64"):
        pack(torch.randn(32, 64), "int4")
    with pytest.raises(ValueError, match="multiple of 32"):
        pack(torch.randn(32, 40), "int4wo-64")


@pytest.mark.parametrize("scheme", ["int8wo", "int8dq", "int4wo-32"])
@pytest.mark.parametrize("tied", [True, False])
def test_saved_model_is_the_one_quantized_while_loading(tmp_path, monkeypatch, capsys, scheme, tied):
    model = tiny_model(torch.bfloat16, tie_word_embeddings=tied)
    state = {k: v for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}
    torch.save(state, tmp_path / "model.pth")
    arguments = ["quantize.py", "--checkpoint_path", str(tmp_path / "model.pth"), "-q", scheme]
    monkeypatch.setattr("sys.argv", arguments)
    quantize.main()
    assert f"model_{scheme}.pth" in capsys.readouterr().err
    ids, zero, logits = torch.arange(40)[None], torch.tensor([0]), []
    packed = f"model_{scheme}.pth"
    for name, asked in (("model.pth", scheme), (packed, None), (packed, scheme)):
        loaded = load_checkpoint(tmp_path / name, model.config, quantization=asked)
        attach(loaded, CacheSpec(), 1, 64)
        logits.append(loaded(ids, zero))
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    assert not list(tmp_path.glob("*.partial"))
    with pytest.raises(ValueError, match="stored as"):
        load_checkpoint(tmp_path / f"model_{scheme}.pth", model.config, quantization="int4wo-64")


@pytest.mark.parametrize("scheme", [None, "int8wo", "int8dq", "int4wo-64"])
def test_random_model_has_the_layers_and_sane_logits(scheme):
    model = random_model(tiny_model().config, quantization=scheme)
    attach(model, CacheSpec.parse("int8"), 1, 64)
    logits = model(torch.arange(30)[None], torch.tensor([0]))
    assert logits.isfinite().all() and 0.01 < logits.std() < 100
    kinds = {type(m).__name__ for m in model.modules()}
    assert ("Linear" in kinds) == (scheme is None)


def test_missing_and_misshapen_tensors_are_named(tmp_path):
    model = tiny_model()
    state = model.state_dict()
    state.pop("layers.1.mlp.w_down.weight")
    torch.save(state, tmp_path / "model.pth")
    with pytest.raises(ValueError, match="layers.1.mlp.w_down.weight"):
        load_checkpoint(tmp_path / "model.pth", model.config)
    state["layers.1.mlp.w_down.weight"] = torch.zeros(3, 3)
    torch.save(state, tmp_path / "model.pth")
    with pytest.raises(ValueError, match="config.json says"):
        load_checkpoint(tmp_path / "model.pth", model.config)
    (tmp_path / "model.pth").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="no checkpoint"):
        load_checkpoint(tmp_path / "model.pth", model.config)
