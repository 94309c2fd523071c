# Shared by both demos. Sourced in the root of the repository.
set -euo pipefail

# Train with at most two processes: one on each GPU, or two that share the CPU's cores.
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
# Without --local-addr, torchrun hangs if the machine's name does not resolve.
torchrun=(torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node "$processes" -m)

# Print a command and how long the demo has been running, then run the command.
run() {
  printf '\n[%d minutes]' $((SECONDS / 60))
  printf ' %q' "$@"
  printf '\n'
  "$@"
}
