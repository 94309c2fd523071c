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

case ${1:-} in
  "" | -h | --help)
    sed -n '2,/^#SBATCH/{/^#SBATCH/d;s/^# \{0,1\}//p}' "$0"
    [ $# -gt 0 ] || exit 2
    exit 0
    ;;
esac

# Slurm runs a copy of this script; the job's Command field holds the path of the original. What lies beside common.sh
# was started by hand, perhaps within a job.
by_hand=
[ ! -f "$(dirname "$0")/common.sh" ] || by_hand=1
if [ -z "$by_hand" ]; then
  # For an array's last task this prints all of them. sed reads to their end, as scontrol would fail if it did not.
  root=$(scontrol show job "$SLURM_JOB_ID" | sed -n '0,/^ *Command=/{//{s///;s|/slurm/preprocess\.sh.*||p}}') || true
else
  root=$(cd "$(dirname "$0")/.." && pwd)
fi
if [ ! -f "$root/slurm/common.sh" ]; then
  echo "error: the repository of this script was not found; submit it as sbatch .../slurm/preprocess.sh" >&2
  exit 1
fi
source "$root/slurm/common.sh"
load_site "$root"

if [ -n "$by_hand" ]; then
  submit "$0" "$@"
  exit
fi
part=()
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
  if [ $((SLURM_ARRAY_TASK_MAX + 1)) -ne "$SLURM_ARRAY_TASK_COUNT" ]; then
    fail "the array does not begin at 0, or has gaps; submit all of it, such as --array=0-7: complete datasets are kept"
  fi
  part=(--part "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT")
fi
run_python "$root/tools/preprocess_data.py" --workers "${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}" "$@" "${part[@]}"
