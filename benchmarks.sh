#!/bin/bash
# What a context costs in memory: cache sizes x caches x weights, each with a short prompt and with one that fills it.
#
#   ./benchmarks.sh [memory]     the sweep; a run that cannot fit is recorded as planned
#   ./benchmarks.sh pictures     docs/memory_full.png, memory_linear.png, memory_none.png
#   ./benchmarks.sh peers        speed beside llama.cpp and transformers, turn by turn, in a venv of their own
#   ./benchmarks.sh accuracy     what every cache costs, beside llama.cpp's: a table, docs/accuracy.png
#
# Variables, with their defaults:
#   CHECKPOINT_PATH=checkpoints  MODEL_REPO=SmolLM2-135M-Instruct   $CHECKPOINT_PATH/$MODEL_REPO/model.pth
#   CONFIG=                      a config.json instead: its architecture with random weights
#   SIZES="1024 2048 4096 8192"  slots; for Llama 3.1 "8192 16384 32768 65536 131072"
#   WEIGHTS="none int8wo int4wo-64"
#   CACHES="none:full int8:full int8:linear int8:none int4:none"    kind:mask
#   PROMPTS="short fill"  NEW_TOKENS=16
#   FLAGS=                       more flags of generate.py, such as --device cuda, or --dry_run: nothing is run
#   RESULTS=benchmark_results/memory.jsonl
#   INSTRUCTIONS=                avx2: all systems of `peers` as on a processor without AVX-512
#   ROUNDS=2  PEER_CACHES=int8,16,int4   of `peers`: turns of every system, caches compared
#   SPEED_RESULTS=               of `peers`: append its rows to this file
set -euo pipefail
cd "$(dirname "$0")"
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python)}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints} MODEL_REPO=${MODEL_REPO:-SmolLM2-135M-Instruct}
SIZES=${SIZES:-1024 2048 4096 8192} WEIGHTS=${WEIGHTS:-none int8wo int4wo-64}
CACHES=${CACHES:-none:full int8:full int8:linear int8:none int4:none}
PROMPTS=${PROMPTS:-short fill} NEW_TOKENS=${NEW_TOKENS:-16}
RESULTS=${RESULTS:-benchmark_results/memory.jsonl}
if [ -n "${CONFIG:-}" ]; then
    MODEL=(--random_weights "$CONFIG")
else
    MODEL=(--checkpoint_path "$CHECKPOINT_PATH/$MODEL_REPO/model.pth")
fi

one_run() { # size weights kind mask prompt
    local flags=("${MODEL[@]}" --cache_size "$1" --causal_mask "$4" --max_new_tokens "$NEW_TOKENS" --ignore_eos)
    [ "$2" = none ] || flags+=(--quantization "$2")
    [ "$3" = none ] || flags+=(--kv_cache_quantization "$3")
    [ "$5" = fill ] && flags+=(--prefill_size $(($1 - NEW_TOKENS))) || flags+=(--prefill_size 6)
    echo "== cache $1 $3, mask $4, weights $2, prompt $5" >&2
    local code=0
    # shellcheck disable=SC2086
    "$PYTHON" generate.py "${flags[@]}" --write_result "$RESULTS" ${FLAGS:-} >/dev/null || code=$?
    if [ $code -ne 0 ] && [ $code -ne 2 ]; then # 2: refused with a reason, such as memory
        exit $code
    fi
}

memory() {
    mkdir -p "$(dirname "$RESULTS")"
    for weights in $WEIGHTS; do
        for cache in $CACHES; do
            for prompt in $PROMPTS; do
                for size in $SIZES; do
                    one_run "$size" "$weights" "${cache%:*}" "${cache#*:}" "$prompt"
                done
            done
        done
    done
    "$PYTHON" benchmark_report.py "$RESULTS" --plot "${RESULTS%.jsonl}.png" >"${RESULTS%.jsonl}.md"
    cat "${RESULTS%.jsonl}.md"
}

pictures() {
    mkdir -p docs
    for mask in full linear none; do
        local kind=(--kv_cache_quantization)
        [ $mask = full ] && kind=() # as the seed began: a full-precision cache behind a full mask
        "$PYTHON" generate.py "${MODEL[@]}" --quantization int8wo --cache_size 8192 --prefill_size 1536 \
            --max_new_tokens 8 --ignore_eos --causal_mask $mask "${kind[@]}" \
            --memory_profile docs/memory_$mask.png >/dev/null
    done
}

peers_venv() {
    venv=.venv-peers${INSTRUCTIONS:+-$INSTRUCTIONS}
    if ! cmp -s requirements-peers.txt "$venv/installed"; then
        echo "benchmarks.sh: installing $venv (llama.cpp compiles for some minutes)" >&2
        "$PYTHON" -m venv "$venv"
        local flags=""
        [ "${INSTRUCTIONS:-}" = avx2 ] && flags="-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON \
            -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=OFF"
        CMAKE_ARGS="$flags" "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir \
            -r requirements-peers.txt
        cp requirements-peers.txt "$venv/installed"
    fi
    model=$CHECKPOINT_PATH/$MODEL_REPO
    ggufs=("$model"/*.gguf)
}

peers() {
    peers_venv
    "$PYTHON" bench_speed.py --checkpoint_path "$model/model.pth" --peers "$venv/bin/python" \
        --gguf "${ggufs[0]}" --rounds "${ROUNDS:-2}" --caches "${PEER_CACHES:-int8,16,int4}" \
        ${INSTRUCTIONS:+--instructions "$INSTRUCTIONS"} ${SPEED_RESULTS:+--write_result "$SPEED_RESULTS"}
}

accuracy() {
    peers_venv
    local out=${ACCURACY_RESULTS:-benchmark_results/accuracy.jsonl} text=data/moby_dick.txt
    mkdir -p "$(dirname "$out")"
    local evaluate=("$PYTHON" evaluate.py perplexity --checkpoint_path "$model/model.pth" --text $text --json)
    "${evaluate[@]}" --compare int8:d,int8:hd,8,16,k8v4,int4 | tail -1 >"$out.part"
    "${evaluate[@]}" --compare int4 --kv_strong 8,0 | tail -1 | sed 's/"int4"/"int4 --kv_strong 8,0"/' >>"$out.part"
    "$venv/bin/python" peers/llama_cpp_quality.py "${ggufs[0]}" $text >>"$out.part"
    mv "$out.part" "$out"
    "$PYTHON" accuracy_plot.py "$out" --out docs/accuracy.png
}

case ${1:-memory} in
    memory) memory ;;
    pictures) pictures ;;
    peers) peers ;;
    accuracy) accuracy ;;
    *) echo "benchmarks.sh: $1 is no benchmark; there are: memory, pictures, peers, accuracy" >&2; exit 2 ;;
esac
