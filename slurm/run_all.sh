#!/bin/bash
# Submit pretraining, context extension and evaluation as dependent jobs: each starts when the previous one is finished.
#
#   slurm/run_all.sh [--sbatch "OPTIONS"] [--dry-run] [RECIPE] [--section.key value ...]
#     [--extend RECIPE [--section.key value ...]] [--evaluate TASK... [--TASK.setting value ...]]
#
# The arguments before --extend are for pretraining (default: pretrain/recipes/tape_155m.yaml), those after it for the
# extension of the pretrained model, and those after --evaluate for the evaluation of the last model (see
# python -m pretrain.evaluate --help). OPTIONS, such as "--nodes=4", apply to all jobs. If a job fails, Slurm cancels
# the later ones. If a job cannot be submitted, or this script is interrupted, all submitted jobs are cancelled, and you
# can run the same command again. --dry-run checks everything and prints the commands. Reads slurm/site.env.

set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
source "$root/slurm/common.sh"
read_options "$@"
load_site "$root"

pretrain=() extend=() evaluate=() part=pretrain
for argument in "${script_arguments[@]}"; do
  case $part$argument in
    pretrain--extend) part=extend ;;
    pretrain--evaluate | extend--evaluate) part=evaluate ;;
    *--extend | *--evaluate)
      fail "$argument follows the arguments of --$part; give --extend at most once, and then --evaluate at most once" ;;
    pretrain*) pretrain+=("$argument") ;;
    extend*) extend+=("$argument") ;;
    *) evaluate+=("$argument") ;;
  esac
done
[ $part != pretrain ] ||
  fail "neither --extend RECIPE nor --evaluate TASK is given; add one, or submit slurm/pretrain_tape.sh"
[ $part != extend ] || [ ${#extend[@]} -gt 0 ] || fail "--extend names no recipe; name one, or omit --extend"
[ $part != evaluate ] || [ ${#evaluate[@]} -gt 0 ] || fail "--evaluate names no task; name one, or omit --evaluate"

with_recipe pretrain/recipes/tape_155m.yaml "${pretrain[@]}"
pretrain=("${ARGUMENTS[@]}")
directories=$(run_module pretrain.attempt chain --scratch="${TAPE_SCRATCH:-}" -- "${pretrain[@]}" \
  ${extend[@]:+--extend "${extend[@]}"} ${evaluate[@]:+--evaluate "${evaluate[@]}"}) || exit
mapfile -t runs <<<"$directories"

# add VARIABLE SCRIPT PREDECESSOR ARGUMENTS...: submit a job that starts after PREDECESSOR, and store its ID in VARIABLE.
add() {
  local variable=$1 script=$2 after=()
  if [ -n "$3" ]; then after=(--dependency="afterok:$3" --kill-on-invalid-dep=yes); fi
  shift 3
  submit_job "$variable" "${sbatch_options[@]}" "${options[@]}" "${after[@]}" "$root/slurm/$script" "$@"
}

job=''
add job pretrain_tape.sh "" "${pretrain[@]}"
echo "pretraining  job $job, in ${runs[0]}"
if [ ${#extend[@]} -gt 0 ]; then
  before=$job
  add job extend_tape.sh "$before" "${extend[@]}" --extension.from="${runs[0]}"
  echo "extension    job $job, after $before, in ${runs[1]}"
fi
if [ ${#evaluate[@]} -gt 0 ]; then
  before=$job
  add job evaluate_tape.sh "$before" "${evaluate[@]}" --model="${runs[-1]}"
  echo "evaluation   job $job, after $before, in ${runs[-1]}/evaluation"
fi
