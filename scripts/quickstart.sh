#!/usr/bin/env bash
# Environment, a real target, decoding with the shipped head, and a small head trained from nothing.
set -euo pipefail
source "$(dirname "$0")/setup.sh" demo
out=runs/quickstart
target=$(python scripts/get_target.py | tail -n 1) # libraries print warnings before it
mkdir -p "$out"
shipped=$out/shipped
rm -rf "$shipped" && cp -r recipes/pretrained/smollm2-135m-eagle3 "$shipped"
prompts=scripts/quickstart_prompts.jsonl

echo "== the shipped head: a tree for this device, then acceptance and speed"
headtrain tune "$shipped" --target "$target"
headtrain evaluate "$shipped" --target "$target" --prompts "$prompts" --max-new-tokens 96 --out "$out"

echo "== a small head from nothing"
rm -rf "$out/small"
accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
    train.py recipes/smollm2-135m-eagle3.yaml target.model="$target" data.train=scripts/quickstart_train.jsonl \
    train.epochs=null train.steps=30 train.log_every=10 head.steps=2 head.vocabulary=2048 output="$out/small"
headtrain evaluate "$out/small/head" --target "$target" --prompts "$prompts" --limit 3 --max-new-tokens 48 --out "$out/small"
echo "reports: $out/report.json (shipped head), $out/small/report.json (30 steps of training)"
