#!/bin/bash
# Compare positional encodings in a job array with one task per encoding and seed. A second job writes the tables and
# the page.
#
#   slurm/compare.sh [--sbatch "OPTIONS"] [--dry-run] [--at-once N] --recipe RECIPE --encodings A,B,... [...]
#
# The other arguments are those of python -m pretrain.compare. Relative paths are relative to the directory that you
# submit from. OPTIONS, such as "--gpus=1 --time=4:00:00", apply to the tasks of the array; each uses one GPU, or one CPU
# core without GPUs. N limits the number of tasks that run at once (default: no limit). --dry-run checks everything and
# prints the sbatch commands instead of submitting.
# A task is requeued after preemption and before its time limit, and continues from its checkpoint. If tasks fail, run
# the same command again: finished runs are not repeated. If the second job cannot be submitted, or this script is
# interrupted, the array is cancelled. Reads slurm/site.env, without TAPE_SBATCH_OPTIONS.

#SBATCH --job-name=tape-compare
#SBATCH --ntasks=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%A_%a.out
#SBATCH --signal=B:USR1@180

trap 'on_signal USR1' USR1
trap 'on_signal TERM' TERM
on_signal() { SIGNALED=$1; }

if [ -f "$(dirname "$0")/common.sh" ]; then # run by a user: Slurm runs a copy in another directory
  set -euo pipefail
  root=$(cd "$(dirname "$0")/.." && pwd)
  source "$root/slurm/common.sh"
  [ $# -gt 0 ] || set -- --help
  read_options "$@"
  load_site "$root"
  set -- "${script_arguments[@]}"
  limit='' comparison=()
  while [ $# -gt 0 ]; do
    if [ "$1" = --at-once ]; then
      limit=%${2:-}
      [[ $limit =~ ^%[1-9][0-9]*$ ]] || fail "--at-once is '${limit#%}'; give a number of tasks of at least 1"
      shift
    else
      comparison+=("$1")
    fi
    shift
  done
  set -- "${comparison[@]}"
  checked=$(run_module pretrain.compare "$@" --check)
  echo "$checked"
  runs=${checked%% *} # such as 1,200
  submit_job array "${options[@]}" --array="0-$((${runs//,/} - 1))$limit" \
    "$root/slurm/compare.sh" "$@"
  echo "runs    job $array"
  # afterany: run also if tasks have failed. The tables then name the missing runs.
  submit_job report --dependency="afterany:$array" --output=slurm-%x-%j.out "$root/slurm/compare.sh" "$@"
  echo "report  job $report, after $array"
  exit 0
fi

# The code is in the repository that this script was submitted from.
root=$(scontrol show job "$SLURM_JOB_ID" | sed -n '0,/^ *Command=/{//{s///;s|/slurm/compare\.sh.*||p}}')
[ -f "$root/slurm/common.sh" ] || root=$(cd "$(dirname "$0")/.." && pwd)
source "$root/slurm/common.sh" || exit 1
begin_job "$root" "$@"
if [ -z "${SLURM_ARRAY_TASK_ID:-}" ]; then
  run_module pretrain.compare "$@" --report-only
  exit
fi
# The ID of this task only.
SLURM_JOB_ID=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
run_task "$@"
