#!/bin/sh
# agent.sh [OPTIONS] HOST COMMAND...: what mpiexec calls in place of ssh. Runs COMMAND on an emulated host: in its network namespace, under
# its name.
set -eu
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
# the script below is for the shell on the host, which gets the values as arguments
# shellcheck disable=SC2016
exec ip netns exec "$host" unshare --uts sh -c 'hostname "$0" && exec sh -c "$1"' "$host" "$*"
