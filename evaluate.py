"""What a quantized KV cache costs in accuracy, always against the 16-bit cache of the same model.

    python evaluate.py perplexity --checkpoint_path checkpoints/NAME/model.pth --window 2048 --windows 3 \\
        --compare int8:d,int8:hd
    python evaluate.py rouge  ... --data FILE.jsonl      lines of {"prompt": ..., "reference": ...}
    python evaluate.py needle ... --context 4096         a fact hidden in a long text, asked for

Every token passes through the cache.  The 16-bit cache stores bfloat16 whatever the precision; the rest is
computed in float32 unless --precision says otherwise, so that what differs is the cache.
"""
import argparse
import copy
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import backends
import metrics
from inference import Engine, check_limits
from kv_cache import CacheSpec, KVCache, at_position, detach
from kv_calibrate import attach_calibrated
from model import ModelConfig, Transformer
from needle import hit_rates, make_needles
from options import add_cache_flags, add_model_flags, add_seed_flag, check_model_flags
from shell import Parser, errors, read_text, whole
from tokenizer import Tokenizer, load_tokenizer

BASELINE = "bf16"
DEFAULT_TEXT = Path(__file__).with_name("data") / "moby_dick.txt"
DIFFERENCE = "{mean:+.2f} [{low:+.2f}, {high:+.2f}]"
LOGIT_ROWS = 64  # positions whose logits, [rows, V], stand in memory at a time
PRECISION_NOTE = ("Computed in float32 unless --precision says otherwise; the 16-bit cache, the baseline,\n"
                  "stores bfloat16 whatever the precision.")
Progress = Callable[[Iterable], Iterable]


def make_parser() -> Parser:
    """The flags of this script: three tasks that share the flags of the model and of the cache."""
    parser = Parser(__doc__)
    tasks = parser.add_subparsers(dest="task", required=True, metavar="perplexity|rouge|needle")
    doc = f"Perplexity, KL divergence and top-1 agreement.\n{PRECISION_NOTE}"
    task = tasks.add_parser("perplexity", doc=doc)
    group = _common_flags(task)
    group.add_argument("--window", type=whole(2), default=2048, metavar="TOKENS", help="default %(default)s")
    group.add_argument("--windows", type=whole(1), default=3, metavar="N",
                       help="so many windows from the text's start (default %(default)s)")
    task = tasks.add_parser("rouge", doc=f"ROUGE of greedy generation.\n{PRECISION_NOTE}")
    group = _common_flags(task, max_new_tokens=64)
    group.add_argument("--data", type=Path, metavar="FILE.jsonl",
                       help='lines of {"prompt": ..., "reference": ...}; without it prompts are cut from the '
                       "text and what the 16-bit cache writes is the reference")
    group.add_argument("--prompts", type=whole(1), default=20, metavar="N",
                       help="prompts cut from the text (default %(default)s)")
    group.add_argument("--prompt_tokens", type=whole(1), default=256, metavar="TOKENS",
                       help="length of each (default %(default)s)")
    group.add_argument("--chat", action="store_true", help="wrap the prompts of --data in the chat template")
    task = tasks.add_parser("needle", doc=f"A fact hidden in a long text, asked for.\n{PRECISION_NOTE}")
    group = _common_flags(task, max_new_tokens=24)
    group.add_argument("--context", type=whole(1), default=2048, metavar="TOKENS",
                       help="tokens of text, question and answer together (default %(default)s)")
    group.add_argument("--depths", type=whole(1), default=5, metavar="N",
                       help="places of the fact, evenly from start to end (default %(default)s)")
    group.add_argument("--trials", type=whole(1), default=2, metavar="N",
                       help="facts per depth (default %(default)s)")
    return parser


def _common_flags(parser: Parser, max_new_tokens: int | None = None) -> argparse._ArgumentGroup:
    """Flags of every task; returns the group for those of its own."""
    add_model_flags(parser)
    add_cache_flags(parser)
    parser.set_defaults(precision="fp32", attention="plain")
    group = parser.add_argument_group("evaluation")
    group.add_argument("--text", type=Path, default=DEFAULT_TEXT, metavar="FILE",
                       help="UTF-8 text (default: data/moby_dick.txt)")
    group.add_argument("--compare", metavar="KIND[:AXIS],...",
                       help="several kinds of --kv_cache_quantization, such as int8:d,int8:hd")
    group.add_argument("--json", action="store_true", help="the last line of stdout is one JSON object")
    if max_new_tokens is not None:
        group.add_argument("--max_new_tokens", type=whole(1), default=max_new_tokens, metavar="N",
                           help="default %(default)s")
        add_seed_flag(group)
        group.add_argument("--compile", action="store_true", help="compile the decode step")
    return group


