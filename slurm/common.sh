# Functions that the scripts in this folder share; it is sourced, never run. See docs/cluster.md.
# shellcheck shell=bash

# load_site ROOT: read ROOT/slurm/site.env, if it exists, and choose the Python to run.
load_site() {
  ROOT=$1
  if [ -f "$ROOT/slurm/site.env" ]; then
    # Environment modules and conda fail under `set -eu`.
    local flags=$-
    set +eu
    # shellcheck disable=SC1091
    source "$ROOT/slurm/site.env"
    case $flags in *e*) set -e ;; esac
    case $flags in *u*) set -u ;; esac
  fi
  if [ -z "${TAPE_PYTHON:-}" ]; then
    TAPE_PYTHON=python3
    if [ -z "${TAPE_CONTAINER:-}" ] && [ -x "$ROOT/.venv/bin/python" ]; then TAPE_PYTHON=$ROOT/.venv/bin/python; fi
  fi
  if [ -z "${TAPE_CONTAINER:-}" ] && ! command -v "$TAPE_PYTHON" >/dev/null; then
    fail "TAPE_PYTHON is $TAPE_PYTHON, which does not exist here; run make install, or set it in slurm/site.env"
  fi
  export TAPE_PYTHON TAPE_CONTAINER=${TAPE_CONTAINER:-} PYTHONUNBUFFERED=1
  split_words container TAPE_CONTAINER "$TAPE_CONTAINER"
  split_words sbatch_options TAPE_SBATCH_OPTIONS "${TAPE_SBATCH_OPTIONS:-}"
  split_words srun_options TAPE_SRUN_OPTIONS "${TAPE_SRUN_OPTIONS:-}"
  split_words preflight_options TAPE_PREFLIGHT_OPTIONS "${TAPE_PREFLIGHT_OPTIONS:-}"
  if [ -n "${TAPE_NETWORK_INTERFACE:-}" ]; then
    export NCCL_SOCKET_IFNAME=$TAPE_NETWORK_INTERFACE GLOO_SOCKET_IFNAME=$TAPE_NETWORK_INTERFACE
  fi
}

# split_words ARRAY NAME TEXT: put the words of TEXT into ARRAY as a shell does, where quotes keep spaces, but expand
# nothing. NAME is what the user calls the text.
split_words() {
  local -n words=$1
  xargs -r printf '%s\0' <<<"$3" >/dev/null 2>&1 ||
    fail "$2 is $3, whose quotes do not match; close them on the line where they are opened"
  mapfile -d '' -t words < <(xargs -r printf '%s\0' <<<"$3")
}

# submit ARGS...: sbatch without what Slurm has set for a job in which this runs: the new job's srun would take its CPUs
# and memory from that.
submit() {
  command -v sbatch >/dev/null || fail "sbatch is not found; call this where jobs can be submitted"
  (
    for name in ${!SLURM_@}; do
      case $name in SLURM_CONF | SLURM_CLUSTERS | SLURM_JWT) ;; *) unset "$name" ;; esac
    done
    exec sbatch "$@"
  )
}

