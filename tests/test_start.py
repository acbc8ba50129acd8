"""How scripts begin and end: flags before torch, no triton on the CPU, signs of life, a closed pipe."""
import io
import subprocess
import sys
from pathlib import Path

import pytest

import backends
import kv_cache
import options
import quantize
import shell

ROOT = Path(__file__).parent.parent


def python(code: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run code, which sees sys, in a process of its own, where torch has not been imported yet."""
    command = [sys.executable, "-c", f"import sys\n{code}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("flags", [
    "--help", "", "--no_such_flag", "--temperature nan", "--checkpoint_path nowhere.pth", "-q int3",
    "--random_weights configs/SmolLM2-135M.json --kv_cache_quantization int9",
    "--random_weights configs/SmolLM2-135M.json --kv_cache_layout bbbb",
    "--random_weights configs/SmolLM2-135M.json --prompt_file nowhere.txt",
    "--random_weights configs/SmolLM2-135M.json --write_result nowhere/r.jsonl"])
def test_help_and_bad_flags_are_answered_without_torch(flags):
    done = python("import generate\n"
                  "try: generate.main()\n"
                  "finally: print('torch' in sys.modules)", *flags.split())
    assert done.stdout.splitlines()[-1] == "False"
    assert done.returncode == (0 if flags == "--help" else 2)
    assert len(done.stderr.splitlines()) == (0 if flags == "--help" else 1)


def test_a_run_on_the_cpu_imports_no_triton(tiny_checkpoint):
    code = ("import generate\n"
            "generate.main()\n"
            "large = 'triton', 'sympy', 'torch._dynamo', 'torch._inductor', 'matplotlib'\n"
            "print(*(name for name in large if name in sys.modules))")
    done = python(code, "--checkpoint_path", str(tiny_checkpoint), "--max_new_tokens", "2", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""


def test_names_that_are_repeated_for_a_quick_start_are_the_same():
    assert options.SCHEMES == quantize.SCHEMES
    assert options.CACHE_KINDS == {kind: bits for kind, bits in kv_cache.KINDS.items() if kind is not None}
    assert options.AXES == kv_cache.AXES and options.CAUSAL_MASKS == kv_cache.CAUSAL_MASKS
    assert options.STRONG == f"{kv_cache.K_STRONG},{kv_cache.V_STRONG}"
    assert options.PRECISIONS == tuple(backends.DTYPES)


def test_what_takes_long_is_said_and_what_does_not_is_not(monkeypatch):
    err = io.StringIO()
    monkeypatch.setattr("sys.stderr", err)
    with shell.working("waiting"):
        pass
    assert err.getvalue() == ""
    monkeypatch.setattr(shell, "PATIENCE", 0)
    with shell.working("waiting"):
        while not err.getvalue():  # another thread says it
            pass
    assert err.getvalue() == "waiting ...\n... took 0 s\n"


def test_a_closed_pipe_ends_quietly():
    code = ("from shell import errors\n"
            "with errors('script'):\n"
            "    while True: print('x' * 9999)")
    running = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    running.stdout.read(10)
    running.stdout.close()
    assert running.stderr.read() == b"" and running.wait() == 141
    running.stderr.close()


def test_errors_are_one_line(capsys):
    for error in (ValueError("two\nlines"), OSError(28, "No space left", "file")):
        with pytest.raises(SystemExit) as exit_, shell.errors("script.py"):
            raise error
        assert exit_.value.code == 2
        err = capsys.readouterr().err
        assert err.startswith("script.py: ") and len(err.splitlines()) == 1


def test_sizes_for_a_person():
    assert [shell.size(n) for n in (39_000, 76_400_000, 1_254_000_000, 33_310_000_000)] == [
        "39 kB", "76 MB", "1.25 GB", "33.3 GB"]
