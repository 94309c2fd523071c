#!/bin/bash
# Tokenize a corpus in a job, which makes the dataset P, or in the tasks of an array, each of which makes one dataset of
# its share of the input files:
#
#   sbatch --cpus-per-task=16 slurm/preprocess.sh --input raw.jsonl --tokenizer t.model --output-prefix P --append-eod
#   sbatch --array=0-7 --cpus-per-task=16 slurm/preprocess.sh --input 'raw/*.jsonl' --tokenizer t.model \
#       --output-prefix P --append-eod
#   slurm/preprocess.sh ARGS...      submits itself as one job
#
# ARGS are those of tools/preprocess_data.py; relative paths are relative to where you submit. Every task uses the CPUs
# that Slurm gives it: one, unless --cpus-per-task or your site asks for more. Train on what the array makes with
# --data.prefix 'P-*'. If tasks fail, submit the same array again: complete datasets are kept.
#SBATCH --job-name=tape-preprocess
#SBATCH --ntasks=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out

set -euo pipefail

if [ -f "$(dirname "$0")/common.sh" ]; then # started by hand, perhaps within a job: Slurm runs a copy elsewhere
  case ${1:-} in "" | -h | --help) sed -n '2,/^#SBATCH/{/^#SBATCH/d;s/^# \{0,1\}//p}' "$0"; exit 0 ;; esac
  root=$(cd "$(dirname "$0")/.." && pwd)
  source "$root/slurm/common.sh"
  load_site "$root"
  submit "$0" "$@"
  exit
fi
# Slurm runs a copy of this file; the code is in the repository it was submitted from. For an array's last task scontrol
# prints all of them, and would fail if sed did not read to their end.
root=$(scontrol show job "$SLURM_JOB_ID" | sed -n '0,/^ *Command=/{//{s///;s|/slurm/preprocess\.sh.*||p}}')
source "$root/slurm/common.sh"
load_site "$root"
part=()
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
  if [ $((SLURM_ARRAY_TASK_MAX + 1)) -ne "$SLURM_ARRAY_TASK_COUNT" ]; then
    fail "the array does not begin at 0, or has gaps; submit all of it, such as --array=0-7: complete datasets are kept"
  fi
  part=(--part "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT")
fi
run_python "$root/tools/preprocess_data.py" --workers "${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}" "$@" "${part[@]}"