# add_job VARIABLE ARGS...: submit one of several jobs, and put its number into VARIABLE. If this script fails or is
# interrupted before it ends, the jobs that it has added are cancelled.
added_jobs=() added_cluster='' stopped=''
add_job() {
  local -n number=$1
  shift
  if [ ${#added_jobs[@]} = 0 ]; then
    trap 'cancel_added $?' EXIT
    trap 'stopped=129' HUP
    trap 'stopped=130' INT
    trap 'stopped=143' TERM
  fi
  # A signal must not end sbatch between its request and its answer, since the job's number would be lost.
  number=$(trap '' HUP INT TERM && submit --parsable "$@")
  [[ $number =~ ^([0-9]+)(\;(.*))?$ ]] || fail "sbatch printed '$number' instead of a job's number"
  number=${BASH_REMATCH[1]} added_cluster=${BASH_REMATCH[3]}
  added_jobs+=("$number")
  [ -z "$stopped" ] || exit "$stopped"
}

# cancel_added STATUS: cancel the jobs that add_job has submitted, unless STATUS is 0.
cancel_added() {
  if [ "$1" = 0 ] || [ ${#added_jobs[@]} = 0 ]; then return; fi
  trap '' HUP INT TERM
  local cancel=(scancel ${added_cluster:+"--clusters=$added_cluster"} "${added_jobs[@]}")
  if "${cancel[@]}"; then
    echo "error: not all jobs were submitted; those that were (${added_jobs[*]}) have been cancelled" >&2
  else
    echo "error: not all jobs were submitted; cancel those that were with: ${cancel[*]}" >&2
  fi
}

# run_python ARGS...: Python, in the container if there is one, with the modules of $ROOT.
run_python() {
  PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} "${container[@]}" "$TAPE_PYTHON" "$@"
}

# `python -m` looks in the working directory first, which may hold a different version of the code from $ROOT.
RUN_MODULE='import runpy, sys
sys.path[0] = sys.argv.pop(1)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)'

run_module() { run_python -c "$RUN_MODULE" "$ROOT" "$@"; }

say() { echo "$(date +%T) $*"; }

fail() {
  echo "error: $*" >&2
  exit 1
}

# check_arguments MODULE DEFAULT_RECIPE [RECIPE] [--section.key value ...]: refuse what cannot work before a job is put in
# the queue.
check_arguments() {
  local module=$1
  shift
  with_recipe "$@"
  run_module pretrain.attempt check --module "$module" -- "${ARGUMENTS[@]}"
}

# with_recipe DEFAULT [RECIPE] [--section.key value ...]: put the arguments into ARGUMENTS, with the recipe DEFAULT of this
# repository if they name none.
with_recipe() {
  local default=$ROOT/$1 argument
  shift
  ARGUMENTS=("$@")
  case ${1--} in -*) ;; *) return ;; esac
  for argument in "$@"; do
    case $argument in --config | --config=*) return ;; esac
  done
  ARGUMENTS=("$default" "$@")
}

# ----- a job: one attempt at a run, requeued until the run is finished -----

# run_job MODULE DEFAULT_RECIPE [RECIPE] [--section.key value ...]
run_job() {
  local module=$1
  shift
  with_recipe "$@"
  set -- "${ARGUMENTS[@]}"
  local nodes gpus tasks job_link requeued=()
  look_at_job
  job_link=$PWD/runs/.jobs/$SLURM_JOB_ID
  if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
    requeued=(--requeued)
  fi
  local left
  left=$(seconds_left)
  if [ -n "$left" ] && [ "$left" -lt 900 ]; then
    say "warning: the time limit is ${left} s away, and Slurm sends its warning 180 s before it, unless --signal says" \
      "otherwise; give the job more time if that is too little to start and take a step"
  fi

  local variables
  patiently variables run_module pretrain.attempt begin --module "$module" --job "$SLURM_JOB_ID" --source "$ROOT" \
    --job-link "$job_link" "${requeued[@]}" --nodes "$nodes" --processes $((SLURM_JOB_NUM_NODES * tasks)) \
    --scratch="${TAPE_SCRATCH:-}" --log="$(job_log)" -- "$@" || exit 1
  eval "$variables"
  export TAPE_ATTEMPT=$ATTEMPT MASTER_PORT=$PREFLIGHT_PORT MASTER_ADDR
  MASTER_ADDR=$(head_address "${nodes%%,*}")
  [ -z "$SIGNALED" ] || echo "$SIGNALED" >"$ATTEMPT_DIRECTORY/stop"

  if [ ! -e "$ATTEMPT_DIRECTORY/stop" ]; then
    step pretrain.preflight --config "$CONFIG" --nodes "$nodes" --gpus $((gpus < tasks ? gpus : tasks)) \
      "${preflight_options[@]}"
    if [ "$STEP_STATUS" = 0 ] && [ ! -e "$ATTEMPT_DIRECTORY/stop" ]; then
      MASTER_PORT=$TRAINING_PORT
      step "$module" --config "$CONFIG" --checkpoint.resume "$RESUME"
    fi
  fi
  conclude
}

# look_at_job: set nodes, gpus (of each) and tasks (on each), and print them.
look_at_job() {
  [ -z "${SLURM_ARRAY_JOB_ID:-}" ] || fail "this job is an array; submit it without --array"
  nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
  [ -n "$nodes" ] || fail "scontrol show hostnames $SLURM_JOB_NODELIST prints nothing; check that scontrol works here"
  gpus=${SLURM_GPUS_ON_NODE:-0}
  # One task per GPU; on nodes without GPUs, one per node. srun starts them, gives each its rank, and ends all when one
  # dies. A second launcher (torchrun) below it would only intercept Slurm's signals to the processes.
  # Asked of the job, as SLURM_NTASKS_PER_NODE may be that of a session in which the job was submitted.
  tasks=$(job_field NtasksPerN:B:S:C)
  tasks=${tasks%%:*}
  [ "${tasks:-0}" -gt 0 ] 2>/dev/null || tasks=$((gpus > 0 ? gpus : 1))
  say "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)): $tasks task(s) on each of $nodes"
}

