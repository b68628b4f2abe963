#!/usr/bin/env bash
# One machine: `g2d run`, started again after status 75 or death by a signal, until it is done. Installed before, in the
# checkout: pip install '.[hub]', and on GPUs '.[cuda,hub]'; the extra gcs for a work directory on Cloud Storage.
#
#   launch/workstation.sh [--dry-run] --config my_config.py --workdir runs/mine [--config.field=value …]
#
# Ends with g2d's status when that is 0, 1, 2 or 130, with 69 where there is no g2d, and with 75 after G2D_MAX_STALLS
# starts in a row during which `g2d status` did not change. SIGTERM or Ctrl-C to this script stops g2d, which saves, and
# starts nothing again.
#
# G2D_COMMAND     the command, g2d
# G2D_MAX_STALLS  3
# G2D_PAUSE       seconds between two starts, 10
set -uo pipefail

read -r -a g2d <<<"${G2D_COMMAND:-g2d}"
max_stalls=${G2D_MAX_STALLS:-3}

dry=
if [[ ${1:-} == --dry-run ]]; then
  dry=1
  shift
fi
workdir=
for ((i = 1; i <= $#; i++)); do
  case ${!i} in
    --workdir=*) workdir=${!i#*=} ;;
    --workdir) next=$((i + 1)) && workdir=${!next:-} ;;
  esac
done
if [[ -z $workdir ]]; then
  echo "usage: $0 [--dry-run] --config CONFIG --workdir DIR [--config.field=value …]" >&2
  exit 2
fi
if [[ $dry ]]; then
  printf '%q ' "${g2d[@]}" run "$@"
  echo
  exit
fi

if ! command -v "${g2d[0]}" >/dev/null; then
  echo "$0: there is no command ${g2d[0]}: activate its environment, or install it: pip install '.[hub]' in the checkout" >&2
  exit 69
fi

child=
stopped=
interrupted=
on_signal() {
  stopped=1
  interrupted=1
  [[ -z $child ]] || kill -TERM "$child" 2>/dev/null
}
trap on_signal TERM INT

progress() { "${g2d[@]}" status --workdir "$workdir" 2>/dev/null; }

stalls=0
before=$(progress)
while :; do
  "${g2d[@]}" run "$@" &
  child=$!
  [[ -z $stopped ]] || kill -TERM "$child" 2>/dev/null
  interrupted=1
  while [[ $interrupted ]]; do # a signal ends `wait` early; the status is that of the last one
    interrupted=
    wait "$child"
    status=$?
  done
  child=
  if [[ $stopped ]] || ((status != 75 && (status < 129 || status == 130))); then
    exit "$status"
  fi
  after=$(progress)
  if [[ $after == "$before" ]]; then stalls=$((stalls + 1)); else stalls=0; fi
  before=$after
  if ((stalls >= max_stalls)); then
    echo "$0: status $status, and no progress in $stalls starts; see the messages above" >&2
    exit 75
  fi
  echo "$0: status $status; starting again" >&2
  sleep "${G2D_PAUSE:-10}"
  [[ -z $stopped ]] || exit "$status"
done