@dataclass
class Job:
    """What is to be measured, settled before anything large is allocated."""
    args: argparse.Namespace
    config: ModelConfig
    device: torch.device
    tokenizer: Tokenizer
    specs: dict[str, CacheSpec]  # by name, the 16-bit baseline first

    def load(self) -> tuple[Transformer, type[KVCache]]:
        """The model, and the cache class that --attention asks for."""
        model, cache_class, notes = backends.load_model(self.args, self.config, self.device, progress("load"))
        print(notes, end="", file=sys.stderr)
        return model, cache_class


def plan(args: argparse.Namespace) -> Job:
    """Read the small files and the flags.  ValueError for whatever cannot work."""
    check_model_flags(args)
    if args.random_weights:
        raise ValueError("--random_weights have no accuracy to measure; give --checkpoint_path MODEL.pth")
    config = ModelConfig.from_json(args.checkpoint_path.with_name("config.json"))
    tokenizer = load_tokenizer(args.checkpoint_path.parent)
    return Job(args, config, backends.pick_device(args), tokenizer, named_specs(args))


def named_specs(args: argparse.Namespace) -> dict[str, CacheSpec]:
    """The caches that --compare, or else the flags of generate.py, ask for; the 16-bit baseline first."""
    kind = args.kv_cache_quantization
    if args.compare is not None and kind is not None:
        raise ValueError("give --compare or --kv_cache_quantization, not both")
    names = [f"{kind}:{args.kv_quant_axis}"] if kind is not None else []
    if args.compare is not None:
        # A kind may be two numbers of bits.
        names = re.findall(r"\d+,\d+(?::\w+)?|[^,]+", "".join(args.compare.split()))
        if not names:
            raise ValueError("--compare names no cache; give kinds such as int8:d,int8:hd")
    specs = {}
    for name in [BASELINE, *names]:
        one = copy.copy(args)
        one.precision = "bf16"  # of what a 16-bit cache stores
        kind, _, axis = name.partition(":")
        one.kv_cache_quantization = None if name == BASELINE else kind
        one.kv_quant_axis = axis or args.kv_quant_axis
        try:
            specs[name] = backends.cache_spec(one)
        except ValueError as e:
            raise ValueError(f"--compare {name!r}: {e}") from e
    return specs


def need_tokens(ids: Sequence[int], count: int, what: str, path: Path) -> None:
    """ValueError when a text has fewer than `count` tokens."""
    if len(ids) < count:
        raise ValueError(f"{path} has {len(ids)} tokens; {what} need {count}; give a longer --text")


def progress(what: str) -> Progress:
    """A tqdm on stderr, where that is a terminal."""
    return lambda items: tqdm(items, desc=what, leave=False, disable=None)


# ---- perplexity, KL divergence, top-1 agreement


def token_windows(ids: Sequence[int], window: int, windows: int) -> Tensor:
    """The first tokens of a text as int64 [windows, window], without overlap."""
    return torch.tensor(ids[:window * windows]).view(windows, window)


@torch.inference_mode()
def compare_caches(model: Transformer, windows: Tensor, specs: dict[str, CacheSpec], chunk: int = 512,
                   length: int | None = None, causal_mask: str = "none", cls: type[KVCache] = KVCache,
                   progress: Progress = iter) -> list[dict]:
    """One row of figures per cache, the first being the baseline.  windows: int64 [N, W].

    Each window starts at position 0 and passes through all caches chunk by chunk, side by side, over one set
    of weights; of the logits LOGIT_ROWS positions stand in memory at a time.  Perplexity is over the W-1
    predictions of each window, KL and top-1 over its W positions.
    """
    length = length or windows.shape[1]
    held, windows = {}, windows.to(model.norm.weight.device)
    for name, spec in specs.items():
        attach_calibrated(model, spec, 1, length, causal_mask, cls)
        held[name] = [layer.attention.cache for layer in model.layers]
    figures = {name: metrics.TokenFigures() for name in specs}
    chunks = [(window, lo) for window in windows for lo in range(0, len(window), chunk)]
    for window, lo in progress(chunks):
        states, start = {}, at_position(lo, 1, window.device)  # states: [T, E] each
        for name, caches in held.items():
            for layer, cache in zip(model.layers, caches, strict=True):
                layer.attention.cache = cache
            states[name] = model.hidden(window[None, lo:lo + chunk], start)[0]
        _compare_states(model, states, window[lo + 1:lo + chunk + 1], figures)
    detach(model)
    per_token = {name: sum(cache.nbytes for cache in caches) / length for name, caches in held.items()}
    return [{"cache": name, **figures[name].condense(), "bytes_per_token": per_token[name]} for name in specs]


