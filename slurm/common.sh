# Functions for the scripts in this folder, which source this file. See docs/cluster.md.
# shellcheck shell=bash

# begin_job ROOT ARGS...: prepare a job that runs the code in ROOT. ARGS are the arguments of the script.
begin_job() {
  read_options "${@:2}"
  [ -z "$dry_run${options[*]}" ] ||
    fail "--dry-run and --sbatch work only if you run the script directly, and not with sbatch"
  use_own_variables
  load_site "$1"
}

# use_own_variables: make SLURM_* describe this job. sbatch passes on the variables of the job that it was called in,
# such as an interactive session. srun would use them as its options, and one CPU of the session would then run all
# ranks (SLURM_CPU_BIND). Only variables that Slurm sets for every job are kept; site.env may set others.
use_own_variables() {
  local name record
  for name in ${!SLURM_@} ${!SRUN_@}; do
    case $name in
      SLURM_CONF | SLURM_CONF_SERVER | SLURM_SACK_SOCKET | SLURM_JWT | SLURM_CLUSTER_NAME | SLURM_WORKING_CLUSTER | SLURM_SUBMIT_*) ;;
      SLURM_JOB_* | SLURM_JOBID | SLURM_ARRAY_* | SLURM_RESTART_COUNT) ;;
      SLURM_NNODES | SLURM_NODELIST | SLURM_NODE_ALIASES | SLURM_NODEID | SLURM_TASKS_PER_NODE) ;;
      SLURM_TASK_PID | SLURM_PROCID | SLURM_LOCALID | SLURM_GTIDS | SLURM_TOPOLOGY_*) ;;
      SLURM_CPUS_ON_NODE | SLURM_GPUS_ON_NODE) ;;
      *) unset "$name" ;;
    esac
  done

  # Slurm sets these for some jobs only, so their values may be those of another job. The first job that scontrol
  # prints is this one; the others are the other tasks of an array.
  record=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null) || return 0

  case ${record%% JobName=*} in
    *HetJobId=*) fail "this job is heterogeneous (sbatch ... : ...), and the nodes after the colon would be idle;" \
      "submit it without a colon, such as with --nodes=2" ;;
    *ArrayJobId=*) ;;
    *) for name in ${!SLURM_ARRAY_@}; do unset "$name"; done ;;
  esac

  record=${record#*$'\n'}
  if [[ ${record%%Command=*} =~ Restarts=([0-9]+) ]]; then export SLURM_RESTART_COUNT=${BASH_REMATCH[1]}; fi
}

# load_site ROOT: read ROOT/slurm/site.env, if it exists, and choose the Python that runs the code in ROOT.
load_site() {
  ROOT=$1
  if [ -f "$ROOT/slurm/site.env" ]; then read_site_file "$ROOT/slurm/site.env"; fi

  TAPE_CONTAINER=${TAPE_CONTAINER:-}
  if [ -z "${TAPE_PYTHON:-}" ]; then
    TAPE_PYTHON=python3
    if [ -z "$TAPE_CONTAINER" ] && [ -x "$ROOT/.venv/bin/python" ]; then TAPE_PYTHON=$ROOT/.venv/bin/python; fi
  fi
  if [ -z "$TAPE_CONTAINER" ] && ! command -v "$TAPE_PYTHON" >/dev/null; then
    fail "TAPE_PYTHON is $TAPE_PYTHON, which is not found; run make install, or set TAPE_PYTHON in slurm/site.env"
  fi
  export PYTHONUNBUFFERED=1

  split_words container TAPE_CONTAINER "$TAPE_CONTAINER"
  split_options sbatch_options TAPE_SBATCH_OPTIONS "${TAPE_SBATCH_OPTIONS:-}"
  split_options srun_options TAPE_SRUN_OPTIONS "${TAPE_SRUN_OPTIONS:-}"
  split_options preflight_options TAPE_PREFLIGHT_OPTIONS "${TAPE_PREFLIGHT_OPTIONS:-}"
  check_srun_options
  if [ -n "${TAPE_NETWORK_INTERFACE:-}" ]; then
    export NCCL_SOCKET_IFNAME=$TAPE_NETWORK_INTERFACE GLOO_SOCKET_IFNAME=$TAPE_NETWORK_INTERFACE
  fi
  use_code "$ROOT"
}

