#!/bin/bash
# Starts a command again, a second after its end:
#
#     bash examples/again.sh mpirun ... python examples/train_multihost.py ...
#
# It does not after status 0, nor after 143: the command was told to end (SIGTERM) and has saved; nor
# after ten failures in a row, each within a minute.
trap 'kill -TERM "$child"' TERM
left=${STARTS:-10}
while ((left-- > 0)); do
  began=$SECONDS
  "$@" &
  child=$!
  while
    wait "$child" # ends early when SIGTERM comes
    status=$?
    kill -0 "$child" 2>/dev/null
  do :; done
  echo "$(date +%T) $1 ended with status $status"
  case $status in 0 | 143) exit "$status" ;; esac
  ((SECONDS - began < 60)) || left=${STARTS:-10}
  sleep 1
done
exit "$status"
