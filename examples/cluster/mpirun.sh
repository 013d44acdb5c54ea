#!/bin/sh
# Eight ranks over the hosts of a file, each line `name slots=4`: ./mpirun.sh hosts
# Open MPI starts the ranks; they talk over TCP, for which the first host is named.
export BIRKHOFF_SECRET=$(openssl rand -hex 32) MASTER_PORT=29500
export MASTER_ADDR=$(awk 'NF && !/^#/ { print $1; exit }' "$1")
exec mpirun -n 8 --hostfile "$1" -x BIRKHOFF_SECRET -x MASTER_ADDR -x MASTER_PORT \
    birkhoff train --train train.tsv --valid valid.tsv --out runs/a
