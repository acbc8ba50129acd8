#!/usr/bin/env bash
# From nothing to text: installs what is needed, fetches SmolLM2-135M-Instruct and runs it over an int8 cache.
# Arguments go to generate.py:  ./demo.sh --interactive
set -euo pipefail
cd "$(dirname "$0")"
./setup.sh requirements.txt requirements-gguf.txt
run=(.venv/bin/python generate.py --checkpoint_path checkpoints/SmolLM2-135M-Instruct/model.pth
  --kv_cache_quantization int8)
[ $# -eq 0 ] || exec "${run[@]}" "$@"

result=$(mktemp)
trap 'rm -f "$result"' EXIT
"${run[@]}" --chat --prompt "What is the capital of France?" --temperature 0 --write_result "$result"
.venv/bin/python - "$result" <<'END' >&2
import json
import sys

with open(sys.argv[1]) as file:
    row = json.loads(file.readline())
print(f"That was {row['decode_tokens_per_s']:.0f} tokens/s.  Next, a chat:  ./demo.sh --interactive")
END
