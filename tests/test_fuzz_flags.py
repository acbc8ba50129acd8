"""Whatever numbers and words the flags are given: a plan, or one line that names a flag and exit code 2.

FUZZ_EXAMPLES=20000 pytest tests/test_fuzz_flags.py looks longer.
"""
import argparse
import contextlib
import io
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import evaluate
import generate
import generation
import memory
from inference import make_sampler
from shell import LARGEST

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "150"))
CONFIG = str(Path(__file__).parent.parent / "configs" / "SmolLM2-135M.json")
WORDS = ["nan", "inf", "-inf", "1e309", "-0", "0", "-1", "1", "2", "64", "1e-300", "0.5", "0x10", "1_0", "",
         " ", "cpu", "cuda", "cuda:1", "meta", "int8", "int4", "k8v4", "none", "8,16", "4,8", "3,8", ",",
         "hd", "dkv", "7,8", "8,8", "-2,8", "bhsd", "0213", "0231,bshd", "bhs", "bhsd,bhsd,bhsd", "a\nb"]
GOOD = {"--device": "cpu", "--kv_cache_quantization": "k8v4", "--kv_strong": "0,2",
        "--kv_cache_layout": "bshd,0213", "--temperature": "0", "--top_p": "1", "--budget": "0.5"}
SMALL = st.integers(0, 300).map(str)
EDGES = st.sampled_from([LARGEST, LARGEST + 1, 2 ** 63, 2 ** 64 - 1, 2 ** 64, 10 ** 30, -2 ** 63]).map(str)
VALUES = st.one_of(SMALL, EDGES, st.sampled_from(WORDS), st.integers().map(str), st.floats().map(str),
                   st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=6))
PATHS = st.sampled_from([".", "nowhere.txt", "nowhere/file", "demo.sh", ""])


def one_flag(action: argparse.Action) -> st.SearchStrategy[list[str]]:
    """A flag with a value, often a good one."""
    name = action.option_strings[-1]
    if action.nargs == 0:
        return st.just([name])
    good = st.just(GOOD[name]) if name in GOOD else SMALL
    if action.choices:
        good = st.sampled_from([*action.choices])
    values = PATHS if action.type is Path else st.integers(1, 9).flatmap(
        lambda n: VALUES if n == 9 else good)
    return values.map(lambda value: [name, value])


def flags(parser: argparse.ArgumentParser, fixed: str) -> st.SearchStrategy[list[str]]:
    """Some flags of a parser, but for `fixed` and what goes against it."""
    without = {"--help", "--random_weights", fixed}
    actions = [a for a in parser._actions if a.option_strings and not without & {*a.option_strings}]
    return st.lists(st.one_of(list(map(one_flag, actions))), max_size=6).map(lambda lists: sum(lists, []))


def planned_or_refused(plan: Callable[[], object]) -> object | None:
    """What `plan` returns; None when it refuses as it should."""
    err = io.StringIO()
    try:
        with contextlib.redirect_stderr(err):
            return plan()
    except SystemExit as e:
        assert e.code == 2
        message = err.getvalue().removesuffix("(--help lists the flags)\n")
    except ValueError as e:
        message = str(e)
    assert "\n" not in message
    assert re.search(r"--\w|unrecognized arguments", message), message
    return None


@settings(max_examples=EXAMPLES, deadline=None)
@given(flags(generate.make_parser(), "--checkpoint_path"))
@example(["--temperature", "1e-300"])
@example(["--assume_filled", "100", "--max_new_tokens", "156"])
def test_generate_plans_or_refuses(tiny_checkpoint, words):
    def plan() -> generation.Job:
        args = generate.make_parser().parse_args(["--checkpoint_path", str(tiny_checkpoint), *words])
        generate.check_flags(args)
        make_sampler(args.temperature, args.top_k, args.top_p)
        return generation.plan(args)

    job = planned_or_refused(plan)
    if job is not None:
        need = job.start + len(job.prompt) + job.args.max_new_tokens
        assert (job.args.interactive or 0 < need <= job.cache_size) and job.cache_size <= 256
        assert memory.make_plan(job.setup).total_bytes > 0


@settings(max_examples=EXAMPLES, deadline=None)
@given(flags(memory.make_parser(), "--config"))
def test_memory_plans_or_refuses(words):
    setup = planned_or_refused(
        lambda: memory.setup_of(memory.make_parser().parse_args(["--config", CONFIG, *words])))
    if setup is not None:
        assert memory.make_plan(setup).total_bytes > 0


@pytest.mark.parametrize("task", ["perplexity", "rouge", "needle"])
@settings(max_examples=EXAMPLES // 3, deadline=None)
@given(data=st.data())
def test_evaluate_plans_or_refuses(task, tiny_checkpoint, data):
    tasks = next(a for a in evaluate.make_parser()._actions if a.dest == "task")
    words = data.draw(flags(tasks.choices[task], "--checkpoint_path"))
    planned_or_refused(lambda: evaluate.plan(evaluate.make_parser().parse_args(
        [task, "--checkpoint_path", str(tiny_checkpoint), *words])))
