#!/bin/bash
# Starts a command again, a second after its end:
#
#     bash examples/again.sh mpirun ... python examples/train_multihost.py ...
#
# It does not after status 0, nor after 143: the command was told to end (SIGTERM) and has saved.
trap 'kill -TERM "$child"' TERM
for _ in $(seq "${STARTS:-10}"); do
  "$@" &
  child=$!
  while
    wait "$child" # ends early when SIGTERM comes
    status=$?
    kill -0 "$child" 2>/dev/null
  do :; done
  echo "$(date +%T) $1 ended with status $status"
  case $status in 0 | 143) exit "$status" ;; esac
  sleep 1
done
exit "$status"
