"""Text to token ids and back: tokenizer.json, sentencepiece or tiktoken behind one small face; chat.

Three rules hold for all three kinds of file:
- Text is text. What merely looks like a special token ("<|eot_id|>" typed by a user) is spelled out in
  ordinary tokens; only encode_special and the template's own words give special ids.
- decode and TextStream are the same code, over the bytes of each token, so they cannot disagree.
- The kind is found in what the file holds, never in the name of a folder.

Copied out alone, this file needs the one of tokenizers, sentencepiece and tiktoken that reads your file, and
jinja2 for chat().
"""

from __future__ import annotations

import base64
import codecs
import json
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

# Ends of a text or a turn, as model families call them; they stop generation where the vocabulary has them.
STOP_TOKENS = ("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>",
               "<|end|>", "<|eot|>", "<|eom|>", "<|end_of_turn|>", "<end_of_turn>")

# How Llama 3 cuts text before merging, and its 256 special tokens in the order of their ids (3.1's names).
LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                r"|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3_SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>",
                  "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>", "<|reserved_special_token_2|>",
                  "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>",
                  *(f"<|reserved_special_token_{i}|>" for i in range(3, 248)))


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder; tokenizer.json goes first. ValueError if there is none."""
    folder = Path(folder)
    path = next((folder / n for n in ("tokenizer.json", "tokenizer.model") if (folder / n).is_file()), None)
    if path is None:
        raise ValueError(f"no tokenizer in {folder}: copy its tokenizer.json or tokenizer.model there")
    config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
    names = _read_json(folder / "added_tokens.json", _ID)
    added = {i: {"content": name, "special": True} for name, i in names.items() if i is not None}
    added |= {int(i): token for i, token in (config.get("added_tokens_decoder") or {}).items()}
    ends = {_content(config.get(key)) for key in ("bos_token", "eos_token")} - {None}
    make = {"json": lambda: JsonCodec(_read_json(path), ends), "tiktoken": lambda: TiktokenCodec(data, added),
            "sentencepiece": lambda: SentencePieceCodec(data, added, ends)}
    if (kind := _sniff(data := path.read_bytes())) not in make:
        raise ValueError(f"{path} {kind}")
    try:
        codec = make[kind]()
        codec.encode(["ab"])  # some damage shows only here
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # what the packages raise, even panics, and the code below on wrong types
        reason = str(error) if str(error).isprintable() else repr(error)
        raise ValueError(f"{path} cannot be used ({reason}); fetch it again or take another model") from error
    stops = [_read_json(folder / name).get("eos_token_id")
             for name in ("tokenizer_config.json", "config.json", "generation_config.json")]
    return Tokenizer(codec, config, _read_template(folder, config), stops)


class Tokenizer:
    """The face of every kind of tokenizer.

    special: name -> id of each special token; vocab_size: largest id + 1; bos_id: what encode puts first,
    None when the model uses no BOS; stop_ids: where generation ends; chat_template: Jinja source or None."""

    def __init__(self, codec: Codec, config: dict[str, Any], template: str | None, stops: Sequence[Any] = ()):
        """config: tokenizer_config.json's entries; stops: eos_token_id values (None, int or list)."""
        self.codec, self.chat_template = codec, template
        self.special, self.vocab_size = codec.special, codec.vocab_size
        names = {f"{key}_token": _content(config.get(f"{key}_token")) for key in ("bos", "eos", "unk", "pad")}
        adds_bos = config.get("add_bos_token")
        bos = codec.bos if adds_bos is None else (names["bos_token"] or codec.bos) if adds_bos else None
        self.bos_id: int | None = self.special.get(bos) if bos else None
        names["bos_token"] = names["bos_token"] or codec.bos
        names["eos_token"] = names["eos_token"] or codec.eos
        self._template_names = {key: name for key, name in names.items() if name}
        found = {self.special[n] for n in (*STOP_TOKENS, names["eos_token"]) if n in self.special}
        listed = [i for stop in stops for i in (stop if isinstance(stop, list) else [stop])]
        self.stop_ids = frozenset({*found, *listed} - {None, -1})  # some config.json files say -1 for none
        pattern = "|".join(re.escape(n) for n in sorted(self.special, key=len, reverse=True) if n) or "(?!)"
        self._special_pattern = re.compile(f"({pattern})")
        self._lookalike = re.compile(f"(?=(?:{pattern}))(.)", re.DOTALL)

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Plain text to ids, with one BOS in front if the model uses one; never any other special id."""
        ids = self.codec.encode([_whole(text)])
        return [self.bos_id, *ids] if bos and self.bos_id is not None else ids

    def encode_special(self, text: str) -> list[int]:
        """Text whose special tokens count as such (a rendered template) to ids; no BOS is added."""
        return self.codec.encode(self._split(_whole(text)))

    def decode(self, ids: Iterable[int]) -> str:
        """Ids to text. Special tokens and unknown ids are not shown; bad UTF-8 becomes U+FFFD."""
        stream = TextStream(self)
        return "".join(map(stream.feed, ids)) + stream.finish()

    def chat(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Messages ([{"role": ..., "content": ...}, ...]) to ids by the model's template; BOS exactly once.

        ValueError when there is no template, or when it refuses the messages."""
        # A look-alike in a message is broken up by a number nobody can guess before the template runs (it may
        # trim and cut the text as it likes), and mended once the template's own special tokens are found.
        wedge = str(10**30 + secrets.randbelow(10**30))
        guarded = _map_strings(messages, lambda text: self._lookalike.sub(rf"\g<1>{wedge}", _whole(text)))
        text = _whole(self._render(guarded, add_generation_prompt))
        parts = [part.replace(wedge, "") if isinstance(part, str) else part for part in self._split(text)]
        ids = self.codec.encode(parts)
        return ids if self.bos_id is None or ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def _split(self, text: str) -> list[str | int]:
        parts = self._special_pattern.split(text)  # every second part is a special token
        return [self.special[part] if i % 2 else part for i, part in enumerate(parts) if part]

    def _render(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool) -> str:
        template = self._compiled_template
        try:
            return template.render(messages=messages, tools=None, documents=None,
                                   add_generation_prompt=add_generation_prompt, **self._template_names)
        except Exception as error:  # a template is a program, it may raise anything
            raise ValueError(f"the model's chat template refuses these messages: {error!r}") from error

    @cached_property
    def _compiled_template(self) -> Any:
        """The template in the environment that Hugging Face gives it; sandboxed: it is downloaded code."""
        if self.chat_template is None:
            raise ValueError("this model has no chat template: use a plain prompt, or put the instruct "
                             "model's tokenizer_config.json or chat_template.jinja beside the tokenizer")
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # jinja2's own escapes HTML

        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                            extensions=["jinja2.ext.loopcontrols"])
        env.filters["tojson"] = tojson
        env.globals["raise_exception"] = raise_exception
        env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        # {% generation %} marks replies for training masks; here it is a block that is always taken.
        source = re.sub(r"(?<=\{%)(-?\s*)generation(?=\s*-?%\})", r"\1if true", self.chat_template)
        source = re.sub(r"(?<=\{%)(-?\s*)endgeneration(?=\s*-?%\})", r"\1endif", source)
        try:
            return env.from_string(source)
        except Exception as error:  # jinja2's, and Python's on the code that jinja2 makes
            raise ValueError("cannot read chat_template (of chat_template.jinja or tokenizer_config.json), "
                             f"fetch it again: {error!r}") from error


