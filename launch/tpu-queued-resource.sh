#!/usr/bin/env bash
# A Cloud TPU slice of one host or many, on spot capacity, by a queued resource that is made again when preempted.
#
#   ZONE=us-east5-b TYPE=v6e-16 G2D_PACKAGE=… launch/tpu-queued-resource.sh [--dry-run] NAME \
#     --config my_config.py --workdir gs://bucket/runs/mine [--config.field=value …]
#
# Ends with g2d's status when that is 0, 1 or 2, and deletes the slice; with 75 after G2D_MAX_FAILURES starts in a row
# that came to nothing. Stopping this script (Ctrl-C) leaves g2d running on the slice; the same command joins it again.
# --dry-run prints the commands in the order of an undisturbed run.
#
# ZONE, TYPE        where, and which accelerator type
# PROJECT           gcloud's own setting
# RUNTIME           the software version of the TPU VMs, by TYPE
# G2D_PACKAGE       what to install there, as pip accepts it: 'g2d-jax[tpu] @ git+https://…'
# KEEP=1            keeps the slice, and its cost, after the end
# G2D_MAX_FAILURES  8
# G2D_PAUSE         seconds between two looks, 30
set -uo pipefail

usage() {
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2
  exit 2
}
dry=
if [[ ${1:-} == --dry-run ]]; then
  dry=1
  shift
fi
[[ ${1:-} =~ ^[a-z][-a-z0-9]*$ && -n ${ZONE:-} && -n ${TYPE:-} && -n ${G2D_PACKAGE:-} ]] || usage
name=$1
shift

case ${RUNTIME:=}$TYPE in
  v6e-*) RUNTIME=v2-alpha-tpuv6e ;;
  v5p-*) RUNTIME=v2-alpha-tpuv5 ;;
  v5litepod-*) RUNTIME=v2-alpha-tpuv5-lite ;;
  v4-* | v3-* | v2-*) RUNTIME=tpu-ubuntu2204-base ;;
esac
[[ -n $RUNTIME ]] || usage

where=("--zone=$ZONE")
[[ -z ${PROJECT:-} ]] || where+=("--project=$PROJECT")
package=$G2D_PACKAGE
here=$(cd "$(dirname "$0")" && pwd)
files=("$here/tpu-worker.sh")
arguments=()
bucket=
previous=
for argument in "$@"; do
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
  fi
  value=
  arguments+=("$argument")
  previous=$argument
done
if [[ -z $bucket ]]; then
  echo "$0: give --workdir gs://…: all hosts share it, and it outlives the slice" >&2
  exit 2
fi

call() {
  if [[ $dry ]]; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}
say() { echo "$(date +%T) $name: $*" >&2; }
tpus=(gcloud compute tpus)
state() { "${tpus[@]}" queued-resources describe "$name" "${where[@]}" '--format=value(state.state)' 2>/dev/null; }
create() {
  call "${tpus[@]}" queued-resources create "$name" "--node-id=$name" "${where[@]}" "--accelerator-type=$TYPE" \
    "--runtime-version=$RUNTIME" --spot --quiet
}
delete() { call "${tpus[@]}" queued-resources delete "$name" "${where[@]}" --force --quiet; }
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
  [[ -n ${KEEP:-} ]] || delete
  exit
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
failures=0
failed() { # message
  failures=$((failures + 1))
  say "$1 ($failures in a row)"
  if ((failures >= ${G2D_MAX_FAILURES:-8})); then
    say "giving up; the slice, if there is one, was not deleted"
    exit 75
  fi
}
finish() { # status
  say "g2d ended with status $1"
  [[ -n ${KEEP:-} ]] || delete
  exit "$1"
}
# 0, 1, 2: what g2d ended with. 75: to be run again on this slice. 255: the slice is lost. gcloud's own statuses are
# 1 and 2 as well, so it is what the hosts print that counts.
attempt() {
  copy || return 255
  follow "$(date +%s)-$RANDOM" 2>&1 | tee "$log"
  local status=${PIPESTATUS[0]} ended
  ended=$(grep -o 'g2d exit status: [0-9]*' "$log" | sort -u)
  if grep -qx 'g2d exit status: 2' <<<"$ended"; then return 2; fi
  if grep -qx 'g2d exit status: 1' <<<"$ended"; then return 1; fi
  if [[ -z $ended || $status == 255 ]]; then return 255; fi
  if ((status == 0)); then return 0; fi
  return 75
}

while :; do
  state=$(state)
  case $state in
    ACTIVE)
      started=$SECONDS
      attempt
      status=$?
      ((status > 2)) || finish "$status"
      if [[ $(state) == ACTIVE ]]; then
        ((SECONDS - started < 600)) || failures=0 # it did run
        failed "status $status, and the slice is there"
        # a second failure in a row may be the slice's own
        if ((status == 255 || failures > 1)); then delete; fi
      fi
      ;;
    "") create || failed "could not be created" ;;
    SUSPENDED) say "preempted" && delete ;;
    FAILED) failed "the request failed" && delete ;;
    *) say "$state" ;; # waiting, being made, or going
  esac
  sleep "${G2D_PAUSE:-30}"
done
