#!/bin/bash
# Compare positional encodings in a job array with one task per encoding and seed. A second job writes the tables and
# the page.
#
#   slurm/compare.sh [--sbatch "OPTIONS"] [--dry-run] [--at-once N] --recipe RECIPE --encodings A,B,... [...]
#   slurm/compare.sh [--sbatch "OPTIONS"] [--dry-run] [--at-once N] --ladder RECIPE [--extend-grid] [...]
#
# The other arguments are those of python -m pretrain.compare. Relative paths are relative to the directory that you
# submit from. OPTIONS, such as "--gpus=1 --time=4:00:00", apply to the tasks of arrays; each uses one GPU, or one CPU
# core without GPUs. N limits the number of tasks of an array that run at once (default: no limit). --dry-run checks
# everything and prints the sbatch commands instead of submitting.
# A ladder has two arrays. The tasks of the first one tune learning rates, each with all runs of a tuning. The second
# one has a task for each other run, and starts once all tunings have succeeded. If a tuning fails, or its best rate is
# at the end of the grid, Slurm cancels the second array; the report says which rates to add, or give --extend-grid.
# A task is requeued after preemption and before its time limit, and continues from its checkpoint. If tasks fail, run
# the same command again: finished runs are not repeated. If a job cannot be submitted, or this script is interrupted,
# the jobs before it are cancelled. Reads slurm/site.env, without TAPE_SBATCH_OPTIONS.

#SBATCH --job-name=tape-compare
#SBATCH --ntasks=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%A_%a.out
#SBATCH --signal=B:USR1@180

trap 'on_signal USR1' USR1
trap 'on_signal TERM' TERM
on_signal() { SIGNALED=$1; }

# check_array_size LAST: fail if LAST is above the task numbers that Slurm allows.
check_array_size() {
  local size
  size=$(scontrol show config 2>/dev/null | sed -n 's/^MaxArraySize *= *//p') || true # empty without Slurm
  [ -z "$size" ] || [ "$1" -lt "$size" ] ||
    fail "task $1 would be the last one of an array, but MaxArraySize of this cluster is $size; choose fewer" \
      "--encodings, and submit the others once these have finished: the results are added"
}

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
  # A ladder's second line estimates the time on this machine, which is not that of the jobs.
  echo "${checked%%$'\n'*}"
  counts=${checked//,/} # 1,200 becomes 1200
  if [[ $counts =~ ^([0-9]+)\ tunings?\ of\ learning\ rates\ \([0-9]+\ runs?\)\ ([0-9]+)\ other ]]; then
    # The task numbers of the other runs follow those of the tunings.
    first=${BASH_REMATCH[1]}
    last=$((first + BASH_REMATCH[2] - 1))
    check_array_size "$last"
    submit_job tunings "${options[@]}" --array="0-$((first - 1))$limit" "$root/slurm/compare.sh" "$@"
    echo "tunings job $tunings"
    # Without learning rates, these runs cannot start: Slurm cancels them if a tuning fails.
    submit_job runs "${options[@]}" --dependency="afterok:$tunings" --kill-on-invalid-dep=yes \
      --array="$first-$last$limit" "$root/slurm/compare.sh" "$@"
    echo "runs    job $runs, after $tunings"
  else
    last=$((${counts%% *} - 1))
    check_array_size "$last"
    submit_job runs "${options[@]}" --array="0-$last$limit" "$root/slurm/compare.sh" "$@"
    echo "runs    job $runs"
  fi
  # afterany: run also if tasks have failed. The tables then name the missing runs.
  submit_job report --dependency="afterany:$runs" --output=slurm-%x-%j.out "$root/slurm/compare.sh" "$@"
  echo "report  job $report, after $runs"
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
