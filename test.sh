#!/usr/bin/env bash
# Installs what the tests need, then runs ruff and every test.  Arguments go to pytest:  ./test.sh tests/test_model.py
set -euo pipefail
cd "$(dirname "$0")"
./setup.sh requirements.txt requirements-gguf.txt requirements-dev.txt
.venv/bin/ruff check .
exec .venv/bin/python -m pytest "$@"