# read_site_file FILE: source FILE. TAPE_ variables of the environment override it, also in a job, which inherits them.
# The names of the local variables are unlikely in FILE.
read_site_file() {
  local tape_name tape_flags=$-
  local -A tape_environment=()
  for tape_name in $(compgen -e TAPE_); do tape_environment[$tape_name]=${!tape_name}; done

  # Environment modules and conda fail under `set -eu`.
  set +eu
  # shellcheck disable=SC1090
  source "$1"
  case $tape_flags in *e*) set -e ;; esac
  case $tape_flags in *u*) set -u ;; esac

  for tape_name in "${!tape_environment[@]}"; do
    [ "${!tape_name:-}" != "${tape_environment[$tape_name]}" ] || continue
    log "note: $tape_name is '${tape_environment[$tape_name]}' from the environment," \
      "not '${!tape_name:-}' from slurm/site.env" >&2
    printf -v "$tape_name" %s "${tape_environment[$tape_name]}"
  done
}

# check_srun_options: reject options that change the tasks of a step or the GPUs that a task sees.
check_srun_options() {
  local option
  for option in "${srun_options[@]}"; do
    case $option in
      --gpus | --gpus[=-]* | --gpu-b* | --gres*gpu* | --tres-* | --ntasks* | --nodes | --nodes=* | -[GnN]*)
        fail "TAPE_SRUN_OPTIONS contains $option, but the scripts start one task per GPU, and each task must see all" \
          "GPUs of its node; remove it, and choose nodes and GPUs with options of sbatch" ;;
    esac
  done
}

# split_words ARRAY NAME TEXT: split TEXT into ARRAY as a shell does, with quotes but without expansions. NAME is the
# variable or option that the error message names.
split_words() {
  local -n words=$1
  xargs -r printf '%s\0' <<<"$3" >/dev/null 2>&1 ||
    fail "$2 is $3, whose quotes do not match; close each quote on the line that opens it"
  mapfile -d '' -t words < <(xargs -r printf '%s\0' <<<"$3")
}

# split_options ARRAY NAME TEXT: split TEXT as split_words does, and reject it if its first word is no option: sbatch and
# srun would take that word as the program to run.
split_options() {
  local -n split=$1
  split_words "$@"
  case ${split[0]:--} in
    -*) ;;
    *) fail "$2 is $3, whose first word is no option; begin it with an option, such as --nodes=4" ;;
  esac
}

# read_options ARGS...: read the options that every script has when a user runs it. Store the words of --sbatch in the
# array `options`, whether --dry-run is given in `dry_run`, and the other arguments in `script_arguments`. After
# --help, print the comment at the top of the script and exit. Options that would make the program of the job print
# something and succeed are refused: no job can do anything with them.
options=() dry_run='' script_arguments=()
read_options() {
  local given
  while [ $# -gt 0 ]; do
    case $1 in
      -h | --help)
        sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
      --check | --print_config | --version)
        fail "$1 makes the program exit before it does any work, so a job needs no $1; give it to the program itself," \
          "such as python -m pretrain.train, or check the command with --dry-run" ;;
      --sbatch=*)
        set -- --sbatch "${1#*=}" "${@:2}"
        continue
        ;;
      --sbatch)
        [ $# -ge 2 ] || fail "--sbatch needs options in quotes, such as \"--nodes=4\""
        split_options given --sbatch "$2"
        options+=("${given[@]}")
        shift
        ;;
      --dry-run) dry_run=yes ;;
      *)
        refuse_sbatch_option "$@"
        script_arguments+=("$1")
        ;;
    esac
    shift
  done
}

# Options of sbatch that no program of the scripts has (--input and --output are options of both). The second pattern
# lists those without a value.
SBATCH_OPTION='^(-[ACGJLNacdnpqtwx].*|--(account|array|begin|comment|constraint|cpus-per-.*|dependency|exclude|gpus.*'
SBATCH_OPTION+='|gres|job-name|licenses|mail-.*|mem|mem-per-.*|nodelist|nodes|ntasks.*|partition|qos|reservation|signal'
SBATCH_OPTION+='|time|time-min)(=.*)?)$'
SBATCH_FLAG='^(-[Hs]|--(exclusive|hold|no-requeue|oversubscribe|parsable|requeue|test-only)(=.*)?)$'

