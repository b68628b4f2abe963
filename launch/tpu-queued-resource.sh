#!/usr/bin/env bash
# A Cloud TPU slice of one host or many, on spot capacity, by a queued resource that is made again when preempted.
#
#   ZONE=us-east5-b TYPE=v6e-16 launch/tpu-queued-resource.sh [--dry-run] NAME \
#     --config my_config.py --workdir gs://bucket/runs/mine [--config.field=value …]
#
# What runs there is this checkout: its wheel is built here and copied to the hosts. 0 (done) deletes the slice. 1 and 2
# (g2d stopped with a message) and 69 (it could not be installed) end this script and keep the slice, so that the same
# command, once the cause is mended, starts at once. A slice that was preempted is made again; g2d that ended with 75 or
# by a signal is started again, and after G2D_MAX_FAILURES failures in a row (starts during which `g2d status` did not
# change, hosts that were not reached, requests that fail) this script ends with 75 and keeps the slice. Stopping this
# script (Ctrl-C) leaves g2d running on the slice; the same command joins it again. Other arguments while g2d runs there,
# or another TYPE, are refused with 2, and that slice is kept whatever KEEP says.
# --dry-run prints the commands in the order of an undisturbed run.
#
# ZONE, TYPE            where, and which accelerator type: v5litepod-16 (or v5e-16), v5p-32, v6e-16 …
# PROJECT               gcloud's own setting
# RUNTIME               the software version of the TPU VMs, by TYPE
# KEEP                  failed: the slice, and its cost, stay unless g2d is done; always; never
# G2D_CHECKPOINT_EVERY  updates between checkpoints, 10, for a preemption leaves 30 seconds; a --config.checkpoint.every
#                       of your own counts more, and with G2D_CHECKPOINT_EVERY= the config decides
# G2D_EXTRAS            of the wheel: tpu,hub,gcs
# G2D_PACKAGE           what to install in the wheel's place, as pip accepts it: 'g2d-jax[tpu,hub,gcs] @ git+https://…'
# G2D_MAX_FAILURES      8
# G2D_PAUSE             seconds between two looks, 30
set -uo pipefail

usage() {
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2
  exit 2
}
refuse() { # message
  echo "$0: $1" >&2
  exit 2
}
dry=
if [[ ${1:-} == --dry-run ]]; then
  dry=1
  shift
fi
[[ ${1:-} =~ ^[a-z][-a-z0-9]*$ && -n ${ZONE:-} && -n ${TYPE:-} ]] || usage
name=$1
shift

TYPE=${TYPE/#v5e-/v5litepod-} # Cloud TPU's own name of a v5e
if [[ -z ${RUNTIME:=} ]]; then
  case $TYPE in
    v6e-*) RUNTIME=v2-alpha-tpuv6e ;;
    v5p-*) RUNTIME=v2-alpha-tpuv5 ;;
    v5litepod-*) RUNTIME=v2-alpha-tpuv5-lite ;;
    v4-* | v3-* | v2-*) RUNTIME=tpu-ubuntu2204-base ;;
  esac
fi
[[ -n $RUNTIME ]] || refuse "TYPE=$TYPE is none of v5litepod-N, v5e-N, v5p-N, v6e-N, v4-N, v3-N and v2-N: mend it, or set RUNTIME too"
case ${KEEP:=failed} in
  failed | always | never) ;;
  *) refuse "KEEP is failed, always or never, got $KEEP" ;;
esac
every=${G2D_CHECKPOINT_EVERY-10}
[[ $every =~ ^([1-9][0-9]*)?$ ]] || refuse "G2D_CHECKPOINT_EVERY is a number of updates, or empty, got $every"
most=${G2D_MAX_FAILURES:-8} pause=${G2D_PAUSE:-30}
[[ $most =~ ^[1-9][0-9]*$ ]] || refuse "G2D_MAX_FAILURES is a number of failures, got $most"
[[ $pause =~ ^[0-9]+(\.[0-9]+)?$ ]] || refuse "G2D_PAUSE is a number of seconds, got $pause"

