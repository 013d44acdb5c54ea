#!/bin/sh
# `make demo`: trains the default model on a synthetic click log whose best reachable normalized
# entropy is known, and says how much of the way there it went.
#
#   BIRKHOFF=path/to/birkhoff DEVICE=auto TRAIN_ROWS=200000 VALID_ROWS=50000 sh examples/demo.sh
#
# Further arguments go to `birkhoff train`: sh examples/demo.sh --set model.residual.mode=shortcut
set -eu

birkhoff=${BIRKHOFF:-birkhoff}
device=${DEVICE:-auto}
train_rows=${TRAIN_ROWS:-200000}
valid_rows=${VALID_ROWS:-50000}

work=$(mktemp -d "${TMPDIR:-/tmp}/birkhoff-demo.XXXXXX")
if [ -n "${KEEP:-}" ]; then
    echo "files stay in $work" >&2
else
    trap 'rm -rf "$work"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
fi

# The number behind "key": in a line of JSON; a null gives nothing.
number() { sed -n 's/.*"'"$1"'":\(-\{0,1\}[0-9][0-9.eE+-]*\).*/\1/p' "$2" | tail -n 1; }

echo "1. A click log from a planted model: $train_rows rows to learn from, $valid_rows to be judged on"
"$birkhoff" synth --rows "$train_rows" --seed 1 --out "$work/train.tsv" --json >"$work/synth-train.json"
"$birkhoff" synth --rows "$valid_rows" --seed 2 --out "$work/valid.tsv" --json >"$work/synth-valid.json"

echo "2. One pass of training: four DHEN layers (attention + linear), mHC residual with four streams"
"$birkhoff" train --train "$work/train.tsv" --valid "$work/valid.tsv" --format criteo \
    --out "$work/run" --device "$device" --json "$@" >"$work/train.jsonl"

echo "3. The trained run, on the validation rows"
"$birkhoff" eval "$work/run" --data "$work/valid.tsv" --device "$device" --json >"$work/eval.json"

truth=$(number truth_ne "$work/synth-valid.json")
model=$(number ne "$work/eval.json")
auc=$(number auc "$work/eval.json")
truth_auc=$(number truth_auc "$work/synth-valid.json")
if [ -z "$truth" ] || [ -z "$model" ]; then
    echo "demo: the results lack an NE; KEEP=1 keeps the files" >&2
    exit 2
fi

awk -v truth="$truth" -v model="$model" -v auc="${auc:-0}" -v truth_auc="${truth_auc:-0}" 'BEGIN {
    printf "\nnormalized entropy, lower is better\n"
    printf "  base rate      1.0000   (predicts the average for every row)   AUC 0.5000\n"
    printf "  model          %.4f   (this run)                              AUC %.4f\n", model, auc
    printf "  planted truth  %.4f   (no model can expect to do better)      AUC %.4f\n", truth, truth_auc
    printf "  the model closed %.1f %% of the distance\n", 100 * (1 - model) / (1 - truth)
}'
