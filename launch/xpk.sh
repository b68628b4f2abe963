#!/usr/bin/env bash
# A workload on a GKE cluster that was made with xpk (github.com/AI-Hypercomputer/xpk).
#
#   CLUSTER=my-cluster PROJECT=my-project ZONE=us-east5-b TYPE=v6e-16 IMAGE=us-docker.pkg.dev/my-project/g2d/tpu:1 \
#     launch/xpk.sh [--dry-run] NAME --config demo --workdir gs://bucket/runs/mine [--config.field=value …]
#
# IMAGE is made of launch/Dockerfile.tpu.
# SPOT=1                for clusters that make node pools on demand; those with a spot node pool need nothing
# SLICES=2              for so many slices, with --config.mesh.data=2
# MAX_RESTARTS          100
# G2D_CHECKPOINT_EVERY  updates between checkpoints, 10, for a preemption leaves 15 to 30 seconds; a
#                       --config.checkpoint.every of your own counts more, and with G2D_CHECKPOINT_EVERY= the config
#                       decides
#
# xpk restarts on 42 and 127 to 255 by itself, here also on 75; on 1 and 2 the workload fails.
set -euo pipefail

dry=
if [[ ${1:-} == --dry-run ]]; then
  dry=1
  shift
fi
refuse() { # message
  echo "$0: $1" >&2
  exit 2
}
if [[ $# -lt 2 || -z ${CLUSTER:-} || -z ${PROJECT:-} || -z ${ZONE:-} || -z ${TYPE:-} || -z ${IMAGE:-} ]]; then
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2
  exit 2
fi
TYPE=${TYPE/#v5e-/v5litepod-} # Cloud TPU's own name of a v5e
name=$1
shift
[[ $name =~ ^[a-z][-a-z0-9]*$ ]] || refuse "NAME is of small letters, digits and -, and begins with a letter, got $name"
every=${G2D_CHECKPOINT_EVERY-10}
[[ $every =~ ^([1-9][0-9]*)?$ ]] || refuse "G2D_CHECKPOINT_EVERY is a number of updates, or empty, got $every"
slices=${SLICES:-1} restarts=${MAX_RESTARTS:-100}
[[ $slices =~ ^[1-9][0-9]*$ ]] || refuse "SLICES is a number of slices, got $slices"
[[ $restarts =~ ^[0-9]+$ ]] || refuse "MAX_RESTARTS is a number of restarts, got $restarts"
bucket=
previous=
for argument in "$@"; do
  [[ $argument != --dry-run ]] || refuse "--dry-run stands before NAME"
  [[ $argument != --workdir=gs://* && $previous$argument != --workdirgs://* ]] || bucket=1
  previous=$argument
done
[[ $bucket ]] || refuse "give --workdir gs://…: all hosts share it, and it outlives the workload"

command=(xpk workload create "--cluster=$CLUSTER" "--project=$PROJECT" "--zone=$ZONE" "--workload=$name"
  "--tpu-type=$TYPE" "--num-slices=$slices" "--docker-image=$IMAGE"
  "--max-restarts=$restarts" --restart-on-exit-codes=75 --termination-grace-period-seconds=60)
[[ -z ${SPOT:-} ]] || command+=(--spot)
arguments=$(printf '%q ' ${every:+"--config.checkpoint.every=$every"} "$@") # of two settings the last counts
command+=("--command=exec g2d run ${arguments% }") # exec: SIGTERM reaches g2d

if [[ $dry ]]; then
  printf '%q ' "${command[@]}"
  echo
else
  [[ -z $every ]] || echo "$0: spot: g2d gets --config.checkpoint.every=$every (G2D_CHECKPOINT_EVERY)" >&2
  exec "${command[@]}"
fi