where=("--zone=$ZONE")
[[ -z ${PROJECT:-} ]] || where+=("--project=$PROJECT")
here=$(cd "$(dirname "$0")" && pwd)
files=("$here/tpu-worker.sh")
arguments=()
[[ -z $every ]] || arguments+=("--config.checkpoint.every=$every") # first: of two settings the last counts
bucket=
previous=
for argument in "$@"; do
  [[ $argument != --dry-run ]] || refuse "--dry-run stands before NAME"
  case $previous in
    --config) value=$argument key= ;;
    --workdir) [[ $argument != gs://* ]] || bucket=1 ;;
  esac
  case $argument in
    --config=*) value=${argument#*=} key=--config= ;;
    --workdir=gs://*) bucket=1 ;;
  esac
  if [[ -n ${value:-} && -f ${value%%:*} ]]; then # a file (FILE.py:choice=…) goes to the hosts, into their home folder
    files+=("${value%%:*}")
    argument=$key$(basename "${value%%:*}")${value#"${value%%:*}"}
  elif [[ ${value:-} =~ \.py(:|$) ]]; then
    refuse "there is no config file ${value%%:*}"
  fi
  value=
  arguments+=("$argument")
  previous=$argument
done
[[ $bucket ]] || refuse "give --workdir gs://…: all hosts share it, and it outlives the slice"

call() {
  if [[ $dry ]]; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}
say() { echo "$(date +%T) $name: $*" >&2; }

scratch=WHEELS # of the dry run
if [[ ! $dry ]]; then
  scratch=$(mktemp -d) || exit 69
  trap 'rm -rf "$scratch"' EXIT
fi
build() { # before there is a slice: what cannot be built costs nothing
  if ! call python3 -m pip wheel --quiet --no-deps "--wheel-dir=$scratch" "$here/.."; then
    say "no wheel could be built of the checkout, with python3 and pip; or say with G2D_PACKAGE what to install"
    exit 69
  fi
  local wheel=$scratch/g2d_jax.whl
  [[ $dry ]] || wheel=$(echo "$scratch"/g2d_jax-*.whl)
  files+=("$wheel")
  package="./$(basename "$wheel")[${G2D_EXTRAS:-tpu,hub,gcs}]"
}
package=${G2D_PACKAGE:-}
[[ -n $package ]] || build

tpus=(gcloud compute tpus)
state() { "${tpus[@]}" queued-resources describe "$name" "${where[@]}" '--format=value(state.state)' 2>/dev/null; }
machine() { # field: of the TPU VM
  "${tpus[@]}" tpu-vm describe "$name" "${where[@]}" "--format=value($1)" 2>/dev/null
}
create() {
  call "${tpus[@]}" queued-resources create "$name" "--node-id=$name" "${where[@]}" "--accelerator-type=$TYPE" \
    "--runtime-version=$RUNTIME" --spot --quiet
}
delete=("${tpus[@]}" queued-resources delete "$name" "${where[@]}" --force --quiet)
copy() { call "${tpus[@]}" tpu-vm scp "${files[@]}" "$name:" "${where[@]}" --worker=all --quiet; }
follow() { # attempt
  local command
  command="bash tpu-worker.sh $(printf '%q ' "$1" "$package" "${arguments[@]}")"
  call "${tpus[@]}" tpu-vm ssh "$name" "${where[@]}" --worker=all --quiet --ssh-flag=-oServerAliveInterval=30 \
    "--command=$command"
}

if [[ $dry ]]; then
  create
  call "${tpus[@]}" queued-resources describe "$name" "${where[@]}" '--format=value(state.state)'
  copy
  follow ATTEMPT
  [[ $KEEP == always ]] || call "${delete[@]}"
  exit
fi
[[ -z $every ]] || say "spot: g2d gets --config.checkpoint.every=$every, before your own settings (G2D_CHECKPOINT_EVERY)"

log=$scratch/log
failures=0
finish() { # status: delete the slice, or say that it stays, and end
  if [[ $KEEP == never || ($1 == 0 && $KEEP == failed) ]]; then
    "${delete[@]}" || say "NOT DELETED, and costs going: give this again: $(printf '%q ' "${delete[@]}")"
  else
    say "the slice, if there is one, is kept, and costs going. The same command uses it again; this deletes it:"
    say "$(printf '%q ' "${delete[@]}")"
  fi
  exit "$1"
}
trap 'KEEP=always finish 130' INT # g2d goes on, and the same command joins it
failed() { # message
  failures=$((failures + 1))
  say "$1 ($failures in a row)"
  if ((failures >= most)); then
    say "giving up"
    finish 75
  fi
}
# 0, 1, 2, 69: what g2d, or its installation, ended with. 75: to be run again. 255: not all hosts were reached. gcloud's
# own statuses are 1 and 2 as well, so it is what the hosts print that counts.
attempt() {
  : >"$log"
  copy || return 255
  follow "$(date +%s)-$RANDOM" 2>&1 | tee "$log"
  local status=${PIPESTATUS[0]} ended final
  ! grep -q 'g2d runs here already with other arguments' "$log" || KEEP=always # another run's slice
  ended=$(grep -o 'g2d exit status: [0-9]*' "$log" | sort -u)
  for final in 2 1 69; do
    if grep -qx "g2d exit status: $final" <<<"$ended"; then return "$final"; fi
  done
  if [[ -z $ended || $status == 255 ]]; then return 255; fi
  if ((status == 0)); then return 0; fi
  return 75
}

progress= # the newest digest of `g2d status` that a host printed
moved() { # whether the work directory changed since an earlier attempt printed one
  local before=$progress now
  now=$(grep -o 'g2d progress: [0-9a-f]*' "$log" | tail -n 1)
  progress=${now:-$before}
  [[ -n $before && $progress != "$before" ]]
}

seen=
while :; do
  state=$(state)
  [[ -z $state ]] || seen=1
  case $state in
    ACTIVE)
      type=$(machine acceleratorType)
      type=${type##*/}
      [[ -z $type || $type == "$TYPE" ]] || refuse "the slice $name is a $type, not a $TYPE: give another NAME, or TYPE=$type"
      attempt
      status=$?
      case $status in
        0) say "done" && finish 0 ;;
        1 | 2) say "g2d stopped with the message above, status $status" && finish "$status" ;;
        69) say "g2d could not be installed on a host: see above" && finish 69 ;;
      esac
      why="g2d is to be started again, and the slice is there"
      ((status == 75)) || why="not all hosts were reached, and the slice is there; is the key known? (docs/launch.md)"
      # What the cloud says counts, not what ssh says: a key or a network that fails here is no reason to delete.
      if [[ $(state) == ACTIVE ]]; then
        case $(machine state) in
          PREEMPTED | TERMINATED) say "preempted" && "${delete[@]}" ;;
          *) if moved; then failures=0 && say "$why"; else failed "$why"; fi ;;
        esac
      fi
      ;;
    "")
      if ! create; then
        if [[ ! $seen ]]; then
          say "gcloud made nothing; its message is above"
          exit 1
        fi
        failed "could not be created"
      fi
      ;;
    SUSPENDED) say "preempted" && "${delete[@]}" ;;
    FAILED) failed "the request failed" && "${delete[@]}" ;;
    *) say "$state" ;; # waiting, being made, or going
  esac
  sleep "$pause"
done