# run_evaluation ARGS...: run pretrain.evaluate on every rank. It keeps what it has finished, so that the job may end at
# any moment: it is requeued after a warning and, a few times, after a crash.
run_evaluation() {
  local nodes gpus tasks
  look_at_job
  export MASTER_ADDR MASTER_PORT
  MASTER_ADDR=$(head_address "${nodes%%,*}")
  MASTER_PORT=$((20000 + (SLURM_JOB_ID * 7 + ${SLURM_RESTART_COUNT:-0} * 1009) % 12000))
  export TAPE_FAILURE=$PWD/runs/.jobs/$SLURM_JOB_ID.failed
  mkdir -p "$PWD/runs/.jobs"
  rm -f "$TAPE_FAILURE"
  STEP_STATUS=75
  [ -n "$SIGNALED" ] || step pretrain.evaluate "$@"
  [ "$STEP_STATUS" = 0 ] && exit 0
  # srun ends the other ranks when one fails. They say 75 or, while they start, die of its TERM, and the largest status
  # is the step's.
  case $STEP_STATUS in 75 | 143) [ ! -e "$TAPE_FAILURE" ] || STEP_STATUS=1 ;; esac
  [ "$SIGNALED" = TERM ] && exit 1
  if [ -n "$SIGNALED" ] || [ "$STEP_STATUS" = 75 ]; then requeue; fi
  # 1 is an error and 2 a mistake in the command; both have said what is wrong.
  if [ "$STEP_STATUS" -gt 2 ]; then
    ! may_start_again || requeue
    fail "the evaluation has crashed again; see above, and submit the same command to continue"
  fi
  exit 1
}

# run_task ARGS...: do one run of pretrain.compare, that of this task of an array. It continues from its checkpoint, and
# is requeued after a warning and, a few times, after a crash.
run_task() {
  STEP_STATUS=75
  if [ -z "$SIGNALED" ]; then
    (
      # In place of this shell, so that it gets the signals.
      export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
      exec "${container[@]}" "$TAPE_PYTHON" -c "$RUN_MODULE" "$ROOT" pretrain.compare "$@" --only "$SLURM_ARRAY_TASK_ID"
    ) &
    SRUN=$!
    while :; do
      wait "$SRUN"
      STEP_STATUS=$?
      # With a status above 128, a signal may have interrupted this wait rather than the run.
      [ $STEP_STATUS -gt 128 ] && kill -0 "$SRUN" 2>/dev/null || break
    done
    SRUN=
  fi
  [ "$STEP_STATUS" = 0 ] && exit 0
  [ "$SIGNALED" = TERM ] && exit 1
  if [ -n "$SIGNALED" ] || [ "$STEP_STATUS" = 75 ]; then requeue; fi
  # 1 is a run that has failed and 2 a mistake in the command; both have said what is wrong.
  [ "$STEP_STATUS" -le 2 ] || ! may_start_again || requeue
  fail "the run has failed; see above, and submit the same command to continue"
}

