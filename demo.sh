#!/usr/bin/env bash
# From nothing to text: installs what is needed, fetches SmolLM2-135M-Instruct and runs it over an int8 cache.
# Arguments go to generate.py:  ./demo.sh --interactive
set -euo pipefail
cd "$(dirname "$0")"
./setup.sh requirements.txt requirements-gguf.txt
[ $# -gt 0 ] || set -- --chat --prompt "What is the capital of France?" --temperature 0
exec .venv/bin/python generate.py --checkpoint_path checkpoints/SmolLM2-135M-Instruct/model.pth \
  --kv_cache_quantization int8 "$@"
