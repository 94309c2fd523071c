#!/bin/bash
# Submit pretraining, context extension and evaluation as a chain: each starts when the previous one has finished.
#
#   slurm/run_all.sh [--sbatch "OPTIONS"] [RECIPE] [--section.key value ...] --extend RECIPE [--section.key value ...]
#     [--evaluate TASK... [--TASK.setting value ...]]
#
# What stands before --extend is for pretraining (default: pretrain/recipes/tape_155m.yaml), what follows is for the
# extension of the model that it makes, and what follows --evaluate for the evaluation of the extended model
# (python -m pretrain.evaluate --help). --sbatch gives options to all submissions, such as "--nodes=4". If a job fails,
# the ones after it are removed from the queue. If one cannot be submitted, or this is interrupted, those that were are
# cancelled, so that the same command can be given again. Reads slurm/site.env.

set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
root=$(cd "$(dirname "$0")/.." && pwd)
source "$root/slurm/common.sh"
load_site "$root"
options=()
if [ "${1:-}" = --sbatch ]; then
  [ $# -ge 2 ] || fail "--sbatch takes options in quotes"
  split_words options --sbatch "$2"
  shift 2
fi

# add VARIABLE SCRIPT [PREDECESSOR] -- ARGUMENTS: put the job's number into VARIABLE.
add() {
  local variable=$1 script=$2 after=()
  [ "$3" = -- ] || { after=(--dependency="afterok:$3" --kill-on-invalid-dep=yes); shift; }
  shift 3
  add_job "$variable" "${sbatch_options[@]}" "${options[@]}" "${after[@]}" "$root/slurm/$script" "$@"
}

pretrain=() extend=() evaluate=() part=pretrain
for argument in "$@"; do
  case $part$argument in
    pretrain--extend) part=extend ;;
    extend--evaluate) part=evaluate ;;
    pretrain*) pretrain+=("$argument") ;;
    extend*) extend+=("$argument") ;;
    *) evaluate+=("$argument") ;;
  esac
done
[ ${#extend[@]} -gt 0 ] ||
  fail "--extend RECIPE is missing; name the recipe of the extension after the settings of pretraining"
[ $part != evaluate ] || [ ${#evaluate[@]} -gt 0 ] || fail "--evaluate names no task; name some, or leave it out"
with_recipe pretrain/recipes/tape_155m.yaml "${pretrain[@]}"
runs=$(run_module pretrain.attempt chain --scratch="${TAPE_SCRATCH:-}" -- "${ARGUMENTS[@]}" --extend "${extend[@]}" \
  ${evaluate[@]:+--evaluate "${evaluate[@]}"}) || exit
{ IFS= read -r pretrained && IFS= read -r extended; } <<<"$runs"
add pretraining pretrain_tape.sh -- "${ARGUMENTS[@]}"
echo "pretraining  job $pretraining, in $pretrained"
add extension extend_tape.sh "$pretraining" -- "${extend[@]}" --extension.from="$pretrained"
echo "extension    job $extension, after $pretraining, in $extended"
[ ${#evaluate[@]} -gt 0 ] || exit 0
add evaluation evaluate_tape.sh "$extension" -- "${evaluate[@]}" --model="$extended"
echo "evaluation   job $evaluation, after $extension, in $extended/evaluation"
