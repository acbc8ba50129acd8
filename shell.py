"""How a script meets a person at the shell: flags checked when read, errors of one line, signs of life.

Imports nothing large, so that --help and a mistyped flag are answered before torch is imported.
"""
import argparse
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

LARGEST = 2 ** 31 - 1  # of a number of tokens, rows or steps
PATIENCE = 2.0  # seconds that pass before `working` says what takes so long


class Parser(argparse.ArgumentParser):
    """argparse, but an error is one line and no abbreviation of a flag is guessed."""

    def __init__(self, doc: str, **more: str) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter,
                         allow_abbrev=False, **more)

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {_one_line(message)} (--help lists the flags)\n")


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


def whole(least: int, most: int = LARGEST) -> Callable[[str], int]:
    """A type for argparse: a whole number from `least` to `most`."""
    def parse(text: str) -> int:
        with contextlib.suppress(ValueError):
            if least <= int(text) <= most:
                return int(text)
        raise argparse.ArgumentTypeError(f"give a whole number from {least} to {most}, not {text[:40]!r}")
    return parse


def number(most: float, or_zero: bool = False) -> Callable[[str], float]:
    """A type for argparse: a number above 0 (or 0) and at most `most`, thus neither nan nor inf."""
    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if 0 < float(text) <= most or (or_zero and float(text) == 0):
                return float(text)
        least = "from 0" if or_zero else "above 0 and up"
        raise argparse.ArgumentTypeError(f"give a number {least} to {most:g}, not {text[:40]!r}")
    return parse


def check_input(flag: str, path: Path, wanted: str) -> None:
    """ValueError unless there is a file at `path`; wanted: what the flag takes, for the message."""
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"{flag}: {path} {found}; give {wanted}")


def check_output(flag: str, path: Path | None) -> None:
    """ValueError when a file at `path` could not be written later."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{flag}: {path} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise ValueError(f"{flag}: there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{flag}: {path} cannot be written; give a file in a folder of yours")


def read_text(flag: str, path: Path) -> str:
    """The UTF-8 text that a flag names; ValueError when it cannot be read."""
    check_input(flag, path, "a UTF-8 text file")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"{flag}: {path} is no UTF-8 text (byte {e.start}); convert it first") from e


@contextlib.contextmanager
def errors(script: str) -> Iterator[None]:
    """What goes wrong inside ends the script: ValueError and OSError with one line and exit code 2."""
    try:
        yield
    except BrokenPipeError:  # the reader went away, as `head` does
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):  # or Python complains when it flushes them at exit
            os.dup2(nowhere, stream.fileno())
        sys.exit(141)  # 128 + SIGPIPE
    except (ValueError, OSError) as e:
        print(f"{script}: {_one_line(e)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)  # 128 + SIGINT


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Say on stderr what takes longer than PATIENCE, and in the end how long it took; else nothing."""
    began, said = time.perf_counter(), []

    def say() -> None:
        said.append(True)
        print(f"{what} ...", file=sys.stderr, flush=True)

    timer = threading.Timer(PATIENCE, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
    if said:
        print(f"... took {time.perf_counter() - began:.0f} s", file=sys.stderr)


def size(nbytes: int) -> str:
    """Bytes for a person: 39 kB, 76 MB, 1.25 GB."""
    if nbytes < 1e9:
        return f"{nbytes / 1e6:.0f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.0f} kB"
    return f"{nbytes / 1e9:.{2 if nbytes < 1e10 else 1}f} GB"
