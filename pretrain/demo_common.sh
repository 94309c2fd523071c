# What the scripts of both demos share: they run in the repository's root, and print each command before it runs.
set -euo pipefail

# At most two processes: on the GPUs, or on the CPU's cores, which they share.
find_gpus() { nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | grep -x '[0-9]*' | paste -sd,; }
gpus=$(cut -d, -f1-2 <<<"${CUDA_VISIBLE_DEVICES-$(find_gpus)}")
cores=$(getconf _NPROCESSORS_ONLN)
if [ -n "$gpus" ]; then
  export CUDA_VISIBLE_DEVICES=$gpus
  processes=$(tr , '\n' <<<"$gpus" | wc -l)
else
  processes=$((cores > 1 ? 2 : 1))
fi
export OMP_NUM_THREADS=$((cores > processes ? cores / processes : 1))
# Without the address, torchrun waits forever where the name of the machine does not resolve.
torchrun=(torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node "$processes" -m)

run() {
  printf '\n[%d minutes]' $((SECONDS / 60))
  printf ' %q' "$@"
  printf '\n'
  "$@"
}
