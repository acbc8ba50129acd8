"""A run of generate.py, from its flags to its summary: plan, check the memory, load, generate, report.

Text goes to stdout as it is made; progress and the summary go to stderr.
"""
import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import backends
import memory
import memory_dry_run
import memory_picture
import report
from chat import chat_turns, print_tokens
from cpu_extension import map_large_tensors
from inference import Engine, Timing, check_limits, make_sampler
from kv_cache import KVCache
from load import CheckpointSource
from model import ModelConfig, Transformer
from options import DEFAULT_PROMPT
from shell import PATIENCE, read_text, working
from tokenizer import Tokenizer, load_tokenizer


@dataclass
class Job:
    """What is to be computed, settled before anything large is allocated."""
    args: argparse.Namespace
    config: ModelConfig
    device: torch.device
    tokenizer: Tokenizer | None
    prompt: list[int]
    start: int  # tokens that are in the cache before the prompt
    cache_size: int
    setup: memory.Setup  # what memory.py plans

    @property
    def stop_ids(self) -> frozenset[int]:
        stops = self.tokenizer is not None and not self.args.ignore_eos
        return self.tokenizer.stop_ids if stops else frozenset()

    @property
    def is_text(self) -> bool:
        """Whether the tokens mean anything."""
        made_up = self.args.prefill_size is not None or self.args.assume_filled is not None
        return self.tokenizer is not None and not made_up


