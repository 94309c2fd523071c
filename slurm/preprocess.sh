#!/bin/bash
# Tokenize a corpus with a Slurm job array: every task makes one part, and the last to finish joins them into P.bin and
# P.idx, which are byte for byte what a single tools/preprocess_data.py would write.
#
#   sbatch --array=0-7 --cpus-per-task=16 slurm/preprocess.sh --input 'data/*.jsonl' --tokenizer t.model \
#       --output-prefix data/c4 --append-eod
#   slurm/preprocess.sh ARGS...      submits itself as an array of 8 tasks
#
# ARGS are those of tools/preprocess_data.py; relative paths are relative to where you submit. Every task uses the CPUs
# that Slurm gives it: one, unless --cpus-per-task or your site asks for more.
#
# If tasks fail, run it again with the same array: complete parts are kept, and a requeued task starts its own part
# again. The joined dataset needs as much space again as the parts, which are then removed. While a task joins the parts,
# the link P.merge-JOB holds its number; after a failed job the link may remain and can be removed.
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

# Slurm runs a copy of this script; the job's Command field holds the path of the original. What lies beside common.sh
# was started by hand, perhaps within a job.
by_hand=
[ ! -f "$(dirname "$0")/common.sh" ] || by_hand=1
if [ -z "$by_hand" ]; then
  # For an array's last task this prints all of them. sed reads to their end, as scontrol would fail if it did not.
  root=$(scontrol show job "$SLURM_JOB_ID" | sed -n '0,/^ *Command=/{//{s///;s|/slurm/preprocess\.sh.*||p}}') || true
else
  root=$(cd "$(dirname "$0")/.." && pwd)
fi
if [ ! -f "$root/slurm/common.sh" ]; then
  echo "error: the repository of this script was not found; submit it as sbatch .../slurm/preprocess.sh" >&2
  exit 1
fi
source "$root/slurm/common.sh"
load_site "$root"

if [ -n "$by_hand" ]; then
  submit "$0" "$@"
  exit
fi
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
case $prefix in
  # The shell expands it neither after = nor in quotes.
  "~"*) prefix=$(run_python -c 'import os, sys; print(os.path.expanduser(sys.argv[1]))' "$prefix") ;;
esac

run_python "$root/tools/preprocess_data.py" --workers "${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}" "$@" \
  --shard "$shard/$count"

# What a part was made from, without the fingerprints of its own files.
origin_of() { sed '/^ "files": {/,/^ }/d' -- "$1.origin"; }

# Every task counts the parts only after its own is complete, so that the last one sees all of them.
shopt -s nullglob
of=of-$(printf %05d "$count")
part=$prefix.shard-$(printf %05d "$shard")-$of
indices=("$prefix".shard-*-"$of".idx)
complete=${#indices[@]}
if [ "$complete" -ge "$count" ]; then
  # With --overwrite, some parts may be old and made from other input. A part's index is created last and removed first.
  for index in "${indices[@]}"; do
    if ! cmp -s <(origin_of "$part") <(origin_of "${index%.idx}") || [ ! -e "$index" ]; then
      complete=$((complete - 1))
    fi
  done
fi
lock=$prefix.merge-$SLURM_ARRAY_JOB_ID

# Creating a link that names its owner is atomic; a requeued owner recognizes its own link.
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
  # Try twice, since the owner may remove its link between the two commands of take_lock.
  take_lock || take_lock || fail "$lock cannot be written; join the parts with tools/merge_datasets.py --shards $prefix"
fi
if [ "$owner" != "$task" ]; then
  echo "task $task: task $owner joins the parts"
  exit 0
fi
echo "task $task: joining the parts"
status=0
# shellcheck disable=SC2086
run_python "$root/tools/merge_datasets.py" --shards="$prefix" --count "$count" --remove-shards $overwrite || status=$?
rm -f -- "$lock"
exit $status
