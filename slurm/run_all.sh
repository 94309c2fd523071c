#!/bin/bash
# Submit pretraining, context extension and evaluation as a chain: each starts when the previous one has finished.
#
#   slurm/run_all.sh [--sbatch "OPTIONS"] [RECIPE] [--section.key value ...] --extend RECIPE [--section.key value ...]
#
# What stands before --extend is for pretraining (default: pretrain/recipes/tape_155m.yaml), what follows is for the
# extension of the model that it makes. --sbatch gives options to all three submissions, such as "--nodes=4". If a job
# fails, the ones after it are removed from the queue. Reads slurm/site.env.

set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
root=$(cd "$(dirname "$0")/.." && pwd)
source "$root/slurm/common.sh"
load_site "$root"
options=()
if [ "${1:-}" = --sbatch ]; then
  [ $# -ge 2 ] || fail "--sbatch takes options in quotes"
  read -r -a options <<<"$2"
  shift 2
fi

# submit SCRIPT [PREDECESSOR] -- ARGUMENTS: print the job's number.
submit() {
  local script=$1 after=()
  [ "$2" = -- ] || { after=(--dependency="afterok:$2" --kill-on-invalid-dep=yes); shift; }
  shift 2
  sbatch --parsable "${options[@]}" "${after[@]}" "$root/slurm/$script" "$@" | cut -d';' -f1
}

pretrain=()
while [ $# -gt 0 ] && [ "$1" != --extend ]; do
  pretrain+=("$1")
  shift
done
[ $# -gt 1 ] || fail "--extend RECIPE is missing; name the recipe of the extension after the settings of pretraining"
shift
with_recipe pretrain/recipes/tape_155m.yaml "${pretrain[@]}"
run=$(run_module pretrain.attempt chain --scratch "${TAPE_SCRATCH:-}" -- "${ARGUMENTS[@]}" --extend "$@") || exit
pretraining=$(submit pretrain_tape.sh -- "${ARGUMENTS[@]}")
extension=$(submit extend_tape.sh "$pretraining" -- "$@" --extension.from "$run")
evaluation=$(submit evaluate_tape.sh "$extension" --)
echo "pretraining  job $pretraining, in $run"
echo "extension    job $extension, after $pretraining"
echo "evaluation   job $evaluation, after $extension"
has_module pretrain.evaluate ||
  echo "note: pretrain.evaluate is not part of this version: its job ends at once"
