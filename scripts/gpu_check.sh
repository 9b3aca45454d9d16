#!/usr/bin/env bash
# Everything that only a GPU can say, in under 8 minutes on an H200: tests, kernel times, step and training costs, decoding.
#
#     bash scripts/gpu_check.sh OUT [--smoke]
#
# OUT gets a log of each part, its JSON, and gpu_check.json with the outcome of all parts. Each part has a time limit and
# none depends on another. `--smoke` takes the same way on a CPU: tiny shapes, kernels in Triton's interpreter.
# HEADTRAIN_TARGET: a model folder or the GGUF of SmolLM2 (default: models/SmolLM2-135M-Instruct if it is there);
# HEADTRAIN_HEAD: a head for it (default: recipes/pretrained/smollm2-135m-eagle3 if it is there). No network is used.
set -uo pipefail

cd "$(dirname "$0")/.."
out=${1:?usage: gpu_check.sh OUT [--smoke]}
smoke=${2:-}
mkdir -p "$out"
out=$(cd "$out" && pwd)
[ -z "${VIRTUAL_ENV:-}" ] && [ -f .venv/bin/activate ] && source .venv/bin/activate
export PYTHONPATH=".:kernels" HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
target=${HEADTRAIN_TARGET:-models/SmolLM2-135M-Instruct}
head=${HEADTRAIN_HEAD:-recipes/pretrained/smollm2-135m-eagle3}
if [ "$smoke" = --smoke ]; then
    export CUDA_VISIBLE_DEVICES="" TRITON_INTERPRET=1
elif ! python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    echo "gpu_check: no NVIDIA GPU here; use --smoke" >&2
    exit 2
fi

parts=()
failed=0
# part NAME SECONDS COMMAND..: run it with a limit, keep its output, note how it ended
part() {
    local name=$1 limit=$2 start=$SECONDS rc
    shift 2
    timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1
    rc=$?
    [ $rc -ne 0 ] && failed=1
    parts+=("{\"part\": \"$name\", \"exit\": $rc, \"seconds\": $((SECONDS - start)), \"limit\": $limit}")
    printf '%-12s exit %3d  %4d s  %s\n' "$name" $rc $((SECONDS - start)) "$(grep -v '^ *$' "$out/$name.log" | tail -1 | cut -c1-110)"
    write_summary
}
skip() {
    parts+=("{\"part\": \"$1\", \"skipped\": \"$2\"}")
    printf '%-12s skipped: %s\n' "$1" "$2"
}
write_summary() {
    (IFS=,; printf '{"date": "%s", "commit": "%s", "parts": [%s]}\n' "$(date -I)" "$(git rev-parse --short HEAD 2>/dev/null)" "${parts[*]}") \
        >"$out/.gpu_check.json" && mv "$out/.gpu_check.json" "$out/gpu_check.json"
}
real_target() {
    if [[ "$target" == *.gguf && -f "$target" ]]; then
        python -c "import sys; sys.path.insert(0, 'scripts'); from pathlib import Path; import get_target
get_target.convert(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))" "$target" "$out/target" >"$out/convert.log" 2>&1 \
            && target=$out/target
    fi
    [ -f "$target/config.json" ]
}

python - <<'PY' 2>/dev/null | tee "$out/versions.txt"
import torch, transformers
try:
    import triton
    version = triton.__version__
except ImportError:
    version = "absent"
name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
print(f"{name}, torch {torch.__version__}, triton {version}, transformers {transformers.__version__}")
PY

steps=(python scripts/benchmark_step.py --out "$out")
if [ "$smoke" = --smoke ]; then
    part tests 150 python -m pytest -q -p no:cacheprovider tests/kernels tests/decode/test_gpu.py -m "not slow and not gpu" \
        -k "last_nodes or moves_the_path or asserts or walk or never_waits or group_sizes"
    part step-tiny 90 "${steps[@]}" --shape tiny --tokens 40 --repeats 1 --context 20 --eager --train
    part kernels 60 python scripts/benchmark_kernels.py --out "$out"
    if real_target; then
        options=(); [ -d "$head" ] && options=(--head "$head")
        part target 150 "${steps[@]}" --target "$target" "${options[@]}" --tokens 3 --repeats 1
    else
        skip target "no model folder at $target"
    fi
else
    part tests 110 python -m pytest -q -p no:cacheprovider tests/kernels tests/decode/test_graphs.py -m gpu
    part step-8b 90 "${steps[@]}" --shape 8b --context 1024 16384 --eager --tokens 192 --repeats 2
    part kernels 110 python scripts/benchmark_kernels.py --out "$out"
    part step-1b 55 "${steps[@]}" --shape 1b --context 1024 --train --tokens 192 --repeats 2
    if real_target; then
        options=(); [ -d "$head" ] && options=(--head "$head")
        part target 50 "${steps[@]}" --target "$target" "${options[@]}" --tokens 128
    else
        skip target "no model folder at $target"
    fi
    if [ -f scripts/benchmark_training.py ] && grep -q '"--device"' scripts/benchmark_training.py && [ -f "$target/config.json" ]; then
        part training 45 python scripts/benchmark_training.py --device cuda --target "$target" --out "$out"
    else
        skip training "scripts/benchmark_training.py times a CPU; step-1b times a training step here"
    fi
fi
write_summary

echo
grep -hE 'ms/step|tokens/s' "$out"/step-*.log "$out"/target.log 2>/dev/null
grep -hE '^target |failed:' "$out/kernels.log" 2>/dev/null
grep -hE '^(kv_commit|tree_verify|noise|topk|distill|grouped|flex)|L=32768|L=40' "$out/kernels.log" 2>/dev/null | grep ' ms '
exit $failed
