#!/bin/bash
# Compare positional encodings with a job array, one task per encoding and seed, and then make the tables and the page.
#
#   slurm/compare.sh [--sbatch "OPTIONS"] [--at-once N] --recipe RECIPE --encodings A,B,... [--seeds N] [...]
#
# The arguments after the first two are those of python -m pretrain.compare; relative paths are relative to where you
# submit. OPTIONS, such as "--gpus=1 --time=4:00:00", are for the tasks of the array, each of which uses one GPU, or
# one CPU core where there is none. N limits how many of them run at once (default: as many as Slurm starts).
# A task is requeued after preemption and the time limit's warning, and goes on from its checkpoint. If some fail, submit
# the same command again: what is finished is not repeated. If the job for the tables cannot be submitted, or this is
# interrupted, the array is cancelled. Reads slurm/site.env.

#SBATCH --job-name=tape-compare
#SBATCH --ntasks=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%A_%a.out
#SBATCH --signal=B:USR1@180

trap 'on_signal USR1' USR1
trap 'on_signal TERM' TERM
on_signal() { SIGNALED=$1; }

if [ -f "$(dirname "$0")/common.sh" ]; then # started by hand, perhaps within a job: Slurm runs a copy elsewhere
  set -euo pipefail
  case ${1:-} in "" | -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
  root=$(cd "$(dirname "$0")/.." && pwd)
  source "$root/slurm/common.sh"
  load_site "$root"
  options=() limit=
  while :; do
    case ${1:-} in
      --sbatch) split_words options --sbatch "${2:-}" ;;
      --at-once) limit=%${2:-} ;;
      *) break ;;
    esac
    [ $# -ge 2 ] || fail "$1 needs a value"
    shift 2
  done
  [[ $limit =~ ^(%[1-9][0-9]*)?$ ]] || fail "--at-once is ${limit#%}; give a number of tasks"
  checked=$(run_module pretrain.compare "$@" --check)
  echo "$checked"
  runs=${checked%% *} # such as 1,200
  add_job array "${sbatch_options[@]}" "${options[@]}" --array="0-$((${runs//,/} - 1))$limit" \
    "$root/slurm/compare.sh" "$@"
  echo "runs    job $array"
  # Also after tasks that have failed: the tables then say what is missing.
  add_job report --dependency="afterany:$array" --output=slurm-%x-%j.out "$root/slurm/compare.sh" "$@"
  echo "report  job $report, after $array"
  exit 0
fi

# Slurm runs a copy of this file; the code is in the repository it was submitted from.
root=$(scontrol show job "$SLURM_JOB_ID" | sed -n '0,/^ *Command=/{//{s///;s|/slurm/compare\.sh.*||p}}')
[ -f "$root/slurm/common.sh" ] || root=$(cd "$(dirname "$0")/.." && pwd)
source "$root/slurm/common.sh" || exit 1
load_site "$root"
if [ -z "${SLURM_ARRAY_TASK_ID:-}" ]; then
  run_module pretrain.compare "$@" --report-only
  exit
fi
# The number by which Slurm knows this task alone.
SLURM_JOB_ID=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
run_task "$@"
