#!/usr/bin/env bash
# The all-reduce benchmark in several processes of one machine, as on several hosts:
#
#   each     one process for every GPU: over NVLink by NCCL's kernels, by its copy engines
#            (docs/multihost.md), and over host shared memory (NCCL_P2P_DISABLE=1)
#   halves   two processes with half of the GPUs each, over NVLink and host shared memory
#   sockets  two "nodes" with NVLink inside and loopback sockets between them (NCCL_HOSTID)
#
#     benchmarks/all_reduce_processes.sh [GPUS] [MODE,...] [OPTION...]   # default: all, all
#
# Further options go to `dynamiq-jax bench all-reduce`. What process 0 prints lands in $OUT too [runs].
set -euo pipefail
cd "$(dirname "$0")/.."
gpus=${1:-$(nvidia-smi -L | wc -l)}
modes=${2:-each,halves,sockets}
shift $(($# < 2 ? $# : 2))
out=${OUT:-runs}
mkdir -p "$out"

bench() {  # NAME PROCESSES NODES OPTION...
  local name=$1 processes=$2 nodes=$3 each=$((gpus / $2)) port=$((29400 + RANDOM % 1000)) i
  shift 3
  echo "== $name: $processes processes of $each GPU(s)"
  for ((i = processes - 1; i >= 0; i--)); do
    if [[ $nodes -gt 1 ]]; then export NCCL_HOSTID=node$((i * nodes / processes)); fi
    CUDA_VISIBLE_DEVICES=$(seq -s, $((i * each)) $((i * each + each - 1))) \
      "${PYTHON:-python3}" -m dynamiq_jax bench all-reduce --processes "$processes" \
      --process-id "$i" --coordinator "localhost:$port" --json "$out/$name.json" "$@" \
      >"$out/$name.$i.log" 2>&1 &
  done
  wait $! || { tail -20 "$out/$name.0.log"; return 1; }  # process 0, the last that was started
  wait
  grep -A99 "one bf16 leaf" "$out/$name.0.log"
}

nvlink=(--sizes 64MiB,256MiB,1GiB --repeats 10)
shm=(--sizes 64MiB,256MiB --repeats 6 --iterations 2)

each() {
  bench each_nvlink "$gpus" 1 --topology direct "${nvlink[@]}" "$@"
  (
    export NCCL_CTA_POLICY=2
    export XLA_FLAGS="${XLA_FLAGS:-} --xla_enable_nccl_symmetric_buffers_for_collectives=AllGather,AllToAll"
    bench each_copy_engines "$gpus" 1 --topology direct "${nvlink[@]}" "$@"
  )
  NCCL_P2P_DISABLE=1 bench each_shm "$gpus" 1 --topology direct "${shm[@]}" "$@"
}

halves() {
  bench halves_nvlink 2 1 --nodes 2 --topology hierarchical,direct "${nvlink[@]}" "$@"
  NCCL_P2P_DISABLE=1 bench halves_shm 2 1 --nodes 2 --topology hierarchical,direct "${shm[@]}" "$@"
}

sockets() {
  NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo bench sockets "$gpus" 2 --nodes 2 --topology hierarchical \
    --methods bf16,dynamiq:5,dynamiq:4,dynamiq:3.5 --sizes 64MiB,256MiB --repeats 4 --iterations 1 "$@"
}

for mode in ${modes//,/ }; do "$mode" "$@"; done
