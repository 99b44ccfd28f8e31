#!/usr/bin/env bash
# Makes models/tiny-mla, text to weights: ./dev model. Every variable can be set from outside, STEPS=20 for a trial say.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

VOCAB_SIZE="${VOCAB_SIZE:-1024}"
STEPS="${STEPS:-4000}"
SEQ="${SEQ:-512}"
BATCH="${BATCH:-16}"
MICRO_BATCH="${MICRO_BATCH:-0}"
LEARNING_RATE="${LEARNING_RATE:-3e-3}"
MIN_LEARNING_RATE="${MIN_LEARNING_RATE:-3e-4}"
WARMUP="${WARMUP:-100}"
WEIGHT_DECAY="${WEIGHT_DECAY:-0.1}"
SEED="${SEED:-1}"
DTYPE="${DTYPE:-f32}"
LAYOUT="${LAYOUT:-explicit:1}"
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
    --eval-data "$held_out" --eval-every $((STEPS / 20 > 0 ? STEPS / 20 : 1)) --eval-sequences 64 --out "$run" \
    --layout "$LAYOUT" --steps "$STEPS" --seq "$SEQ" --batch "$BATCH" --micro-batch "$MICRO_BATCH" \
    --learning-rate "$LEARNING_RATE" --min-learning-rate "$MIN_LEARNING_RATE" --warmup "$WARMUP" \
    --weight-decay "$WEIGHT_DECAY" --seed "$SEED" --dtype "$DTYPE"
fi

# What ships is measured as it ships: rounded to bfloat16.
python3 tools/ship_model.py copy --run "$run" --out "$WORK/model"
"$ISOMER" eval perplexity --model "$WORK/model" --data "$held_out" --window "$SEQ" --json "$WORK/perplexity.json"
"$ISOMER" eval ngram --train "$train_text" --data "$held_out" --order 5 --tokenizer "$WORK/tokenizer" \
  --json "$WORK/ngram.json"
python3 tools/ship_model.py check --run "$run" --model "$WORK/model" --perplexity "$WORK/perplexity.json" \
  --ngram "$WORK/ngram.json"
cp "$WORK/model/"* "$SHIP/"
echo "written to $SHIP; run.json of the training has every setting: $run/run.json"
