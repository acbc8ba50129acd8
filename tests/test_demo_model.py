"""The real SmolLM2-135M-Instruct, against transformers reading the same GGUF by its own code."""
import pytest
import torch

from inference import Engine
from kv_cache import CacheSpec
from load import load_checkpoint
from model import ModelConfig
from tokenizer import load_tokenizer

PROMPT = "Once upon a time, in a village by the sea, there lived"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GOLDEN_PROMPT = "1, 2, 3, 4, 5, 6,"
GOLDEN = " 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17"  # greedy


@pytest.fixture(scope="module")
def model(demo):
    config = ModelConfig.from_json(demo / "config.json")
    return load_checkpoint(demo / "model.pth", config, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(demo):
    return load_tokenizer(demo)


def test_known_token_ids(tokenizer):
    ids = [19556, 216, 34, 32, 34, 36, 1326, 982, 8866, 1792]
    assert tokenizer.encode("Hello 2024 don't\n\n  x") == ids


def test_greedy_tokens_are_those_of_transformers(demo, model, tokenizer):
    from transformers import AutoModelForCausalLM
    theirs = AutoModelForCausalLM.from_pretrained(demo, gguf_file=next(demo.glob("*.gguf")).name,
                                                  dtype=torch.float32).eval()
    for weight in theirs.parameters():
        weight.data = weight.data.bfloat16().float()  # as model.pth stores them
    ids = torch.tensor([tokenizer.encode(PROMPT)])
    with torch.inference_mode():
        expected = theirs.generate(ids, max_new_tokens=64, min_new_tokens=64, do_sample=False)
    expected = expected[0, ids.shape[1]:]
    engine = Engine(model, CacheSpec(dtype=torch.float32), 128)
    assert list(engine.generate(ids[0].tolist(), 64)) == expected.tolist()


def test_chat_answers_and_stops(model, tokenizer):
    engine = Engine(model, CacheSpec.parse("int8"), 128)
    tokens = list(engine.generate(tokenizer.chat(QUESTION), 40, tokenizer.stop_ids))
    assert tokenizer.decode(tokens) == "The capital of France is Paris." and tokens[-1] in tokenizer.stop_ids


@pytest.mark.parametrize("kind", ["16,16:d", "int8:d", "int8:hd", "k8v4:d", "int4:d"])
def test_golden_text_of_every_cache_kind(model, tokenizer, kind):
    """A text that the model is sure of: what another processor rounds otherwise must not decide a token."""
    margins = []

    def sampler(logits: torch.Tensor) -> torch.Tensor:
        first, second = logits.topk(2).values[0].tolist()
        margins.append(first - second)
        return logits.argmax(-1)

    engine = Engine(model, CacheSpec.parse(*kind.split(":")), 128, sampler=sampler)
    assert tokenizer.decode(engine.generate(tokenizer.encode(GOLDEN_PROMPT), 40)) == GOLDEN
    assert min(margins) > 1.5
