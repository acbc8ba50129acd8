"""Rebuild tokenizer.json and its companions from the metadata of a GGUF file.

Two kinds of vocabulary stand in a GGUF: byte-level BPE with its merges (tokenizer.ggml.model `gpt2`: SmolLM2,
Llama 3) and sentencepiece BPE with scores (`llama`: Llama 2, TinyLlama).  How text is split before the merges
is named by tokenizer.ggml.pre; a name that is not known here is refused, for a wrong split goes unnoticed
until the answers are bad.
"""
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
PRE_TOKENIZERS = {  # name -> kind of split; files from before the key existed mean GPT-2's
    "gpt-2": "gpt2", "gpt2": "gpt2", "default": "gpt2",
    "smollm": "digits", "starcoder": "digits", "refact": "digits",
    "llama-bpe": "llama3", "llama3": "llama3", "llama-v3": "llama3"}
END_OF_TURN = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>")  # for files that do not name them


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF, added tokens and BOS included.  ValueError for a kind unknown here."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ValueError("the file has no vocabulary (tokenizer.ggml.tokens)")
    if len(set(tokens)) != len(tokens):
        raise ValueError("the vocabulary has the same token twice; it cannot become a tokenizer.json")
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"tokenizer.ggml.model {kind!r} is not supported; supported: gpt2, llama")
    try:
        tokenizer = byte_level_bpe(metadata) if kind == "gpt2" else sentencepiece_bpe(metadata)
    except ValueError:
        raise
    except Exception as e:  # the package raises bare Exception
        raise ValueError(f"the vocabulary (tokenizer.ggml.*) is damaged: {e!r}; fetch the file again") from e
    types = metadata.get("tokenizer.ggml.token_type") or []
    for token, token_type in zip(tokens, types, strict=False):
        if token_type in (CONTROL, UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    add_document_tokens(tokenizer, metadata)
    return tokenizer


def byte_level_bpe(metadata: dict[str, Any]) -> Tokenizer:
    """GPT-2's BPE over bytes, its text split as tokenizer.ggml.pre says."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre {name!r} is not supported; "
                         f"supported: {', '.join(PRE_TOKENIZERS)}")
    split = PRE_TOKENIZERS[name]
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    # Llama 3 takes a word that is in the vocabulary whole, whether or not the merges reach it.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split == "llama3"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split != "llama3")
    first = {"gpt2": [], "digits": [pre_tokenizers.Digits(individual_digits=True)],
             "llama3": [pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated")]}[split]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece_bpe(metadata: dict[str, Any]) -> Tokenizer:
    """Sentencepiece's BPE: the pair that makes the best token goes first, the unknown becomes bytes."""
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores:
        raise ValueError("the file has no tokenizer.ggml.scores, which a sentencepiece vocabulary needs")
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    tokenizer = Tokenizer(models.BPE(
        vocab={token: i for i, token in enumerate(tokens)}, merges=merges_from_scores(tokens, scores, types),
        unk_token=unknown, fuse_unk=True, byte_fallback=BYTE in types))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁")] * prefix + [normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Strip(" ", 1, 0)] * prefix)
    return tokenizer


def merges_from_scores(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Every way to make a normal token of two others, the best scores first (sentencepiece's order)."""
    normal = {token: i for i, token in enumerate(tokens) if types[i] == NORMAL}
    ranked = sorted(normal.items(), key=lambda item: -scores[item[1]])
    return [(token[:cut], token[cut:]) for token, _ in ranked for cut in range(1, len(token))
            if token[:cut] in normal and token[cut:] in normal]


def token_id(metadata: dict[str, Any], which: str) -> int | None:
    """The id that the file names for `bos`, `eos`, `unknown`...; None also for ids that say there is none."""
    i = metadata.get(f"tokenizer.ggml.{which}_token_id")
    return i if isinstance(i, int) and 0 <= i < len(metadata["tokenizer.ggml.tokens"]) else None


def adds(metadata: dict[str, Any], which: str) -> bool:
    """Whether `bos` or `eos` goes around a text; where the file is silent, what its family does."""
    family = (metadata.get("tokenizer.ggml.model") == "llama"
              or PRE_TOKENIZERS.get(metadata.get("tokenizer.ggml.pre", "")) == "llama3")
    default = which == "bos" and family
    wanted = bool(metadata.get(f"tokenizer.ggml.add_{which}_token", default))
    return wanted and token_id(metadata, which) is not None


def add_document_tokens(tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    """Make `encode` put BOS before and EOS after a text, as far as the file says so."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {which: token_id(metadata, which) for which in ("bos", "eos") if adds(metadata, which)}
    names = {which: tokens[i] for which, i in ids.items()}
    if ids:
        before, after = [names["bos"]] if "bos" in ids else [], [names["eos"]] if "eos" in ids else []
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *(f"{t}:1" for t in before), "$B:1", *(f"{t}:1" for t in after)],
            special_tokens=[(names[which], ids[which]) for which in ids])


def tokenizer_settings(metadata: dict[str, Any]) -> dict[str, Any]:
    """The contents of tokenizer_config.json: special tokens, BOS and EOS habits, the chat template."""
    tokens = metadata["tokenizer.ggml.tokens"]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
                "add_bos_token": adds(metadata, "bos"), "add_eos_token": adds(metadata, "eos")}
    for ours, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (i := token_id(metadata, key)) is not None:
            settings[f"{ours}_token"] = tokens[i]
    if "tokenizer.chat_template" in metadata:
        settings["chat_template"] = metadata["tokenizer.chat_template"]
    return settings


def stop_ids(metadata: dict[str, Any]) -> list[int]:
    """Ids that end a generation: of text, turn and message, named by the file or known by their text."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or []
    named = [token_id(metadata, kind) for kind in ("eos", "eot", "eom")]
    known = [i for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
             if kind == CONTROL and token in END_OF_TURN]
    return list(dict.fromkeys(i for i in named + known if i is not None))
