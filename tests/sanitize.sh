#!/usr/bin/env bash
# The C++ kernels under AddressSanitizer: every test of theirs, some minutes.
# Wants g++ and what ./test.sh installs.  Arguments go to pytest:  tests/sanitize.sh -k width
set -euo pipefail
cd "$(dirname "$0")/.."
./setup.sh requirements.txt requirements-gguf.txt requirements-dev.txt
export CXX=g++ CXXFLAGS="-fsanitize=address -fno-omit-frame-pointer -g"
export ASAN_OPTIONS=detect_leaks=0 # Python's own
XDG_CACHE_HOME=$(mktemp -d)
export XDG_CACHE_HOME
trap 'rm -rf "$XDG_CACHE_HOME"' EXIT
LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)" \
  .venv/bin/python -m pytest -p no:cacheprovider tests/test_linear_cpu.py tests/test_attention_cpu.py "$@"