# refuse_sbatch_option ARGS...: fail if the first argument is an option of sbatch, and show where it belongs.
refuse_sbatch_option() {
  local option=$1 script=$0 command
  if [[ $1 =~ ^(-.|--[a-z-]+)$ && $1 =~ $SBATCH_OPTION ]]; then
    option="$1 ${2:-VALUE}"
  elif ! [[ $1 =~ $SBATCH_OPTION || $1 =~ $SBATCH_FLAG ]]; then
    return 0
  fi
  [ -f "$(dirname "$0")/common.sh" ] || script=SCRIPT # Slurm's copy of the script
  command="$script --sbatch \"$option\" ..."
  case $script in
    *run_all.sh | *compare.sh) ;;
    *) command="sbatch $option $script ...  or  $command" ;;
  esac
  fail "$1 is an option of sbatch, not of the script; run  $command"
}

# submit ARGS...: run sbatch without Slurm's variables of the current job, if there is one, as sbatch reads some of
# them. After --dry-run, print the command instead.
submit() {
  if [ -n "$dry_run" ]; then
    print_sbatch "$@"
    return
  fi
  command -v sbatch >/dev/null || fail "sbatch is not found; run this on a node where you can submit jobs"
  (
    for name in ${!SLURM_@}; do
      case $name in
        SLURM_CONF | SLURM_CONF_SERVER | SLURM_SACK_SOCKET | SLURM_JWT | SLURM_CLUSTERS) ;;
        *) unset "$name" ;;
      esac
    done
    exec sbatch "$@"
  )
}

# print_sbatch ARGS...: print the command, with the variables that set the defaults of sbatch.
print_sbatch() {
  local name words=() line
  for name in $(compgen -e SBATCH_); do words+=("$name=${!name}"); done
  printf -v line ' %q' "${words[@]}" sbatch "$@"
  echo "${line# }"
}

