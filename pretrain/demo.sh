#!/usr/bin/env bash
# Train TAPE and RoPE on text, extend both to four times the context, and compare both on a copying task. The results
# are on one page. docs/demo.md describes each step.
#
#     make demo
#
# An interrupted demo continues where it stopped: steps that are finished are skipped. `pretrain/demo.sh STEPS` trains
# each model for STEPS steps only; remove runs/demo before you change the number.
cd "$(dirname "$0")/.." || exit
. pretrain/demo_common.sh
D=runs/demo
steps=${1:+--train.steps $1 --schedule.warmup_steps $(($1 / 10))}
documents=${1:+--perplexity.documents 4}
echo "To watch the training: tensorboard --logdir $D"

[ -e $D/data/stdlib.jsonl ] || run python tools/make_corpus.py stdlib --output $D/data/stdlib.jsonl
[ -e $D/data/tokenizer.model ] || run python tools/train_tokenizer.py --input $D/data/stdlib.jsonl --vocab-size 4096 \
  --output $D/data/tokenizer.model
[ -e $D/data/stdlib.idx ] || run python tools/preprocess_data.py --input $D/data/stdlib.jsonl \
  --tokenizer $D/data/tokenizer.model --output-prefix $D/data/stdlib --workers 2

for model in tape rope; do
  run "${torchrun[@]}" pretrain.train --config pretrain/recipes/${model}_demo.yaml --logging.directory $D/$model $steps
done
[ -e $D/tape-hf ] || run python tools/convert_checkpoint.py to-hf --checkpoint $D/tape --output $D/tape-hf
run python tools/generate.py --model $D/tape-hf --prompt "def main("

for model in tape rope; do
  run "${torchrun[@]}" pretrain.extend_context --config pretrain/recipes/extend/tiny_$model.yaml \
    --logging.directory $D/$model-1024 $steps
done
for model in tape rope tape-1024 rope-1024; do
  run python -m pretrain.evaluate --config pretrain/recipes/evaluate/demo.yaml --model $D/$model $documents
done
run python -m pretrain.compare --recipe pretrain/recipes/compare/selective_copy.yaml --seeds 1 \
  --encodings rope,tape,rope+increments=signed,tape+increments=signed \
  ${steps:---train.steps 400 --schedule.warmup_steps 40} --output $D/copying

run python -m pretrain.report $D/tape $D/rope $D/tape-1024 $D/rope-1024 $D/copying --output $D/report.html
echo "Results: $D/report.html. Training curves: tensorboard --logdir $D"
