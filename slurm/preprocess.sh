#!/bin/bash
# Tokenize a corpus in one job, which makes the dataset P, or in a job array. Each task of an array makes one dataset
# from its share of the input files:
#
#   sbatch --cpus-per-task=16 slurm/preprocess.sh --input raw.jsonl --tokenizer t.model --output-prefix P
#   sbatch --array=0-7 --cpus-per-task=16 slurm/preprocess.sh --input 'raw/*.jsonl' --tokenizer t.model \
#       --output-prefix P
#   slurm/preprocess.sh [--sbatch "SBATCH OPTIONS"] [--dry-run] ARGS...
#
# The last form checks the arguments, the input and the tokenizer, and submits the script. --dry-run prints the sbatch
# command instead. ARGS are those of tools/preprocess_data.py. Relative paths are relative to the directory that you
# submit from. A task uses the CPUs that Slurm allocates: one, unless --cpus-per-task or your site asks for more. Train
# on the datasets of an array with --data.prefix 'P-*'. If tasks fail, submit the same array again: complete datasets
# are kept.

#SBATCH --job-name=tape-preprocess
#SBATCH --ntasks=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out

set -euo pipefail

if [ -f "$(dirname "$0")/common.sh" ]; then # run by a user: Slurm runs a copy in another directory
  root=$(cd "$(dirname "$0")/.." && pwd)
  source "$root/slurm/common.sh"
  [ $# -gt 0 ] || set -- --help
  read_options "$@"
  load_site "$root"
  run_module tools.preprocess_data "${script_arguments[@]}" --check
  submit "${options[@]}" "$root/slurm/preprocess.sh" "${script_arguments[@]}"
  exit
fi
# The code is in the repository that this script was submitted from. sed reads to the end of the output, since scontrol
# fails if its pipe is closed early: for the last task of an array it prints all tasks.
root=$(scontrol show job "$SLURM_JOB_ID" | sed -n '0,/^ *Command=/{//{s///;s|/slurm/preprocess\.sh.*||p}}')
source "$root/slurm/common.sh"
begin_job "$root" "$@"
part=()
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
  if [ $((SLURM_ARRAY_TASK_MAX + 1)) -ne "$SLURM_ARRAY_TASK_COUNT" ]; then
    fail "the array does not begin at 0, or has gaps; submit all of it, such as --array=0-7: complete datasets are kept"
  fi
  part=(--part "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT")
fi
run_module tools.preprocess_data --workers "$SLURM_CPUS_ON_NODE" "$@" "${part[@]}"
