"""Arrows go down only: leaves import nothing of ours, scripts are imported by no one."""
import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
OURS = {path.stem: path for path in ROOT.glob("*.py")}
LEAVES = {"model", "kv_cache", "quantize", "tokenizer", "cpu_extension", "shell"}
SCRIPTS = {name for name, path in OURS.items() if "__main__" in path.read_text(encoding="utf-8")}
SCRIPTS -= {"quantize", "memory"}  # what they offer is used by others, too


def imports(name: str) -> set[str]:
    """Modules of this project that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(OURS[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found & OURS.keys()


def test_leaves_import_nothing_of_ours():
    assert {name: imports(name) for name in LEAVES} == {name: set() for name in LEAVES}


def test_scripts_are_imported_by_no_one():
    assert "generate" in SCRIPTS and "evaluate" in SCRIPTS
    for name in OURS:
        assert not imports(name) & SCRIPTS, name


def test_there_is_no_circle():
    def reach(name: str, above: tuple[str, ...] = ()) -> None:
        assert name not in above, " -> ".join((*above, name))
        for other in imports(name):
            reach(other, (*above, name))
    for name in OURS:
        reach(name)


def test_importing_changes_no_setting_and_prints_nothing():
    state = "(torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled())"
    code = f"import torch; before = {state}; import {', '.join(sorted(OURS))}; assert before == {state}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
