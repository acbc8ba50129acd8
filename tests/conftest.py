"""Small models and checkpoints that several test files share."""
import json
from pathlib import Path

import pytest
import torch

from cpu_extension import INSTRUCTIONS, limit_instructions
from model import ModelConfig, Transformer

DEMO = Path(__file__).parent.parent / "checkpoints" / "SmolLM2-135M-Instruct"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--instructions", choices=INSTRUCTIONS,
                     help="take at most these of the processor: the narrower kernels, on a wider machine")


def pytest_configure(config: pytest.Config) -> None:
    if most := config.getoption("--instructions"):
        limit_instructions(most)


def tiny_config(**changes: object) -> ModelConfig:
    """A model of two layers, six query heads on two kv heads, head_dim 16."""
    facts = dict(vocab_size=300, dim=96, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=16,
                 intermediate_size=128, max_position_embeddings=256)
    return ModelConfig(**(facts | changes))


def tiny_model(dtype: torch.dtype = torch.float32, **changes: object) -> Transformer:
    """Random weights, large enough that tokens differ."""
    torch.manual_seed(0)
    model = Transformer(tiny_config(**changes)).to(dtype).eval().requires_grad_(False)
    model.embed.weight.normal_()
    return model


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model.pth of a tiny random model with a byte-level tokenizer.json (256 tokens and </s>)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    folder = tmp_path_factory.mktemp("tiny")
    model = tiny_model(torch.bfloat16)
    torch.save(model.state_dict(), folder / "model.pth")
    (folder / "config.json").write_text(json.dumps(model.config.to_dict() | {"eos_token_id": 256}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    facts = {"eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    return folder / "model.pth"


@pytest.fixture(scope="session")
def demo() -> Path:
    """The folder of the demo model; test.sh fetches it."""
    if not (DEMO / "model.pth").is_file():
        pytest.skip("the demo model is not there (./setup.sh fetches it)")
    return DEMO