class TextStream:
    """Ids in, whole characters out: the pieces joined, finish() included, are decode() of all the ids.

    Bytes wait until they are UTF-8; a token's cost does not depend on how many came before. context: the ids
    that the text continues. Sentencepiece-like vocabularies drop the space before the first word of a text,
    so a continuation printed right after its prompt needs the prompt's ids, or its first word is glued on."""

    def __init__(self, tokenizer: Tokenizer, context: Iterable[int] = ()):
        self._codec = tokenizer.codec
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = self._codec.strips_space and not any(map(self._codec.piece, context))

    def feed(self, token: int) -> str:
        """The characters that this token completes: none, one or many."""
        piece = self._codec.piece(int(token))
        if self._at_start and piece:
            self._at_start = False
            piece = piece.removeprefix(b" ")
        return self._utf8.decode(piece)

    def finish(self) -> str:
        """What is left: nothing, or U+FFFD for a character that was never finished."""
        return self._utf8.decode(b"", True)


class Codec(Protocol):
    """What each kind of file must offer."""

    special: dict[str, int]  # name -> id, control tokens only
    vocab_size: int  # largest id + 1
    bos: str | None  # what the file itself says stands first in a text
    eos: str | None
    strips_space: bool  # a text's first word carries a space that is not in the text

    def encode(self, parts: Sequence[str | int]) -> list[int]:
        """Stretches of plain text and, between them, special ids -> ids."""

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for; none for special tokens and for ids outside the vocabulary."""


class JsonCodec:
    """tokenizer.json, through the tokenizers package; decoders of the byte-level and the sentencepiece style.

    Special tokens are renamed to something unguessable when the file is loaded. So no text can hit them,
    whatever its normalizer, merges and flags say; the package's rules for the text around them still hold."""

    def __init__(self, spec: dict[str, Any], ends: set[str]):
        """spec: the file's contents, changed here; ends: names of BOS and EOS, special though unmarked."""
        import tokenizers

        if "vocab" not in (spec.get("model") or {}):
            raise ValueError("it holds no vocabulary")
        self.bos, self.eos = _first_of_template(spec.get("post_processor")), None
        vocab = spec["model"]["vocab"]
        ids = dict(vocab) if isinstance(vocab, dict) else {entry[0]: i for i, entry in enumerate(vocab)}
        added = {token["content"]: token for token in spec.get("added_tokens") or []}
        ends = ends | {self.bos}
        flags = {"single_word": False, "lstrip": False, "rstrip": False}
        added |= {n: flags | {"id": ids[n], "content": n} for n in ends if n in ids and n not in added}
        self.special = {n: token["id"] for n, token in added.items()
                        if token.get("special") or n in STOP_TOKENS or n in ends}
        self._special_ids = frozenset(self.special.values())
        self._added = {token["id"]: n.encode() for n, token in added.items()}
        self.vocab_size = 1 + max([*ids.values(), *self._added])
        self._bytes, self.strips_space = _decoder_style(spec)
        self._mark = f"<{secrets.token_hex(16)}:"
        spec["added_tokens"] = [self._hidden(token) for token in added.values()]
        self._hide_in_model(spec["model"])
        # A stored truncation would cut prompts in silence; BOS is put in front by Tokenizer.
        spec |= {"truncation": None, "padding": None, "post_processor": None}
        self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(spec, ensure_ascii=False))

    def encode(self, parts: Sequence[str | int]) -> list[int]:
        text = "".join(part if isinstance(part, str) else self._name(part) for part in parts)
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def piece(self, token: int) -> bytes:
        if token in self._special_ids or not 0 <= token < self.vocab_size:
            return b""
        name = self._tokenizer.id_to_token(token)
        if name is None or token in self._added:  # None: a gap in the vocabulary
            return self._added.get(token, b"")
        if self._bytes is None:
            return _spaced(name, re.fullmatch(r"<0x[0-9A-F]{2}>", name) is not None)
        return bytes(map(self._bytes.__getitem__, name)) if self._bytes.keys() >= set(name) else name.encode()

    def _name(self, token: int) -> str:
        return f"{self._mark}{token}>"

    def _hidden(self, token: dict[str, Any]) -> dict[str, Any]:
        if token["id"] not in self._special_ids:
            return token
        return token | {"content": self._name(token["id"]), "special": True, "normalized": False}

    def _hide_in_model(self, model: dict[str, Any]) -> None:
        hidden = {name: self._name(i) for name, i in self.special.items()}
        if isinstance(model["vocab"], dict):
            model["vocab"] = {hidden.get(name, name): i for name, i in model["vocab"].items()}
        else:
            model["vocab"] = [[hidden.get(name, name), score] for name, score in model["vocab"]]
        if model.get("unk_token") in hidden:
            model["unk_token"] = hidden[model["unk_token"]]
        if "merges" in model:  # two forms: "a b" and ["a", "b"]
            pairs = (m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"])
            model["merges"] = [[a, b] for a, b in pairs if hidden.keys().isdisjoint((a, b, a + b))]


class SentencePieceCodec:
    """A sentencepiece tokenizer.model. As in Meta's Llama 2 code, each stretch of text between special tokens
    is encoded by itself, with the space in front that the model file asks for."""

    def __init__(self, data: bytes, added: dict[int, dict[str, Any]], ends: set[str]):
        """added: added_tokens_decoder of tokenizer_config.json; ends: names of BOS and EOS."""
        from sentencepiece import SentencePieceProcessor

        self._sp = sp = SentencePieceProcessor(model_proto=data)
        size = sp.vocab_size()
        # Symbols of the user-defined type match in any text, and the package does not tell which they are.
        defined = re.compile(r"<\|[^\s|]+\|>")
        self.special = {name: i for i, name in enumerate(map(sp.id_to_piece, range(size)))
                        if sp.is_control(i) or name in STOP_TOKENS or name in ends or defined.fullmatch(name)}
        self.special |= {token["content"]: i for i, token in added.items()
                         if token.get("special") and i != sp.unk_id()}
        self._special_ids = frozenset(self.special.values())
        self._added = {i: token["content"].encode() for i, token in added.items() if i >= size}
        self.vocab_size = 1 + max([size - 1, *self._added])
        self.bos = sp.id_to_piece(sp.bos_id()) if sp.bos_id() >= 0 else None
        self.eos = sp.id_to_piece(sp.eos_id()) if sp.eos_id() >= 0 else None
        space = sp.piece_to_id("\u2581")
        self.strips_space = sp.decode([space, space]) != "  "

    def encode(self, parts: Sequence[str | int]) -> list[int]:
        return _join(parts, lambda text: [i for token in self._sp.encode(text) for i in self._spelled(token)])

    def _spelled(self, token: int) -> list[int]:
        """A text's token; a user-defined symbol that the text happens to hold becomes characters or bytes."""
        if token not in self._special_ids:
            return [token]
        ids: list[int] = []
        for char in self._sp.id_to_piece(token):
            whole = self._sp.piece_to_id(char)
            names = [char] if whole != self._sp.unk_id() else [f"<0x{byte:02X}>" for byte in char.encode()]
            ids += map(self._sp.piece_to_id, names)
        return ids

    def piece(self, token: int) -> bytes:
        if token in self._special_ids or not 0 <= token < self.vocab_size:
            return b""
        if token >= self._sp.vocab_size():
            return self._added.get(token, b"")
        if token == self._sp.unk_id():
            return " \u2047 ".encode()  # as sentencepiece itself shows it
        return _spaced(self._sp.id_to_piece(token), self._sp.is_byte(token))


class TiktokenCodec:
    """A tiktoken rank file (lines of "base64 rank") with Llama 3's split and, unless tokenizer_config.json
    names others, its 256 special tokens after the ranks."""

    strips_space = False

    def __init__(self, data: bytes, added: dict[int, dict[str, Any]]):
        """added: added_tokens_decoder of tokenizer_config.json."""
        import tiktoken

        lines = (line.split() for line in data.splitlines() if line)
        try:
            ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        except ValueError as error:
            raise ValueError("it has a line that is no 'base64 rank'") from error
        size = len(ranks)
        if sorted(ranks.values()) != list(range(size)) or any(bytes([b]) not in ranks for b in range(256)):
            raise ValueError(f"it has {size} ranks, with gaps or bytes missing")
        self.special = {token["content"]: i for i, token in added.items() if i >= size}
        self.special = self.special or {name: size + i for i, name in enumerate(LLAMA3_SPECIAL)}
        self.vocab_size = 1 + max(self.special.values())
        self.bos, self.eos = LLAMA3_SPECIAL[:2]
        self._pieces = [token for token, _ in sorted(ranks.items(), key=lambda item: item[1])]
        self._encoding = tiktoken.Encoding("llama3", pat_str=LLAMA3_SPLIT, mergeable_ranks=ranks,
                                           special_tokens={})

    def encode(self, parts: Sequence[str | int]) -> list[int]:
        return _join(parts, self._encode_text)

    def _encode_text(self, text: str) -> list[int]:
        # The package panics on a million spaces; Meta's code cuts runs at this length too.
        cuts = [0, *(run.end() for run in re.finditer(r"\s{25000}|\S{25000}", text)), len(text)]
        pieces = (text[begin:end] for begin, end in pairwise(cuts))
        return [token for piece in pieces for token in self._encoding.encode_ordinary(piece)]

    def piece(self, token: int) -> bytes:
        return self._pieces[token] if 0 <= token < len(self._pieces) else b""


def _join(parts: Sequence[str | int], encode: Callable[[str], list[int]]) -> list[int]:
    return [i for part in parts for i in ([part] if isinstance(part, int) else encode(part))]


def _sniff(data: bytes) -> str:
    """json, tiktoken or sentencepiece; otherwise the rest of a sentence "FILE ..." saying what is wrong."""
    if data.lstrip()[:1] == b"{":
        return "json"
    if re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?(\n|$)", data):
        return "tiktoken"
    if data.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the file: run `git lfs pull` in the repository it comes from"
    if data[:1] == b"\n":  # the tag of the first field, pieces, of the protocol buffer
        return "sentencepiece"
    return "holds neither a JSON object, nor a sentencepiece model, nor tiktoken ranks: fetch it again"


def _decoder_style(spec: dict[str, Any]) -> tuple[dict[str, int] | None, bool]:
    """How tokens spell bytes: (character -> byte, None in the sentencepiece style; strips_space)."""
    decoder = spec.get("decoder") or {}
    steps = decoder.get("decoders") or [decoder]
    kinds = {step.get("type"): step for step in steps}
    if "ByteLevel" in kinds:
        return _byte_alphabet(), False
    if "Metaspace" in kinds:
        step = kinds["Metaspace"]
        return None, step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True)
    if "ByteFallback" in kinds or spec["model"].get("byte_fallback"):
        return None, kinds.get("Strip", {}).get("start", 0) > 0
    raise ValueError(f"it has the decoder {'+'.join(map(str, kinds))}; only ByteLevel, Metaspace "
                     "and ByteFallback, those of Llama-like models, are read")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the 68 others follow from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (b for b in range(256) if b not in printable)
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _spaced(name: str, is_byte: bool) -> bytes:
    """The bytes of a sentencepiece-style token: <0xE4> is a byte, U+2581 a space."""
    return bytes([int(name[3:5], 16)]) if is_byte else name.replace("\u2581", " ").encode()


