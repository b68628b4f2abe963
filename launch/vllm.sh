#!/usr/bin/env bash
# vLLM as a run's engine (docs/server.md): serves a model in the foreground, on this machine alone unless told otherwise.
#
#   launch/vllm.sh [--dry-run] MODEL SYNC [option of `vllm serve` …]
#
# MODEL is a folder or hub id: the policy itself, or one with its config.json where weights are loaded into it. SYNC is the
# run's engine.sync: none, folder or adapter. The last two open paths of vLLM by which who reaches the port
# can load files and replace weights, without a key: keep it on a loopback or private address.
#
# VLLM_COMMAND   the command, vllm
# VLLM_HOST      the address to listen on, 127.0.0.1
# VLLM_PORT      8000
# VLLM_API_KEY   the key that requests to /v1 must give; read by vLLM itself
set -euo pipefail

dry=
if [[ ${1:-} == --dry-run ]]; then
  dry=1
  shift
fi
model=${1:-} sync=${2:-}
if [[ -z $model || ! $sync =~ ^(none|folder|adapter)$ ]]; then
  echo "usage: $0 [--dry-run] MODEL none|folder|adapter [option of vllm serve …]" >&2
  exit 2
fi
shift 2

read -r -a vllm <<<"${VLLM_COMMAND:-vllm}"
environment=(VLLM_NO_USAGE_STATS=1)
# Log-probabilities after temperature and filters; no stop tokens or temperature of the model's own.
options=(--logprobs-mode processed_logprobs --generation-config vllm)
case $sync in
  folder) environment+=(VLLM_SERVER_DEV_MODE=1) ;;
  adapter)
    environment+=(VLLM_ALLOW_RUNTIME_LORA_UPDATING=1)
    options+=(--enable-lora --max-loras 2)
    ;;
esac
command=(env "${environment[@]}" "${vllm[@]}" serve "$model" --host "${VLLM_HOST:-127.0.0.1}" --port "${VLLM_PORT:-8000}"
  "${options[@]}" "$@")
if [[ $dry ]]; then
  printf '%q ' "${command[@]}"
  echo
  exit
fi
exec "${command[@]}"