# submit_job VARIABLE ARGS...: submit one of several jobs, and store its ID in VARIABLE. If this script fails or is
# interrupted before it ends, all submitted jobs are cancelled. After --dry-run, the IDs are JOB1, JOB2 and so on.
submitted_jobs=() submitted_cluster='' stopped=''
submit_job() {
  local -n number=$1
  shift
  if [ -n "$dry_run" ]; then
    submit "$@"
    submitted_jobs+=("$1")
    number=JOB${#submitted_jobs[@]}
    return
  fi
  if [ ${#submitted_jobs[@]} = 0 ]; then
    trap 'cancel_submitted $?' EXIT
    trap 'stopped=129' HUP
    trap 'stopped=130' INT
    trap 'stopped=143' TERM
  fi
  # Ignore signals while sbatch runs. Otherwise the job could be submitted and its ID lost.
  number=$(trap '' HUP INT TERM && submit --parsable "$@")
  [[ $number =~ ^([0-9]+)(\;(.*))?$ ]] || fail "sbatch printed '$number' instead of a job ID"
  number=${BASH_REMATCH[1]} submitted_cluster=${BASH_REMATCH[3]}
  submitted_jobs+=("$number")
  [ -z "$stopped" ] || exit "$stopped"
}

# cancel_submitted STATUS: cancel the jobs that submit_job submitted, unless STATUS is 0.
cancel_submitted() {
  if [ "$1" = 0 ] || [ ${#submitted_jobs[@]} = 0 ]; then return; fi
  trap '' HUP INT TERM
  local cancel=(scancel ${submitted_cluster:+"--clusters=$submitted_cluster"} "${submitted_jobs[@]}")
  if "${cancel[@]}"; then
    echo "error: not all jobs could be submitted; cancelled those that were: ${submitted_jobs[*]}" >&2
  else
    echo "error: not all jobs could be submitted; cancel those that were: ${cancel[*]}" >&2
  fi
}

# use_code ROOT: run the code in ROOT. The array `python` becomes the command that runs one of its modules.
use_code() {
  ROOT=$1
  python=(env "PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}" "TAPE_CONTAINER=$TAPE_CONTAINER")
  python+=("${container[@]}" "$TAPE_PYTHON" "$ROOT/slurm/run_module.py")
}

run_module() { "${python[@]}" "$@"; }

log() { echo "$(date +%T) $*"; }

fail() {
  echo "error: $*" >&2
  exit 1
}

# check_arguments MODULE DEFAULT_RECIPE [RECIPE] [--section.key value ...]: reject invalid settings before a job is
# submitted.
check_arguments() {
  local module=$1
  shift
  with_recipe "$@"
  run_module pretrain.attempt check --module "$module" -- "${ARGUMENTS[@]}"
}

# with_recipe DEFAULT [RECIPE] [--section.key value ...]: store the arguments in ARGUMENTS. If they name no recipe, add
# the recipe DEFAULT of this repository.
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

# ----- training jobs: each start of the job is one attempt, and the job is requeued until the run is finished -----

# run_job MODULE DEFAULT_RECIPE [RECIPE] [--section.key value ...]: check the nodes, train with the module, and end or
# requeue the job.
run_job() {
  local module=$1
  shift
  with_recipe "$@"
  set -- "${ARGUMENTS[@]}"
  local nodes gpus tasks job_link requeued=()
  read_job
  job_link=$PWD/runs/.jobs/$SLURM_JOB_ID
  if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
    requeued=(--requeued)
  fi
  local left
  left=$(seconds_left)
  if [ -n "$left" ] && [ "$left" -lt 900 ]; then
    log "warning: ${left} s are left before the time limit, and Slurm warns the job 180 s before it (see --signal);" \
      "raise the limit if the run cannot start and take a step in that time"
  fi

  local variables
  retry_on_75 variables run_module pretrain.attempt begin --module "$module" --job "$SLURM_JOB_ID" --source "$ROOT" \
    --job-link "$job_link" "${requeued[@]}" --nodes "$nodes" --processes $((SLURM_JOB_NUM_NODES * tasks)) \
    --scratch="${TAPE_SCRATCH:-}" --log="$(job_log)" -- "$@" || exit 1
  eval "$variables"
  use_code "$ROOT"
  export TAPE_ATTEMPT=$ATTEMPT MASTER_PORT=$PREFLIGHT_PORT MASTER_ADDR
  MASTER_ADDR=$(head_address "${nodes%%,*}")
  [ -z "$SIGNALED" ] || echo "$SIGNALED" >"$ATTEMPT_DIRECTORY/stop"

  if [ ! -e "$ATTEMPT_DIRECTORY/stop" ]; then
    run_step pretrain.preflight --config "$CONFIG" --nodes "$nodes" --gpus $((gpus < tasks ? gpus : tasks)) \
      "${preflight_options[@]}"
    if [ "$STEP_STATUS" = 0 ] && [ ! -e "$ATTEMPT_DIRECTORY/stop" ]; then
      MASTER_PORT=$TRAINING_PORT
      run_step "$module" --config "$CONFIG" --checkpoint.resume "$RESUME"
    fi
  fi
  finish_attempt
}

# read_job: set nodes, gpus (per node) and tasks (per node), and print them.
read_job() {
  [ -z "${SLURM_ARRAY_JOB_ID:-}" ] || fail "this job is an array task; submit it without --array"
  nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
  [ -n "$nodes" ] || fail "scontrol show hostnames $SLURM_JOB_NODELIST prints nothing; check that scontrol works here"
  gpus=$(gpus_per_node) || exit 1
  # One task per GPU, or one per node without GPUs. srun starts them, sets their ranks, and ends all when one dies.
  # torchrun is not used: it would intercept Slurm's signals to the processes.
  # Read from scontrol, since SLURM_NTASKS_PER_NODE may come from the session that submitted the job.
  tasks=$(job_field NtasksPerN:B:S:C)
  tasks=${tasks%%:*}
  [ "${tasks:-0}" -gt 0 ] 2>/dev/null || tasks=$((gpus > 0 ? gpus : 1))
  log "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)): $tasks task(s) on each of $nodes"
}

# run_evaluation ARGS...: run pretrain.evaluate on every rank. Finished parts are stored, so the job can end at any
# moment. The job is requeued after a warning and, a few times, after a crash.
run_evaluation() {
  local nodes gpus tasks
  read_job
  export MASTER_ADDR MASTER_PORT
  MASTER_ADDR=$(head_address "${nodes%%,*}")
  MASTER_PORT=$((20000 + (SLURM_JOB_ID * 7 + ${SLURM_RESTART_COUNT:-0} * 1009) % 12000))
  export TAPE_FAILURE=$PWD/runs/.jobs/$SLURM_JOB_ID.failed
  mkdir -p "$PWD/runs/.jobs"
  rm -f "$TAPE_FAILURE"
  STEP_STATUS=75
  [ -n "$SIGNALED" ] || run_step pretrain.evaluate "$@"
  [ "$STEP_STATUS" = 0 ] && exit 0
  # When a rank fails, srun ends the other ranks, which exit with 75, or with 143 if they are still starting. The status
  # of the step is the largest one, so the file TAPE_FAILURE shows whether a rank has failed.
  case $STEP_STATUS in 75 | 143) [ ! -e "$TAPE_FAILURE" ] || STEP_STATUS=1 ;; esac
  [ "$SIGNALED" = TERM ] && exit 1
  if [ -n "$SIGNALED" ] || [ "$STEP_STATUS" = 75 ]; then requeue; fi
  # After an error (1) or a usage error (2), the program has printed a message.
  if [ "$STEP_STATUS" -gt 2 ]; then
    ! may_retry_crash || requeue
    [ "$STEP_STARTED" = yes ] || fail "the processes did not start, three times; see the errors above"
    fail "the evaluation has crashed three times; see above, and submit the same command to continue"
  fi
  exit 1
}

# run_task ARGS...: execute the run of pretrain.compare that belongs to this array task. The task is requeued after a
# warning and, a few times, after a crash; the run then continues from its checkpoint.
run_task() {
  STEP_STATUS=75
  if [ -z "$SIGNALED" ]; then
    (
      # exec, so that Python gets the signals.
      exec "${python[@]}" pretrain.compare "$@" --only "$SLURM_ARRAY_TASK_ID"
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
  # After a failed run (1) or a usage error (2), the program has printed a message.
  [ "$STEP_STATUS" -le 2 ] || ! may_retry_crash || requeue
  fail "the run has failed; see above, and submit the same command to continue"
}

# may_retry_crash: count a crash of a job without attempt records, and succeed unless it is the third one. Restarts for
# other reasons, such as preemption, do not count.
may_retry_crash() {
  local crashes=$PWD/runs/.jobs/$SLURM_JOB_ID.crashes
  mkdir -p "$PWD/runs/.jobs"
  # Slurm may have reused the job ID.
  [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || rm -f "$crashes"
  echo "$STEP_STATUS" >>"$crashes" && [ "$(wc -l <"$crashes")" -lt 3 ]
}

# retry_on_75 VARIABLE COMMAND...: store the command's output in VARIABLE. If it exits with 75, because the file system
# does not respond, try again up to ten times.
retry_on_75() {
  local -n output=$1
  shift
  local tries status
  for tries in $(seq 10); do
    output=$("$@")
    status=$?
    [ $status = 75 ] || return $status
    log "the file system does not respond; trying again in a minute ($tries of 10)"
    sleep 60
  done
  return 1
}

# run_step MODULE ARGS...: run the module on every rank, and wait until it ends, also when signals arrive. Sets
# STEP_STATUS. srun's status is unreliable after signals, so the records of the run decide what happens next. Also sets
# STEP_STARTED to "no" if the module has not started: after an error of srun (SLURM_EXIT_ERROR, a status that no program
# here uses), an unknown option of srun or an error of the container (255), or if Python was not found (126, 127).
# --overlap (Slurm 20.11 or newer): otherwise srun may wait up to two minutes (SlurmctldTimeout) until Slurm notices
# that the previous step has ended.
# --distribution=block:block: place consecutive ranks of a node on one socket, like consecutive GPUs. Slurm's default
# alternates between sockets.
run_step() {
  local module=$1
  shift
  # shellcheck disable=SC2046
  SLURM_EXIT_ERROR=119 OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(cpus_per_task)} LOCAL_WORLD_SIZE=$tasks \
    srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks=$((SLURM_JOB_NUM_NODES * tasks)) --ntasks-per-node="$tasks" \
    --cpus-per-task="$(cpus_per_task)" --export=ALL --distribution=block:block --kill-on-bad-exit=1 --unbuffered --overlap \
    $([ "$gpus" -gt 0 ] && echo "--gpus-per-node=$gpus") "${srun_options[@]}" \
    bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS; exec "$@"' task \
    "${python[@]}" "$module" "$@" &
  local srun=$!
  SRUN=$srun
  [ -z "${ATTEMPT_DIRECTORY:-}" ] || kill_stuck_srun $srun &
  local watcher=$!
  while :; do
    wait $srun
    STEP_STATUS=$?
    # With a status above 128, a signal may have interrupted this wait rather than srun.
    [ $STEP_STATUS -gt 128 ] && kill -0 $srun 2>/dev/null || break
  done
  kill $watcher 2>/dev/null
  SRUN=
  STEP_STARTED=yes
  case $STEP_STATUS in 119 | 126 | 127 | 255) STEP_STARTED=no ;; esac
}

# kill_stuck_srun PID: kill an srun that waits for tasks that no longer exist. This happens when a node restarts before
# Slurm notices that it was down. srun is killed if it still runs a minute after a rank recorded its end.
kill_stuck_srun() {
  local delay=${TAPE_SRUN_KILL_DELAY:-60}
  while kill -0 "$1" 2>/dev/null; do
    if compgen -G "$ATTEMPT_DIRECTORY/rank-*.json" >/dev/null; then
      [ "$delay" -gt 0 ] || kill -KILL "$1"
      delay=$((delay - 2))
    fi
    sleep 2
  done
}

# cpus_per_task: print the number of CPUs for each task, which depends on the node with the fewest CPUs.
cpus_per_task() {
  # Such as 64(x2),32 for three nodes.
  local cpus
  cpus=$(tr , '\n' <<<"${SLURM_JOB_CPUS_PER_NODE:-1}" | sed 's/(.*//' | sort -n | head -n 1)
  cpus=$((cpus / tasks))
  echo $((cpus > 0 ? cpus : 1))
}

# gpus_per_node: print the number of GPUs that this job has on each of its nodes or, if they differ, the smallest one.
# SLURM_GPUS_ON_NODE is the number of the first node and, in a job without GPUs, possibly that of another job.
gpus_per_node() {
  local counts
  counts=$(scontrol show job --details "$SLURM_JOB_ID" | awk '
    /^ *Command=/ { arguments = 1 }
    !arguments && /^ *Nodes=.* GRES=/ {
      sub(/.* GRES=/, ""); gsub(/\([^)]*\)/, ""); total = 0
      count = split($0, resources, ",")
      for (i = 1; i <= count; i++) if (resources[i] ~ /^gpu:/) { sub(/.*:/, "", resources[i]); total += resources[i] }
      print total
    }' | sort -n -u | paste -sd' ')
  case $counts in
    0\ *) fail "some nodes of this job have no GPU, and others have up to ${counts##* }; submit it with" \
      "--gpus-per-node, or choose nodes of one kind with --constraint or --nodelist" ;;
    *\ *) log "warning: the nodes of this job have ${counts// / or } GPUs; it uses ${counts%% *} on each" >&2 ;;
  esac
  counts=${counts:-${SLURM_GPUS_ON_NODE:-0}}
  echo "${counts%% *}"
}

# head_address NODE: print the name of the node or, if it does not resolve, the address that Slurm uses for it. If that
# does not resolve either, print 127.0.0.1 for a job on one node; the preflight of a larger job reports the error.
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

# job_field NAME: print a field of this job as scontrol shows it. Skip the first line and everything from Command= on:
# the job's name and arguments may look like fields.
job_field() {
  scontrol show job "$SLURM_JOB_ID" 2>/dev/null | sed -n "1d;/^ *Command=/,\$d;s/^\(.* \)\{0,1\}$1=\([^ ]*\).*/\2/p"
}

# job_log: print the path of this job's output. scontrol shows it after the job's arguments.
job_log() { scontrol show job "$SLURM_JOB_ID" 2>/dev/null | sed -n 's/^ *StdOut=//p' | tail -n 1; }

# finish_attempt: end or requeue the job, depending on the records of the run (see pretrain.attempt decide).
finish_attempt() {
  local answer verdict reason
  retry_on_75 answer run_module pretrain.attempt decide --run="$RUN_DIRECTORY" --checkpoints="$CHECKPOINT_DIRECTORY" \
    --attempt "$ATTEMPT" --exit-status "${STEP_STATUS:-0}"
  read -r verdict reason <<<"$answer"
  log "attempt $ATTEMPT: $reason"
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

# excluded_nodes NODES: print the job's ExcNodeList with NODES (a,b) added. Print nothing if too few other nodes with
# the same CPUs, features and GPUs would remain, since the job would wait forever.
excluded_nodes() {
  local bad=$1 before
  # A job submitted with a node list or a reservation cannot use other nodes.
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

# requeue [BAD_NODES]: requeue this job, without BAD_NODES if enough other nodes remain, and end this script. Retry for
# ten minutes if Slurm does not respond.
requeue() {
  local tries avoid=
  if [ -n "${1:-}" ]; then
    avoid=$(excluded_nodes "$1")
    [ -n "$avoid" ] ||
      log "not excluding $1, since too few other nodes of its kind are left; the next start may use it again"
  fi
  if [ "$(job_field Requeue)" = 0 ]; then
    fail "the job was submitted with --no-requeue; submit the same command to continue"
  fi
  for tries in $(seq 60); do
    case $(job_field JobState)/$(job_field Restarts) in
      RUNNING/"${SLURM_RESTART_COUNT:-0}")
        log "requeueing${avoid:+ without $avoid}"
        # Slurm kills this script and its children once it has requeued the job, and accepts the exclusion only then.
        if [ -n "$avoid" ]; then trap '' TERM; else trap 'exit 1' TERM; fi
        if scontrol requeue "$SLURM_JOB_ID"; then
          if [ -n "$avoid" ]; then
            scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$avoid" || log "warning: Slurm did not exclude $avoid"
            exit 1
          fi
          sleep 300 & # Slurm kills this script
          wait $!
          exit 1
        fi
        ;;
      /) ;; # the controller does not respond
      *)
        # The job was cancelled, or Slurm requeued it and may already run the next attempt elsewhere.
        log "Slurm has ended this job; if it does not requeue it, submit the same command to continue"
        exit 1
        ;;
    esac
    sleep 10
  done
  fail "Slurm did not requeue job $SLURM_JOB_ID; submit the same command to continue"
}

# on_signal NAME: handle a warning of preemption or of the time limit. The ranks find the stop file, save and exit.
on_signal() {
  SIGNALED=$1
  if [ "$1" = USR1 ]; then log "$1: saving, then requeueing"; else log "$1: saving if possible, then ending"; fi
  [ -n "${ATTEMPT_DIRECTORY:-}" ] && echo "$1" >"$ATTEMPT_DIRECTORY/stop"
  # An evaluation has no attempts; srun forwards the signal.
  [ -z "${ATTEMPT_DIRECTORY:-}" ] && [ -n "${SRUN:-}" ] && kill -TERM "$SRUN" 2>/dev/null
  # Requeue the job shortly before the time limit even if the ranks have not reached their next step.
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

# seconds_left: print the seconds left before the time limit, or nothing without a limit.
seconds_left() {
  squeue --noheader --jobs "$SLURM_JOB_ID" --format %L 2>/dev/null |
    awk -F'[-:]' '/^[0-9:-]+$/ {s = 0; n = split($0, parts, /[-:]/); split("1 60 3600 86400", unit, " ")
      for (i = n; i > 0; i--) s += parts[i] * unit[n - i + 1]; print s}'
}

SIGNALED=${SIGNALED:-} STEP_STARTED=yes
