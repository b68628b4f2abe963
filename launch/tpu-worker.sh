#!/usr/bin/env bash
# On every host of a TPU slice; tpu-queued-resource.sh copies it there and calls it:
#
#   bash tpu-worker.sh ATTEMPT PACKAGE [arguments of g2d run …]
#
# Installs PACKAGE (what pip accepts; a wheel in the home folder: ./WHEEL[EXTRAS]) if it is not there yet, starts g2d and
# follows it to its end. Ends with g2d's status, 69 if it could not be installed. g2d does not depend on the connection:
# called again for the same ATTEMPT, or with the same arguments while g2d runs, this only follows. So a connection that
# breaks, and gcloud's own repetition of a command whose connection broke, start nothing twice. With other arguments
# while g2d runs it ends with 2.
#
# A digest of `g2d status` is printed where g2d runs already, and at an end that is not 0: whether there was progress.
set -uo pipefail

attempt=$1
package=$2
shift 2
cd "$HOME" || exit 69
export PATH="$HOME/g2d-env/bin:$HOME/.local/bin:$PATH"
read -r -a g2d <<<"${G2D_COMMAND:-g2d}"

wanted() { # what is to be installed: the wheel of an edited checkout has the same name and other content
  echo "$package"
  [[ $package != ./* ]] || sha256sum "${package%%\[*}"
}

install() { # the slices' own Python is 3.10
  [[ -n ${G2D_COMMAND:-} || $(cat g2d.package 2>/dev/null) == "$(wanted)" ]] && return
  rm -rf g2d-env g2d.package
  local fresh=(--refresh-package g2d-jax) # uv's own cache knows a wheel by its name
  python3 -m pip install --quiet --user uv &&
    uv venv --quiet --python 3.12 g2d-env &&
    uv pip install --quiet "${fresh[@]}" --python g2d-env/bin/python "$package" &&
    wanted >g2d.package
}

workdir=
for ((i = 1; i <= $#; i++)); do
  case ${!i} in
    --workdir=*) workdir=${!i#*=} ;;
    --workdir) next=$((i + 1)) && workdir=${!next:-} ;;
  esac
done
progress() { # nothing where there is no run, or no g2d
  local said
  said=$("${g2d[@]}" status --workdir "$workdir" 2>/dev/null) || return
  echo "g2d progress: $(sha256sum <<<"$said" | cut -c-16)"
}

arguments=$(printf '%q ' "$@")
exec 9>>g2d.lock # held by the subshell below for as long as g2d runs
if ! flock --nonblock 9; then
  if [[ $(cat g2d.arguments 2>/dev/null) != "$arguments" ]]; then
    echo "tpu-worker.sh: g2d runs here already with other arguments: $(cat g2d.arguments)" >&2
    echo "tpu-worker.sh: nothing was started with: $arguments" >&2
    echo "g2d exit status: 2"
    exit 2
  fi
  echo "tpu-worker.sh: g2d runs here already, as it was installed and started then; following it" >&2
  progress
elif [[ $(cat g2d.attempt 2>/dev/null) != "$attempt" || ! -s g2d.status ]]; then
  rm -f g2d.status
  echo "$attempt" >g2d.attempt
  echo "$arguments" >g2d.arguments
  : >g2d.log
  (
    trap '' HUP
    status=69 # EX_UNAVAILABLE
    if install 9>&-; then
      "${g2d[@]}" run "$@" 9>&-
      status=$?
      ((status != 126 && status != 127)) || status=69 # the shell's: what was installed has no such command
    else
      echo "tpu-worker.sh: $package could not be installed"
    fi
    echo "$status" >g2d.status
  ) >>g2d.log 2>&1 </dev/null &
fi
exec 9>&-

tail --lines=+1 --follow --pid=$$ g2d.log &
tail=$!
until [[ -s g2d.status ]]; do sleep 0.1; done
sleep 0.5 # the last lines
kill "$tail"
status=$(<g2d.status)
# A run that was killed counts as one at work until its lease has stood still for a minute.
((status < 129 || status == 130)) || sleep "${G2D_LEASE:-65}"
((status == 0)) || progress
echo "g2d exit status: $status"
exit "$status"
