#!/bin/bash
# Submit pretraining, context extension and evaluation as dependent jobs: each starts when the previous one is finished.
#
#   slurm/run_all.sh [--sbatch "OPTIONS"] [RECIPE] [--section.key value ...] --extend RECIPE [--section.key value ...]
#     [--evaluate TASK... [--TASK.setting value ...]]
#
# The arguments before --extend are for pretraining (default: pretrain/recipes/tape_155m.yaml), those after it for the
# extension of the pretrained model, and those after --evaluate for the evaluation of the extended model (see
# python -m pretrain.evaluate --help). OPTIONS, such as "--nodes=4", apply to all jobs. If a job fails, Slurm cancels
# the later ones. If a job cannot be submitted, or this script is interrupted, all submitted jobs are cancelled, and you
# can run the same command again. Reads slurm/site.env.

set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
root=$(cd "$(dirname "$0")/.." && pwd)
source "$root/slurm/common.sh"
load_site "$root"
options=()
if [ "${1:-}" = --sbatch ]; then
  [ $# -ge 2 ] || fail "--sbatch needs options in quotes, such as \"--nodes=4\""
  split_words options --sbatch "$2"
  shift 2
fi

# add VARIABLE SCRIPT [PREDECESSOR] -- ARGUMENTS: submit a job and store its ID in VARIABLE.
add() {
  local variable=$1 script=$2 after=()
  [ "$3" = -- ] || { after=(--dependency="afterok:$3" --kill-on-invalid-dep=yes); shift; }
  shift 3
  submit_job "$variable" "${sbatch_options[@]}" "${options[@]}" "${after[@]}" "$root/slurm/$script" "$@"
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
[ $part != evaluate ] || [ ${#evaluate[@]} -gt 0 ] || fail "--evaluate names no task; name one, or omit --evaluate"
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
