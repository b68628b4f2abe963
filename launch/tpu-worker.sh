#!/usr/bin/env bash
# On every host of a TPU slice; tpu-queued-resource.sh copies it there and calls it:
#
#   bash tpu-worker.sh ATTEMPT PACKAGE [arguments of g2d run …]
#
# Installs PACKAGE (what pip accepts; a wheel in the home folder: ./WHEEL[EXTRAS]) if it is not there yet, starts g2d and
# follows it to its end. Ends with g2d's status, 69 if it could not be installed. g2d does not depend on the connection:
# called again for the same ATTEMPT, or while g2d runs, this only follows. So a connection that breaks, and gcloud's own
# repetition of a command whose connection broke, start nothing twice.
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

exec 9>>g2d.lock # held by the subshell below for as long as g2d runs
if ! flock --nonblock 9; then
  echo "tpu-worker.sh: g2d runs here already, as it was installed and started then; following it" >&2
elif [[ $(cat g2d.attempt 2>/dev/null) != "$attempt" || ! -s g2d.status ]]; then
  rm -f g2d.status
  echo "$attempt" >g2d.attempt
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
echo "g2d exit status: $(<g2d.status)"
exit "$(<g2d.status)"