# may_start_again: count a crash of a job without attempts, and succeed unless that is as many as a run may have. Other
# restarts of the job, such as those after preemption, are not counted.
may_start_again() {
  local crashes=$PWD/runs/.jobs/$SLURM_JOB_ID.crashes
  mkdir -p "$PWD/runs/.jobs"
  # Slurm may have given this number to another job before.
  [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || rm -f "$crashes"
  echo "$STEP_STATUS" >>"$crashes" && [ "$(wc -l <"$crashes")" -lt 3 ]
}

# patiently VARIABLE COMMAND...: put the command's output into VARIABLE; retry after status 75, which means that the
# file system does not answer.
patiently() {
  local -n output=$1
  shift
  local tries status
  for tries in $(seq 10); do
    output=$("$@")
    status=$?
    [ $status = 75 ] || return $status
    say "trying again in a minute ($tries of 10)"
    sleep 60
  done
  return 1
}

# step MODULE ARGS...: run the module on every rank, and wait for its end even if signals arrive; sets STEP_STATUS.
# What the run recorded decides, not this status, because srun's status is unreliable after signals.
# --overlap: if Slurm has not yet noticed that the previous step has ended, srun would wait to be notified and otherwise
# check again only after SlurmctldTimeout, two minutes. (Slurm has --overlap since 20.11.)
# block:block: consecutive ranks of a node on one socket, as consecutive GPUs are; Slurm would alternate between sockets.
step() {
  local module=$1
  shift
  # shellcheck disable=SC2046
  PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(cpus_per_task)} LOCAL_WORLD_SIZE=$tasks \
    srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks=$((SLURM_JOB_NUM_NODES * tasks)) --ntasks-per-node="$tasks" \
    --cpus-per-task="$(cpus_per_task)" --export=ALL --distribution=block:block --kill-on-bad-exit=1 --unbuffered --overlap \
    $([ "$gpus" -gt 0 ] && echo "--gpus-per-node=$gpus --gpu-bind=none") "${srun_options[@]}" \
    bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS; exec "$@"' task \
    "${container[@]}" "$TAPE_PYTHON" -c "$RUN_MODULE" "$ROOT" "$module" "$@" &
  local srun=$!
  SRUN=$srun
  [ -z "${ATTEMPT_DIRECTORY:-}" ] || end_with_ranks $srun &
  local watcher=$!
  while :; do
    wait $srun
    STEP_STATUS=$?
    # With a status above 128, a signal may have interrupted this wait rather than srun.
    [ $STEP_STATUS -gt 128 ] && kill -0 $srun 2>/dev/null || break
  done
  kill $watcher 2>/dev/null
  SRUN=
}

# end_with_ranks PID: end an srun that still waits for tasks that no longer exist, which happens when a node comes back
# before Slurm notices that it was gone. srun is ended if a rank has recorded its end and a minute later it still runs.
end_with_ranks() {
  local patience=${TAPE_SRUN_PATIENCE:-60}
  while kill -0 "$1" 2>/dev/null; do
    if compgen -G "$ATTEMPT_DIRECTORY/rank-*.json" >/dev/null; then
      [ "$patience" -gt 0 ] || kill -KILL "$1"
      patience=$((patience - 2))
    fi
    sleep 2
  done
}

cpus_per_task() {
  local cpus=$((${SLURM_CPUS_ON_NODE:-1} / tasks))
  echo $((cpus > 0 ? cpus : 1))
}

# head_address NODE: print its name or, if that does not resolve, the address that Slurm uses for it. If neither does, a
# single node needs no name, and several say so themselves before they wait for each other.
head_address() {
  local address
  for address in "$1" "$(scontrol show node "$1" | sed -n 's/^ *NodeAddr=\([^ ]*\).*/\1/p')"; do
    if [ -n "$address" ] && getent ahosts "$address" >/dev/null; then
      echo "$address"
      return
    fi
  done
  if [ "$SLURM_JOB_NUM_NODES" = 1 ]; then echo 127.0.0.1; else echo "$1"; fi
}

# job_field NAME: print a field of this job as scontrol shows it. The job's name, in the first line, and its arguments,
# from the line of its command on, may look like fields.
job_field() {
  scontrol show job "$SLURM_JOB_ID" 2>/dev/null | sed -n "1d;/^ *Command=/,\$d;s/^\(.* \)\{0,1\}$1=\([^ ]*\).*/\2/p"
}

# job_log: print where the output of this job goes, as scontrol shows it after the job's arguments.
job_log() { scontrol show job "$SLURM_JOB_ID" 2>/dev/null | sed -n 's/^ *StdOut=//p' | tail -n 1; }

# conclude: end or requeue the job, depending on the run's records.
conclude() {
  local answer verdict reason
  patiently answer run_module pretrain.attempt decide --run="$RUN_DIRECTORY" --checkpoints="$CHECKPOINT_DIRECTORY" \
    --attempt "$ATTEMPT"
  read -r verdict reason <<<"$answer"
  say "attempt $ATTEMPT: $reason"
  case $verdict in
    done) exit 0 ;;
    again) requeue "$(sed -n 's/^exclude //p' <<<"$answer")" ;;
    stop)
      echo "error: $reason" >&2
      exit 1
      ;;
    *) fail "the records of attempt $ATTEMPT in $RUN_DIRECTORY cannot be read; submit the same command to continue" ;;
  esac
}

