#!/bin/bash
# Pretrain a model. The job is requeued after preemption, crashes and lost nodes until the run is finished.
#
#   sbatch [sbatch options] slurm/pretrain_tape.sh [RECIPE] [--section.key value ...]
#   slurm/pretrain_tape.sh [RECIPE] ...     submits itself, with the account and partition of slurm/site.env
#
# RECIPE is a YAML file (default: pretrain/recipes/tape_155m.yaml). sbatch options go between sbatch and the script:
# `sbatch --nodes=8 --time=12:00:00 slurm/pretrain_tape.sh pretrain/recipes/tape_1b.yaml`. Relative paths in the recipe
# are relative to the directory that you submit from. `python -m pretrain.status RUN` shows the state of the run.

#SBATCH --job-name=tape-pretrain
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out
#SBATCH --signal=B:USR1@180

trap 'on_signal USR1' USR1
trap 'on_signal TERM' TERM
on_signal() { SIGNALED=$1; }

if [ -f "$(dirname "$0")/common.sh" ]; then # run by a user: Slurm runs a copy in another directory
  case ${1:-} in -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
  root=$(cd "$(dirname "$0")/.." && pwd)
  source "$root/slurm/common.sh" && load_site "$root"
  check_arguments pretrain.train pretrain/recipes/tape_155m.yaml "$@" || exit
  submit "${sbatch_options[@]}" "$root/slurm/$(basename "$0")" "$@"
  exit
fi
# The code is in the repository that this script was submitted from or, after a requeue, in the job's copy in the run
# directory.
root=$(scontrol show job "$SLURM_JOB_ID" | sed -n '0,/^ *Command=/{//{s///;s|/slurm/pretrain_tape\.sh.*||p}}')
link=$PWD/runs/.jobs/$SLURM_JOB_ID
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [ -d "$link/code" ] && root=$(readlink -f "$link")/code
[ -f "$root/slurm/common.sh" ] || root=$(cd "$(dirname "$0")/.." && pwd)
source "$root/slurm/common.sh" || exit 1
begin_job "$root"
run_job pretrain.train pretrain/recipes/tape_155m.yaml "$@"