def _compare_states(model: Transformer, states: dict[str, Tensor], targets: Tensor,
                    figures: dict[str, metrics.TokenFigures]) -> None:
    """Add the figures of a chunk's final states [T, E] by cache; targets: the next tokens, [T] or [T-1]."""
    count = len(next(iter(states.values())))
    for lo in range(0, count, LOGIT_ROWS):
        rows, base = slice(lo, lo + LOGIT_ROWS), None
        for name, x in states.items():
            log_probs = metrics.log_softmax(model.lm_head(x[rows]))  # [n, V]
            base = log_probs if base is None else base
            figures[name].add(base, log_probs, targets[rows])


def perplexity(job: Job) -> tuple[list[dict], list[dict]]:
    """The task: table rows to print and figures."""
    args, config = job.args, job.config
    length = args.cache_size or args.window
    if length > config.max_position_embeddings:
        raise ValueError(f"{length} tokens > {config.max_position_embeddings} positions of the model "
                         "(max_position_embeddings); give a smaller --window and --cache_size")
    if args.window > length:
        raise ValueError(f"--window {args.window} > --cache_size {length}; leave out --cache_size")
    ids = job.tokenizer.encode(read_text("--text", args.text))
    need_tokens(ids, args.window * args.windows, f"{args.windows} windows of {args.window}", args.text)
    windows = token_windows(ids, args.window, args.windows)
    model, cache_class = job.load()
    rows = compare_caches(model, windows, job.specs, args.prefill_chunk, length, args.causal_mask,
                          cache_class, progress("chunks"))
    base = rows[0]["perplexity"]
    table = [{"cache": row["cache"], "bytes/token": f"{row['bytes_per_token']:.0f}",
              "perplexity": f"{row['perplexity']:.2f} ± {row['perplexity_stderr']:.2f}",
              "change": f"{100 * (row['perplexity'] / base - 1):+.2f} %", "KL": f"{row['kl']:.5f}",
              "KL 99 %": f"{row['kl_p99']:.4f}", "top-1": f"{row['top1']:.4f}"} for row in rows]
    return table, rows


# ---- ROUGE


