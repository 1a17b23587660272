#!/bin/sh
# agent.sh [OPTIONS] HOST COMMAND...: what mpiexec calls in place of ssh. Runs COMMAND on a host of the emulated cluster: in its network
# namespace, under its name, with the hosts of the cluster in /etc/hosts. SP_NETLAB is the folder of the cluster.
set -eu
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
# the script below is for the shell on the host, which gets the values as arguments
# shellcheck disable=SC2016
exec ip netns exec "$(basename "$SP_NETLAB")$host" unshare --uts sh -c \
    'hostname "$0" && mount --bind "$1" /etc/hosts && exec sh -c "$2"' "$host" "$SP_NETLAB/hosts" "$*"