def plan(args: argparse.Namespace) -> Job:
    """Read the small files, encode the prompt, settle the sizes.  ValueError for whatever cannot work."""
    if args.random_weights:
        config, tokenizer = ModelConfig.from_json(args.random_weights), None
    else:
        config = ModelConfig.from_json(args.checkpoint_path.with_name("config.json"))
        tokenizer = load_tokenizer(args.checkpoint_path.parent)
    if args.memory_profile and (args.compile or args.compile_prefill or args.interactive or args.dry_run):
        raise ValueError("--memory_profile follows the operators of a plain run one by one; leave out "
                         "--compile, --compile_prefill, --interactive and --dry_run")
    start = args.assume_filled or 0
    if args.interactive:
        if tokenizer is None:
            raise ValueError("--interactive needs a --checkpoint_path with a tokenizer")
        prompt, cache_size = [], args.cache_size or config.max_position_embeddings
        check_limits(1, args.max_new_tokens, cache_size, config)
    else:
        prompt = encode_prompt(args, config, tokenizer)
        need = start + len(prompt) + args.max_new_tokens
        cache_size = args.cache_size or min(-(-need // 64) * 64, config.max_position_embeddings)
        check_limits(start + len(prompt), args.max_new_tokens, cache_size, config)
    device = backends.pick_device(args)
    setup = memory_setup(args, config, device, cache_size, len(prompt), start)
    return Job(args, config, device, tokenizer, prompt, start, cache_size, setup)


def memory_setup(args: argparse.Namespace, config: ModelConfig, device: torch.device, cache_size: int,
                 prompt_tokens: int, start: int) -> memory.Setup:
    """The run as memory.py plans it.  ValueError when the checkpoint is none or of another quantization."""
    given = args.prompt is not None or args.prompt_file or args.prefill_size is not None or start
    fills = args.interactive or (args.dry_run and not given)
    quantization, source = args.quantization, "random"
    if args.checkpoint_path:
        stored = CheckpointSource(args.checkpoint_path, args.quantization)
        quantization, source = stored.scheme, "packed" if stored.packed else "checkpoint"
    kernels = args.attention == "auto" and not backends.fastest_cache(device)[1]
    return memory.Setup(
        config, backends.cache_spec(args), cache_size, quantization, 1, args.prefill_chunk,
        None if fills else prompt_tokens, args.causal_mask, backends.DTYPES[args.precision], device.type,
        kernels, source, args.compile or args.compile_prefill, start)


def encode_prompt(args: argparse.Namespace, config: ModelConfig, tokenizer: Tokenizer | None) -> list[int]:
    """The prompt's tokens: made up, from a file, from the flag, through the chat template."""
    count = 1 if args.assume_filled is not None else args.prefill_size
    if count is not None or tokenizer is None:
        count = 6 if count is None else count
        check_limits(count, 0, config.max_position_embeddings, config)  # before so many are made
        generator = torch.Generator().manual_seed(args.seed)
        return torch.randint(config.vocab_size, (count,), generator=generator).tolist()
    text = args.prompt if args.prompt is not None else DEFAULT_PROMPT
    if args.prompt_file:
        text = read_text("--prompt_file", args.prompt_file)
    return tokenizer.chat([{"role": "user", "content": text}]) if args.chat else tokenizer.encode(text)


def progress(what: str) -> Callable[[Iterable], Iterable]:
    """A bar on stderr, where that is a terminal, over what takes longer than PATIENCE."""
    return lambda items: tqdm(items, desc=what, leave=False, delay=PATIENCE, disable=None)


def load_model(job: Job) -> tuple[Transformer, type[KVCache]]:
    """The model, with the fastest layers of this device unless plain ones are asked for; the cache class."""
    model, cache_class, notes = backends.load_model(job.args, job.config, job.device, progress("load"))
    print(notes, end="", file=sys.stderr)
    return model, cache_class


def make_engine(job: Job, model: Transformer, cache_class: type[KVCache]) -> Engine:
    """The model with fresh caches."""
    args = job.args
    sampler = make_sampler(args.temperature, args.top_k, args.top_p)
    if args.causal_mask != "none":  # each step makes tensors as long as the cache, and frees them
        map_large_tensors()
    with working("fitting the cache to the model"):  # at 4 bits
        return Engine(model, job.setup.spec, job.cache_size, args.causal_mask, sampler,
                      prefill_chunk=args.prefill_chunk, cache_class=cache_class,
                      compile=args.compile and not args.dry_run,
                      compile_prefill=args.compile_prefill and not args.dry_run,
                      calibrated=not args.random_weights)


def build_engine(job: Job, watch: memory.Tracker | None) -> tuple[Engine, dict[str, float]]:
    """The model with its caches, compiled if asked; and the seconds of loading and compiling."""
    began = time.perf_counter()
    torch.manual_seed(job.args.seed)  # random weights are drawn from it
    with memory_picture.phase(watch, "load"):
        loaded = load_model(job)
    with memory_picture.phase(watch, "cache"):
        engine = make_engine(job, *loaded)
    load_s = time.perf_counter() - began
    with working("compiling the model's steps"):
        return engine, {"load_s": load_s, "compile_s": engine.warm_up()}


def check_memory(job: Job) -> memory.Plan:
    """Say what the run will take.  ValueError, with the flags that help, when the device cannot hold it."""
    planned, free = memory.make_plan(job.setup), memory.available_bytes(job.device)
    print(planned.line(), file=sys.stderr)
    refused = memory.refusal(job.setup, free) if free is not None and not job.args.force else None
    if refused and job.args.write_result:
        planned_row = {"peak_memory_bytes": planned.total_bytes, "peak_memory_how": "planned, not run"}
        report.append_json(job.args.write_result, base_row(job) | planned_row)
    if refused:
        raise ValueError(refused)
    return planned


def dry_run(job: Job) -> None:
    """The run on fake tensors; its peak, by part and by line of code, to stdout."""
    prompt = job.setup.filled - job.start
    tracker = memory_dry_run.dry_run(lambda: load_model(job), lambda loaded: make_engine(job, *loaded),
                                     job.device, prompt, job.start)
    planned = memory.make_plan(job.setup)
    print(memory_dry_run.summary(tracker, planned))
    if job.args.write_result:
        row = base_row(job) | memory_dry_run.result(tracker, planned) | {"prompt_tokens": prompt}
        report.append_json(job.args.write_result, row)


def run_samples(engine: Engine, job: Job, watch: memory.Tracker | None = None) -> tuple[list[Timing], int]:
    """Generate every sample, its text to stdout; timings and the number of new tokens of the last."""
    timings, count = [], 0
    torch.manual_seed(job.args.seed)
    for i in range(job.args.num_samples):
        if job.start:
            engine.assume_filled(job.start)
        last = i == job.args.num_samples - 1
        with profiler(job.args.profile if last else None):
            tokens = engine.generate(job.prompt, job.args.max_new_tokens, job.stop_ids, job.start,
                                     progress("prefill"))
            tokens = memory_picture.follow(watch, tokens)
            count = print_tokens(tokens, job.tokenizer if job.is_text else None, job.stop_ids, job.prompt)
        timings.append(engine.timing)
    return timings, count


@contextlib.contextmanager
def profiler(path: Path | None) -> Iterator[None]:
    """Trace what runs inside into a file for chrome://tracing or Perfetto; nothing without a path."""
    if path is None:
        yield
        return
    with torch.profiler.profile() as trace:
        yield
    trace.export_chrome_trace(str(path))


def base_row(job: Job) -> dict:
    """What was asked, for a JSON object."""
    args, spec = job.args, job.setup.spec
    cache = {"k_bits": spec.k_bits, "v_bits": spec.v_bits, "axis": spec.axis, "k_layout": spec.k_layout,
             "v_layout": spec.v_layout, "size": job.cache_size}
    fake = args.dry_run and job.device.type == "cuda"
    return {
        "argv": sys.argv, "model": str(args.random_weights or args.checkpoint_path),
        "random_weights": args.random_weights is not None, "is_text": job.is_text,
        "device": "cuda" if fake else report.device_name(job.device), "torch": torch.__version__,
        "precision": args.precision, "quantization": job.setup.quantization, "cache": cache,
        "causal_mask": args.causal_mask, "compile": args.compile, "prompt_tokens": len(job.prompt),
        "assumed_tokens": job.start}


def result_row(job: Job, engine: Engine, timings: list[Timing], new_tokens: int, seconds: dict[str, float],
               resident_before: report.Resident) -> dict:
    """The JSON object of a run (see README.md, Results)."""
    parts = report.model_bytes(engine.model)
    return {**base_row(job), "new_tokens": new_tokens, **seconds, **report.speeds(engine, timings, parts),
            "bytes": parts, **report.peak_memory(job.device, resident_before)}


def run(args: argparse.Namespace) -> None:
    """Everything that the flags ask for."""
    job = plan(args)
    if args.dry_run:
        return dry_run(job)
    planned, resident_before = check_memory(job), report.Resident.now()
    with memory_picture.recording(args.memory_profile, job.device) as watch:
        engine, seconds = build_engine(job, watch)
        if args.interactive:
            torch.manual_seed(args.seed)
            return chat_turns(engine, job.tokenizer, args.max_new_tokens)
        timings, new_tokens = run_samples(engine, job, watch)
        memory_picture.name_parts(watch, engine.model)
    row = result_row(job, engine, timings, new_tokens, seconds, resident_before)
    row["planned_bytes"] = planned.total_bytes
    print(report.summary(row), file=sys.stderr)
    if not job.is_text:
        print("The prompt or the weights are made up: the output is not text.", file=sys.stderr)
    if args.write_result:
        report.append_json(args.write_result, row)
