#!/usr/bin/env bash
# The all-reduce benchmark over three transports of one multi-GPU machine, slower by about 40x and
# 150x than the first: NVLink (one server), host shared memory (a ~100 Gb/s NIC per GPU) and
# loopback sockets (slow Ethernet). Writes $OUT/all_reduce_{nvlink,shm,socket}.json [OUT=runs].
# Further arguments go to `dynamiq-jax bench all-reduce`. NCCL_NVLS_ENABLE=0, if set, stays set.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-runs}
mkdir -p "$out"

bench() {  # NAME OPTION...
  local name=$1
  shift
  echo "== $name"
  "${PYTHON:-python3}" -m dynamiq_jax bench all-reduce \
    --json "$out/all_reduce_$name.json" "$@"
}

bench nvlink --sizes 16MiB,64MiB,256MiB,1GiB --repeats 20 "$@"
export NCCL_P2P_DISABLE=1
bench shm --sizes 16MiB,64MiB,256MiB --repeats 10 --iterations 3 "$@"
export NCCL_SHM_DISABLE=1 NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo
bench socket --sizes 16MiB,64MiB --repeats 5 --iterations 2 "$@"
