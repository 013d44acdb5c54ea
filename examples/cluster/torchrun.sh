#!/bin/sh
# On each of two hosts: BIRKHOFF_SECRET=… HEAD=10.0.0.1:29500 ./torchrun.sh NODE_RANK
# The secret is the same on both: openssl rand -hex 32
: "${BIRKHOFF_SECRET:?make one with openssl rand -hex 32, the same on every host}"
export BIRKHOFF_SECRET
exec torchrun --no-python --nnodes 2 --nproc-per-node 4 --node-rank "$1" --master-addr "${HEAD%:*}" --master-port "${HEAD##*:}" \
    birkhoff train --train train.tsv --valid valid.tsv --out runs/a