def read_pairs(path: Path) -> list[tuple[str, str]]:
    """(prompt, reference) of every line of a .jsonl file; ValueError names the first bad line."""
    pairs = []
    for number, line in enumerate(read_text("--data", path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            pairs.append((row["prompt"], row["reference"]))
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f'{path} line {number} is no {{"prompt": ..., "reference": ...}}') from e
        if not all(isinstance(text, str) for text in pairs[-1]):
            raise ValueError(f"{path} line {number}: prompt and reference must be strings")
    if not pairs:
        raise ValueError(f"{path} holds no lines; give lines of {{\"prompt\": ..., \"reference\": ...}}")
    return pairs


def cut_prompts(ids: Sequence[int], count: int, length: int, bos: int | None) -> list[list[int]]:
    """`count` stretches of `length` tokens, evenly over a text, a BOS included where the model uses one."""
    first = [] if bos is None else [bos]
    length, step = length - len(first), len(ids) // count
    return [[*first, *ids[i * step:i * step + length]] for i in range(count)]


def generate_replies(job: Job, prompts: list[list[int]]) -> dict[str, list[str]]:
    """What the model writes after each prompt, greedily, over each kind of cache."""
    model, cache_class = job.load()
    return {name: _replies(job, model, prompts, spec, cache_class) for name, spec in job.specs.items()}


def _replies(job: Job, model: Transformer, prompts: list[list[int]], spec: CacheSpec,
             cache_class: type[KVCache]) -> list[str]:
    args = job.args
    length = args.cache_size or max(map(len, prompts)) + args.max_new_tokens
    engine = Engine(model, spec, length, args.causal_mask, prefill_chunk=args.prefill_chunk,
                    cache_class=cache_class, compile=args.compile)
    stops = job.tokenizer.stop_ids
    made = (engine.generate(prompt, args.max_new_tokens, stops) for prompt in progress("prompts")(prompts))
    return [job.tokenizer.decode(token for token in tokens if token not in stops) for tokens in made]


def rouge_rows(replies: dict[str, list[str]], references: list[str], seed: int) -> list[dict]:
    """One row per cache, the first being the baseline: mean F x 100, lengths, paired differences to it."""
    rows, base = [], None
    for name, texts in replies.items():
        scores = metrics.rouge(texts, references)
        base = scores if base is None else base
        row = {"cache": name, **{kind: round(float(values.mean()), 4) for kind, values in scores.items()}}
        row["gen_len"], row["gen_num"] = sum(len(text.strip()) for text in texts), len(texts)
        row["difference"] = {}
        for kind, values in scores.items():
            low, high = metrics.bootstrap_interval(values - base[kind], seed=seed)
            row["difference"][kind] = {"mean": round(float((values - base[kind]).mean()), 4),
                                       "low": round(low, 4), "high": round(high, 4)}
        rows.append(row)
    return rows


def rouge(job: Job) -> tuple[list[dict], list[dict]]:
    """The task: table rows to print and figures."""
    args, tokenizer = job.args, job.tokenizer
    metrics.check_rouge()
    if args.data:
        pairs = read_pairs(args.data)
        encode = tokenizer.encode
        if args.chat:
            def encode(text: str) -> list[int]:
                return tokenizer.chat([{"role": "user", "content": text}])
        prompts, references = [encode(prompt) for prompt, _ in pairs], [reference for _, reference in pairs]
    else:
        if args.chat:
            raise ValueError("--chat wants the prompts of --data; those cut from a text are no questions")
        ids = tokenizer.encode(read_text("--text", args.text), bos=False)
        what = f"{args.prompts} prompts of {args.prompt_tokens}"
        need_tokens(ids, args.prompts * args.prompt_tokens, what, args.text)
        prompts, references = cut_prompts(ids, args.prompts, args.prompt_tokens, tokenizer.bos_id), None
    _check_lengths(job, prompts)
    replies = generate_replies(job, prompts)
    rows = rouge_rows(replies, references or replies[BASELINE], args.seed)
    table = [{"cache": row["cache"], **{kind: f"{row[kind]:.4f}" for kind in metrics.ROUGE_KINDS},
              "gen_len": str(row["gen_len"]), "gen_num": str(row["gen_num"]),
              "rougeL - baseline, 95 %": DIFFERENCE.format(**row["difference"]["rougeL"])} for row in rows]
    return table, rows


def _check_lengths(job: Job, prompts: list[list[int]]) -> None:
    for prompt in prompts:
        size = job.args.cache_size or len(prompt) + job.args.max_new_tokens
        check_limits(len(prompt), job.args.max_new_tokens, size, job.config)


# ---- a needle in a haystack


def find_needle(job: Job) -> tuple[list[dict], list[dict]]:
    """The task: table rows to print and figures."""
    args, tokenizer = job.args, job.tokenizer
    ids = tokenizer.encode(read_text("--text", args.text), bos=False)
    need_tokens(ids, args.context, "the context", args.text)
    needles = make_needles(args.depths, args.trials, args.seed)
    spare = len(ids) - args.context
    starts = [spare * i // len(needles) for i in range(len(needles))]  # every prompt has a text of its own
    prompts = [n.prompt(ids[lo:lo + args.context], tokenizer, args.context - args.max_new_tokens)
               for n, lo in zip(needles, starts, strict=True)]
    _check_lengths(job, prompts)
    rows = [{"cache": name, **hit_rates(needles, replies)}
            for name, replies in generate_replies(job, prompts).items()]
    table = [{"cache": row["cache"], "all": f"{row['hit_rate']:.2f}",
              **{f"depth {r['depth']:.2f}": f"{r['hit_rate']:.2f}" for r in row["by_depth"]}} for row in rows]
    return table, rows


TASKS = {"perplexity": perplexity, "rouge": rouge, "needle": find_needle}


def main(argv: list[str] | None = None) -> None:
    with errors("evaluate.py"):
        args = make_parser().parse_args(argv)
        table, rows = TASKS[args.task](plan(args))
        print(metrics.markdown_table(table))
        if args.json:
            print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