# nodes_to_avoid NODES: print the ExcNodeList that also excludes NODES (a,b) from the next start, or nothing if too few
# other nodes with the same CPUs, features and GPUs would be left, because the job would then wait forever.
nodes_to_avoid() {
  local bad=$1 before
  # With a list of nodes or a reservation given at submission, other nodes cannot be used.
  [ -z "$(job_field Reservation)" ] && [ "$(job_field ReqNodeList)" = "(null)" ] || return 0
  before=$(job_field ExcNodeList)
  [ "$before" = "(null)" ] || bad=$before,$bad
  sinfo --noheader --Node --partition="$(job_field Partition)" --format='%N %t %c|%f|%G' | sort -u |
    awk -v list="$bad" -v hosts="$(scontrol show hostnames "$bad" | paste -sd' ')" -v needed="$SLURM_JOB_NUM_NODES" '
      BEGIN { split(hosts, names, " "); for (i in names) avoided[names[i]] = 1 }
      $1 in avoided { kinds[$3] = 1; next }
      $2 ~ /^(idle|alloc|mix|comp|plnd)[~#%-]?$/ { spare[$3]++ }
      END { for (kind in kinds) left += spare[kind]; if (left >= needed) print list }'
}

# requeue [BAD_NODES]: have Slurm start this job again, without BAD_NODES if there are enough others. This also ends the
# script. If Slurm does not answer, retry for ten minutes.
requeue() {
  local tries avoid=
  if [ -n "${1:-}" ]; then
    avoid=$(nodes_to_avoid "$1")
    [ -n "$avoid" ] || say "too few other nodes like $1 are left to exclude it: the next start may use it again"
  fi
  if [ "$(job_field Requeue)" = 0 ]; then
    fail "the job was submitted with --no-requeue; submit the same command to continue"
  fi
  for tries in $(seq 60); do
    case $(job_field JobState)/$(job_field Restarts) in
      RUNNING/"${SLURM_RESTART_COUNT:-0}")
        say "requeueing${avoid:+ without $avoid}"
        # Slurm ends this script and its children as soon as it has requeued the job, and accepts the exclusion only then.
        if [ -n "$avoid" ]; then trap '' TERM; else trap 'exit 1' TERM; fi
        if scontrol requeue "$SLURM_JOB_ID"; then
          if [ -n "$avoid" ]; then
            scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$avoid" || say "warning: Slurm did not exclude $avoid"
            exit 1
          fi
          sleep 300 & # Slurm kills this script
          wait $!
          exit 1
        fi
        ;;
      /) ;; # the controller does not answer
      *)
        # The job was cancelled, or requeued by Slurm itself, which may already be running the next attempt elsewhere.
        say "Slurm has ended this job; if it does not requeue it, submit the same command to continue"
        exit 1
        ;;
    esac
    sleep 10
  done
  fail "Slurm did not requeue job $SLURM_JOB_ID; submit the same command to continue"
}

# on_signal NAME: handle a warning of preemption or of the time limit. The ranks see the stop file, save, and end.
on_signal() {
  SIGNALED=$1
  if [ "$1" = USR1 ]; then say "$1: the run saves and is requeued"; else say "$1: the run saves, if it can, and ends"; fi
  [ -n "${ATTEMPT_DIRECTORY:-}" ] && echo "$1" >"$ATTEMPT_DIRECTORY/stop"
  # An evaluation has no attempts; srun passes the signal on.
  [ -z "${ATTEMPT_DIRECTORY:-}" ] && [ -n "${SRUN:-}" ] && kill -TERM "$SRUN" 2>/dev/null
  # If the time limit is near and the ranks may not reach their next step before it, requeue the job anyway.
  local left
  left=$(seconds_left)
  if [ -n "$left" ] && [ "$left" -lt 3600 ]; then
    (
      sleep $((left > 40 ? left - 30 : left / 4))
      [ "$(job_field JobState)/$(job_field Restarts)/$(job_field Requeue)" = "RUNNING/${SLURM_RESTART_COUNT:-0}/1" ] &&
        scontrol requeue "$SLURM_JOB_ID"
    ) &
  fi
}

# seconds_left: print the seconds until the time limit, or nothing if there is none.
seconds_left() {
  squeue --noheader --jobs "$SLURM_JOB_ID" --format %L 2>/dev/null |
    awk -F'[-:]' '/^[0-9:-]+$/ {s = 0; n = split($0, parts, /[-:]/); split("1 60 3600 86400", unit, " ")
      for (i = n; i > 0; i--) s += parts[i] * unit[n - i + 1]; print s}'
}

SIGNALED=${SIGNALED:-}
