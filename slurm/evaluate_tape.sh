#!/bin/bash
# Evaluate a model on all GPUs of the nodes. The job is requeued after preemption and crashes until it is finished.
#
#   sbatch [SBATCH OPTIONS] slurm/evaluate_tape.sh TASK... --model MODEL [--output DIR] [--TASK.setting value ...]
#   slurm/evaluate_tape.sh [--sbatch "SBATCH OPTIONS"] [--dry-run] TASK... --model MODEL [...]
#
# The processes share the work; each loads the whole model. `python -m pretrain.evaluate --help` explains MODEL, tasks
# and settings. The two forms: see slurm/pretrain_tape.sh.

#SBATCH --job-name=tape-evaluate
#SBATCH --nodes=1
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
  run_module pretrain.evaluate "${script_arguments[@]}" --check || exit
  submit "${sbatch_options[@]}" "${options[@]}" "$root/slurm/evaluate_tape.sh" "${script_arguments[@]}"
  exit
fi
# The code is in the repository that this script was submitted from.
root=$(scontrol show job "$SLURM_JOB_ID" | sed -n '0,/^ *Command=/{//{s///;s|/slurm/evaluate_tape\.sh.*||p}}')
[ -f "$root/slurm/common.sh" ] || root=$(cd "$(dirname "$0")/.." && pwd)
source "$root/slurm/common.sh" || exit 1
begin_job "$root" "$@"
run_evaluation "$@"
