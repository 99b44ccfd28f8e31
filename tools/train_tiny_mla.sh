#!/usr/bin/env bash
# Makes models/tiny-mla, text to weights: ./dev model. Every variable can be set from outside, STEPS=20 for a trial say.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

VOCAB_SIZE="${VOCAB_SIZE:-2048}"
STEPS="${STEPS:-1800}"
SEQ="${SEQ:-1024}"
BATCH="${BATCH:-8}"
LEARNING_RATE="${LEARNING_RATE:-3e-3}"
MIN_LEARNING_RATE="${MIN_LEARNING_RATE:-1e-4}"
WARMUP="${WARMUP:-60}"
INIT_STD="${INIT_STD:-0.03}"
BIAS_UPDATE_RATE="${BIAS_UPDATE_RATE:-1e-2}"
SEED="${SEED:-1}"
DTYPE="${DTYPE:-bf16}"
LAYOUT="${LAYOUT:-laga:1}"
EVAL_EVERY="${EVAL_EVERY:-200}"
SAVE_EVERY="${SAVE_EVERY:-100}"
WORK="${WORK:-build/tiny-mla}" # everything on the way; a run that was interrupted there goes on
SHIP="${SHIP:-models/tiny-mla}" # where config.json is, and the rest goes
ISOMER="${ISOMER:-build/release/isomer}"

train_text=build/corpus/train.txt
held_out=build/corpus/held-out.txt
run="$WORK/run"

python3 tools/corpus.py --out build/corpus
mkdir -p "$WORK"
"$ISOMER" tokenizer train --data "$train_text" --vocab-size "$VOCAB_SIZE" --out "$WORK/tokenizer"

if [[ -f "$run/run.json" ]]; then
  "$ISOMER" train --resume "$run"
else
  "$ISOMER" train --config "$SHIP/config.json" --tokenizer "$WORK/tokenizer" --data "$train_text" \
    --eval-data "$held_out" --eval-every "$EVAL_EVERY" --eval-sequences 64 --save-every "$SAVE_EVERY" --out "$run" \
    --layout "$LAYOUT" --steps "$STEPS" --seq "$SEQ" --batch "$BATCH" --dtype "$DTYPE" --seed "$SEED" \
    --learning-rate "$LEARNING_RATE" --min-learning-rate "$MIN_LEARNING_RATE" --warmup "$WARMUP" \
    --init-std "$INIT_STD" --bias-update-rate "$BIAS_UPDATE_RATE"
fi

# What ships is measured as it ships: rounded to bfloat16.
python3 tools/ship_model.py copy --run "$run" --out "$WORK/model"
"$ISOMER" eval perplexity --model "$WORK/model" --data "$held_out" --window "$SEQ" --json "$WORK/perplexity.json"
"$ISOMER" eval ngram --train "$train_text" --data "$held_out" --order 5 --tokenizer "$WORK/tokenizer" \
  --json "$WORK/ngram.json"
python3 tools/ship_model.py check --run "$run" --model "$WORK/model" --perplexity "$WORK/perplexity.json" \
  --ngram "$WORK/ngram.json"
cp "$WORK/model/"* "$SHIP/"
python3 tools/draw_loss.py "$SHIP"
echo "written to $SHIP; run.json of the training has every setting: $run/run.json"
