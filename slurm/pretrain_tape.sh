#!/bin/bash
# Pretrain a model. The job is requeued after preemption, crashes and lost nodes until the run is finished.
#
#   sbatch [SBATCH OPTIONS] slurm/pretrain_tape.sh [RECIPE] [--section.key value ...]
#   slurm/pretrain_tape.sh [--sbatch "SBATCH OPTIONS"] [--dry-run] [RECIPE] [--section.key value ...]
#
# The second form reads slurm/site.env, checks the settings, and submits the script. --dry-run prints the sbatch command
# instead. RECIPE is a YAML file (default: pretrain/recipes/tape_155m.yaml). SBATCH OPTIONS are such as
# --nodes=8 --time=12:00:00. Relative paths in the recipe are relative to the directory that you submit from.
# `python -m pretrain.status RUN` shows the state of the run.

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
  root=$(cd "$(dirname "$0")/.." && pwd)
  source "$root/slurm/common.sh" || exit 1
  read_options "$@"
  load_site "$root"
  check_arguments pretrain.train pretrain/recipes/tape_155m.yaml "${script_arguments[@]}" || exit
  submit "${sbatch_options[@]}" "${options[@]}" "$root/slurm/pretrain_tape.sh" "${script_arguments[@]}"
  exit
fi
# The code is in the repository that this script was submitted from or, after a requeue, in the job's copy in the run
# directory.
root=$(scontrol show job "$SLURM_JOB_ID" | sed -n '0,/^ *Command=/{//{s///;s|/slurm/pretrain_tape\.sh.*||p}}')
link=$PWD/runs/.jobs/$SLURM_JOB_ID
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [ -d "$link/code" ] && root=$(readlink -f "$link")/code
[ -f "$root/slurm/common.sh" ] || root=$(cd "$(dirname "$0")/.." && pwd)
source "$root/slurm/common.sh" || exit 1
begin_job "$root" "$@"
run_job pretrain.train pretrain/recipes/tape_155m.yaml "$@"
