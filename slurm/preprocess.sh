#!/bin/bash
# Tokenize a corpus with a Slurm job array: every task makes one part, and the last to finish joins them to P.bin and
# P.idx, byte for byte what tools/preprocess_data.py would write alone.
#
#   sbatch --array=0-7 --cpus-per-task=16 slurm/preprocess.sh --input 'data/*.jsonl' --tokenizer t.model \
#       --output-prefix data/c4 --append-eod
#   slurm/preprocess.sh ARGS...      submits itself with the array below
#
# ARGS are those of tools/preprocess_data.py; relative paths are relative to where you submit. Every task uses the CPUs
# that Slurm gives it: one, unless --cpus-per-task or your site asks for more.
#
# Run it again, with the same array, whenever tasks have failed: parts that are complete are kept, and a requeued task
# starts its own part afresh. The joined dataset needs as much room again as the parts, which are then removed. While
# a task joins, P.merge-JOB names it; after a failed job such a link may stay and can be removed.
#SBATCH --job-name=tape-preprocess
#SBATCH --array=0-7
#SBATCH --ntasks=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%A_%a.out

set -euo pipefail

case ${1:-} in
  "" | -h | --help)
    sed -n '2,/^#SBATCH/{/^#SBATCH/d;s/^# \{0,1\}//p}' "$0"
    [ $# -gt 0 ] || exit 2
    exit 0
    ;;
esac

# Slurm runs a copy of this script; the job knows where the original lies.
if [ -n "${SLURM_JOB_ID:-}" ]; then
  root=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\(.*\)/slurm/preprocess\.sh.*|\1|p')
  root=${root%%$'\n'*} # an array's last task sees all tasks
else
  root=$(cd "$(dirname "$0")/.." && pwd)
fi
if [ ! -f "$root/slurm/common.sh" ]; then
  echo "error: the repository of this script is not found; submit it as sbatch .../slurm/preprocess.sh" >&2
  exit 1
fi
source "$root/slurm/common.sh"
load_site "$root"

[ -n "${SLURM_JOB_ID:-}" ] || exec sbatch "$0" "$@"
[ -n "${SLURM_ARRAY_TASK_ID:-}" ] || fail "this job is not an array; submit with sbatch --array=0-7"

task=$SLURM_ARRAY_TASK_ID
count=$SLURM_ARRAY_TASK_COUNT
shard=$((task - SLURM_ARRAY_TASK_MIN))
if [ $((SLURM_ARRAY_TASK_MAX - SLURM_ARRAY_TASK_MIN + 1)) -ne "$count" ]; then
  fail "the array has gaps; submit with consecutive numbers such as --array=0-7"
fi

prefix="" overwrite="" previous=""
for argument in "$@"; do
  case $argument in
    --output-prefix=*) prefix=${argument#*=} ;;
    --overwrite) overwrite=--overwrite ;;
  esac
  [ "$previous" != --output-prefix ] || prefix=$argument
  previous=$argument
done
[ -n "$prefix" ] || fail "--output-prefix is missing; name the dataset to write"

run_python "$root/tools/preprocess_data.py" --workers "${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}" "$@" \
  --shard "$shard/$count"

# Every task looks only after its own part is there, so that the last one sees all.
shopt -s nullglob
of=of-$(printf %05d "$count")
part=$prefix.shard-$(printf %05d "$shard")-$of
indices=("$prefix".shard-*-"$of".idx)
complete=${#indices[@]}
if [ "$complete" -ge "$count" ]; then
  # With --overwrite some may be old and made of something else. A part's index appears last and goes first.
  for index in "${indices[@]}"; do
    if ! cmp -s -- "$part.origin" "${index%.idx}.origin" || [ ! -e "$index" ]; then complete=$((complete - 1)); fi
  done
fi
lock=$prefix.merge-$SLURM_ARRAY_JOB_ID

# A link appears at once with the name of its owner; a requeued owner finds its own.
take_lock() {
  if ln -sT -- "$task" "$lock" 2>/dev/null; then owner=$task; else owner=$(readlink -- "$lock"); fi
}

owner=$(readlink -- "$lock" || true)
if [ -z "$owner" ]; then
  [ -e "$part.idx" ] || exit 0 # the dataset is complete
  if [ "$complete" -lt "$count" ]; then
    echo "task $task: $complete of $count parts are complete; the last task joins them"
    exit 0
  fi
  # Twice, since the owner may have removed its link between our two steps.
  take_lock || take_lock || fail "$lock cannot be written; join the parts with tools/merge_datasets.py --shards $prefix"
fi
if [ "$owner" != "$task" ]; then
  echo "task $task: task $owner joins the parts"
  exit 0
fi
echo "task $task: joining the parts"
status=0
# shellcheck disable=SC2086
run_python "$root/tools/merge_datasets.py" --shards "$prefix" --count "$count" --remove-shards $overwrite || status=$?
rm -f -- "$lock"
exit $status