def _first_of_template(processor: dict[str, Any] | None) -> str | None:
    """The special token that tokenizer.json's post-processor puts before a text."""
    processor = processor or {}
    for step in processor.get("processors") or [processor]:
        if step.get("type") == "TemplateProcessing" and "SpecialToken" in step["single"][0]:
            return step["single"][0]["SpecialToken"]["id"]
    return None


def _read_template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else the default one of tokenizer_config.json's chat_template."""
    path = folder / "chat_template.jinja"
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else _default(config.get("chat_template"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8, fetch it again: {error}") from error


def _default(template: Any) -> Any:
    """A chat_template, or of several, in a list or by name, the default one."""
    if isinstance(template, list):
        template = {str(e.get("name")): e.get("template") for e in template if isinstance(e, dict)}
    return template.get("default") if isinstance(template, dict) else template


def _read_json(path: Path, every: tuple | None = None) -> dict[str, Any]:
    """The object in a JSON file, {} when there is no file; its entries pass `every`, or those of _TESTS."""
    data = path.read_bytes() if path.is_file() else b"{}"
    if (kind := _sniff(data)) != "json":
        raise ValueError(f"{path} {kind if 'LFS' in kind else 'holds no JSON object: fetch it again'}")
    try:
        entries = json.loads(data)
        for key, (test, expected) in (dict.fromkeys(entries, every) if every else _TESTS).items():
            if entries.get(key) is not None and not test(entries[key]):
                raise ValueError(f"{json.dumps({key: entries[key]}):.90}, expected {expected}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}; fetch it again") from error
    return entries


def _content(token: Any) -> str | None:
    """A special token's text: config files write it as a string or as an object with a content."""
    return token.get("content") if isinstance(token, dict) else token


def _map_strings(value: Any, change: Any) -> Any:
    """A copy of nested lists and dicts in which every string value is changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_strings(entry, change) for key, entry in value.items()}
    return [_map_strings(entry, change) for entry in value] if isinstance(value, (list, tuple)) else value


def _whole(text: str) -> str:
    """Text with U+FFFD for lone surrogates (a shell argument that was no UTF-8), which no tokenizer takes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


_ID = (lambda v: type(v) is int and 0 <= v < 1 << 31, "an id")
_TESTS: dict[str, tuple[Callable[[Any], bool], str]] = {  # of what JSON files hold, beside null
    **{f"{name}_token": (lambda v: isinstance(_content(v), str), "a string or an object with a content")
       for name in ("bos", "eos", "unk", "pad")},
    "add_bos_token": (lambda v: isinstance(v, bool), "true or false"),
    "added_tokens_decoder": (lambda v: isinstance(v, dict) and all(
        re.fullmatch("[0-9]{1,9}", i) and isinstance(e, dict) and isinstance(e.get("content"), str)
        for i, e in v.items()), "objects with a content, by id"),
    "chat_template": (lambda v: isinstance(_default(v), str), "a string, or several by name and one default"),
    "eos_token_id": (lambda v: all(i == -1 or _ID[0](i) for i in (v if isinstance(v, list) else [v])),
                     "an id or a list of ids")}
