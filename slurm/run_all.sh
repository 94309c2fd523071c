#!/bin/bash
# Submit pretraining, context extension and evaluation as a chain: each starts when the previous one has finished.
#
#   slurm/run_all.sh [--sbatch "OPTIONS"] [RECIPE] [--section.key value ...]
#
# RECIPE and settings are for pretraining; --sbatch gives options to all three submissions, such as "--nodes=4". If a job
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

check_arguments "$@" || exit
pretraining=$(submit pretrain_tape.sh -- "$@")
extension=$(submit extend_tape.sh "$pretraining" --)
evaluation=$(submit evaluate_tape.sh "$extension" --)
echo "pretraining  job $pretraining"
echo "extension    job $extension, after $pretraining"
echo "evaluation   job $evaluation, after $extension"
for module in pretrain.extend_context pretrain.evaluate; do
  has_module "$module" ||
    echo "note: $module is not part of this version: its job ends at once, and later jobs are removed from the queue"
done
