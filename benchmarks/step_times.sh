#!/usr/bin/env bash
# Step times of training (step_time.py) over three transports of one multi-GPU machine: NVLink, host
# shared memory (a ~100 Gb/s NIC per GPU), and two "nodes" with NVLink inside and loopback sockets
# between them (NCCL_HOSTID), one process for each GPU.
#
#     benchmarks/step_times.sh [GPUS] [MODE,...] [OPTION...]   # default: all, nvlink,shm,sockets
#
# Further options go to step_time.py. Rows are added to $OUT/step_time_MODE.json [OUT=runs].
set -euo pipefail
cd "$(dirname "$0")/.."
gpus=${1:-$(nvidia-smi -L | wc -l)}
modes=${2:-nvlink,shm,sockets}
shift $(($# < 2 ? $# : 2))
out=${OUT:-runs}
mkdir -p "$out"
# XLA finds here what it has tuned and compiled over another transport.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-/tmp/dynamiq-jax-xla}

run() {  # MODE OPTION...
  local mode=$1
  shift
  echo "== $mode"
  "${PYTHON:-python3}" benchmarks/step_time.py --json "$out/step_time_$mode.json" "$@"
}

nvlink() { run nvlink --ways none,bf16-psum,bf16-zero,bf16-fsdp,dp:5,zero-pipeline:5/2.5,fsdp:5/8 "$@"; }

shm() {
  local ways=none,bf16-psum,bf16-zero,bf16-fsdp,dynamiq:5,dynamiq-dither:3.5,mxfp8,mxfp4
  NCCL_P2P_DISABLE=1 run shm --samples 3 --steps 4 --ways "$ways,zero-pipeline:5/2.5,fsdp:5/8" "$@"
}

sockets() {
  local port=$((29400 + RANDOM % 1000)) i
  export NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo XLA_FLAGS=--xla_gpu_shard_autotuning=false
  for ((i = gpus - 1; i >= 0; i--)); do
    NCCL_HOSTID=node$((i * 2 / gpus)) CUDA_VISIBLE_DEVICES=$i \
      NUM_HOSTS=$gpus HOST_ID=$i COORDINATOR=localhost:$port \
      run sockets --topology hierarchical --nodes 2 --samples 2 --steps 2 \
      --ways none,bf16-psum,psum:mxfp8,psum:dynamiq:5,psum:dynamiq-dither:3.5 \
      "$@" >"$out/step_time_sockets.$i.log" 2>&1 &
  done
  wait $! || { tail -20 "$out/step_time_sockets.0.log"; return 1; }  # process 0, started last
  wait
  cat "$out/step_time_sockets.0.log"
}

for mode in ${modes//,/ }; do "$mode" "$@"; done
