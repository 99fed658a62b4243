#!/usr/bin/env bash
# The all-reduce benchmark in several processes of one machine, as on several hosts: one process for
# every GPU, and two processes with half of the GPUs each, which stand for two nodes. Over NVLink and
# over host shared memory (NCCL_P2P_DISABLE=1).
#
#     benchmarks/all_reduce_processes.sh [GPUS] [OPTION...]      # GPUS: default all
#
# Further options go to `dynamiq-jax bench all-reduce`. What process 0 prints lands in $OUT too [runs].
set -euo pipefail
cd "$(dirname "$0")/.."
gpus=${1:-$(nvidia-smi -L | wc -l)}
shift || true
out=${OUT:-runs}
mkdir -p "$out"

bench() {  # NAME PROCESSES OPTION...
  local name=$1 processes=$2 each=$((gpus / $2)) port=$((29400 + RANDOM % 1000)) i
  shift 2
  echo "== $name: $processes processes of $each GPU(s)"
  for ((i = processes - 1; i >= 0; i--)); do
    CUDA_VISIBLE_DEVICES=$(seq -s, $((i * each)) $((i * each + each - 1))) \
      "${PYTHON:-python3}" -m dynamiq_jax bench all-reduce --processes "$processes" \
      --process-id "$i" --coordinator "localhost:$port" "$@" >"$out/$name.$i.log" 2>&1 &
  done
  wait $! || { tail -20 "$out/$name.0.log"; return 1; }  # process 0, the last that was started
  wait
  grep -A99 "one bf16 leaf" "$out/$name.0.log"
}

all() {  # TRANSPORT OPTION...
  local transport=$1
  shift
  bench "${transport}_each" "$gpus" --topology direct "$@"
  bench "${transport}_nodes" 2 --nodes 2 --topology hierarchical,direct "$@"
}

all nvlink --sizes 64MiB,256MiB,1GiB --repeats 10 "$@"
export NCCL_P2P_DISABLE=1
all shm --sizes 64MiB,256MiB --repeats 6 --iterations 2 "$@"
