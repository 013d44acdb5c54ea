#!/bin/sh
# Two "hosts" on this machine: network namespaces joined by a link of limited rate (tc tbf) and some delay: netem, or where
# the kernel has none two TUN devices between which tools/netns_delay.rs holds every packet for so long. Needs root, ip and
# tc (iproute2), and rustc for the latter.
#
#   sh tools/netns.sh run TRAIN-OPTIONS…       birkhoff launch on both, one rank each; prints what host 0 prints
#   sh tools/netns.sh measure [NAME=VALUE…]    step time by --overlap and --grad-wire on the link: medians, a table
#   sh tools/netns.sh check                    what the link is like: its round trip and rate, measured
#
#   RATE=100mbit DELAY=0ms    the link (each way): a rate as tc has it; 10ms, 500us
#   BIRKHOFF=target/release/birkhoff
#   ROUNDS=3 STEPS=24         of measure: rounds, in each of which every variant runs once; steps of a run
#   SETS="…"                  of measure: the model, as KEY=VALUE words
#   RESULTS=DIR               of measure: keeps its numbers there, and takes what is there into the medians
set -eu

[ $# -gt 0 ] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit 2; }
what=$1
shift
case "$what" in
    measure) for word in "$@"; do export "${word?}"; done ;;
    run | check) ;;
    *) echo "netns: $what: expected run, measure or check" >&2; exit 2 ;;
esac
rate=${RATE:-100mbit} delay=${DELAY:-0ms}
tools=$(realpath "$(dirname "$0")")
if [ "$what" != check ]; then
    birkhoff=${BIRKHOFF:-target/release/birkhoff}
    [ -x "$birkhoff" ] || { echo "netns: $birkhoff: no such program; build it, or say where by BIRKHOFF=" >&2; exit 2; }
    birkhoff=$(realpath "$birkhoff")
fi
for tool in ip tc; do
    command -v $tool >/dev/null || { echo "netns: $tool is missing (Debian: apt install iproute2)" >&2; exit 3; }
done

id=bk$$
work=$(mktemp -d)
forwarder=
clean() {
    [ -z "$forwarder" ] || kill -KILL "$forwarder" 2>/dev/null || :
    for host in a b; do
        # what still runs in a namespace
        for pid in $(ip netns pids $id$host 2>/dev/null); do kill -KILL "$pid" 2>/dev/null || :; done
        ip netns del $id$host 2>/dev/null || :
    done
    rm -rf "$work"
}
trap clean EXIT
trap 'exit 130' INT TERM HUP

for host in a b; do
    ip netns add $id$host || { echo "netns: cannot make a network namespace: it needs root" >&2; exit 3; }
    ip -n $id$host link set lo up
done
helper() {
    [ ! -x "$work/netns_delay" ] || return 0
    command -v rustc >/dev/null || { echo "netns: rustc is missing, which builds tools/netns_delay.rs" >&2; exit 3; }
    rustc --edition 2024 -O -o "$work/netns_delay" "$tools/netns_delay.rs"
}
number=${delay%%[!0-9.]*}
case "$number" in *[1-9]*) delayed=yes ;; *) delayed= ;; esac
netem=
if [ "$delayed" ] && tc -n ${id}a qdisc add dev lo root netem delay "$delay" 2>/dev/null; then
    tc -n ${id}a qdisc del dev lo root
    netem=yes
fi
if [ "$delayed" ] && [ -z "$netem" ]; then
    helper
    "$work/netns_delay" join "$delay" ${id}0 ${id}1 >"$work/ready" &
    forwarder=$!
    until [ -s "$work/ready" ]; do
        kill -0 $forwarder 2>/dev/null || { echo "netns: no link with a delay: neither netem nor TUN devices" >&2; exit 3; }
        sleep 0.02
    done
    ip link set ${id}0 netns ${id}a
    ip link set ${id}1 netns ${id}b
else
    ip link add ${id}0 netns ${id}a type veth peer name ${id}1 netns ${id}b
fi
n=0
for host in a b; do
    ip -n $id$host addr add 10.213.77.$((n + 1))/30 dev $id$n
    # segments as a real link has them, not 64 KiB at a time
    ip -n $id$host link set $id$n gso_max_size 1514 gso_max_segs 1 up 2>/dev/null || ip -n $id$host link set $id$n up
    tc -n $id$host qdisc add dev $id$n root handle 1: tbf rate "$rate" burst 64kb latency 200ms
    # more packets at a time than netem's thousand
    [ -z "$netem" ] || tc -n $id$host qdisc add dev $id$n parent 1: handle 2: netem delay "$delay" limit 100000
    n=$((n + 1))
done

if [ "$what" = check ]; then
    helper
    ip netns exec ${id}b "$work/netns_delay" answer 10.213.77.2:7777 &
    ip netns exec ${id}a "$work/netns_delay" ask 10.213.77.2:7777 "${BYTES:-8000000}" |
        { read -r trip got; echo "round trip $trip ms, $got Mbit/s (RATE=$rate DELAY=$delay)"; }
    exit
fi

BIRKHOFF_SECRET=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
export BIRKHOFF_SECRET

# both hosts; the second one's words are shown where it fails
both() {
    ip netns exec ${id}b "$birkhoff" launch --nproc 1 --nnodes 2 --node-rank 1 --master 10.213.77.1:29500 --max-restarts 0 -- \
        "$@" >"$work/b.log" 2>&1 &
    other=$!
    ip netns exec ${id}a "$birkhoff" launch --nproc 1 --nnodes 2 --node-rank 0 --master 10.213.77.1:29500 --max-restarts 0 -- \
        "$@" || { code=$?; cat "$work/b.log" >&2; return $code; }
    wait $other || { code=$?; cat "$work/b.log" >&2; return $code; }
}

if [ "$what" = run ]; then
    both train "$@"
    exit
fi

results=${RESULTS:-$work}
mkdir -p "$results"
steps=${STEPS:-24} rounds=${ROUNDS:-3} batch=${BATCH:-64}
sets=${SETS:-model.layers=6 model.width=32 model.head.hidden=[256] model.features.dense_hidden=[256]}
"$birkhoff" synth --rows $((steps * batch * 2)) --seed 1 --out "$work/train.tsv" >"$work/synth.log" 2>&1
"$birkhoff" synth --rows 64 --seed 2 --out "$work/valid.tsv" >>"$work/synth.log" 2>&1
set --
for word in $sets; do set -- "$@" --set "$word"; done

# the median of the numbers on stdin
median() { sort -g | awk '{ v[NR] = $1 } END { print (NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2) }'; }

round=1
while [ "$round" -le "$rounds" ]; do
    for wire in f32 bf16 int8; do
        for overlap in off on; do
            RAYON_NUM_THREADS=1 both train --train "$work/train.tsv" --valid "$work/valid.tsv" --out "$work/run" --force \
                --device cpu -q --overlap $overlap --grad-wire $wire --table-wire "${TABLE_WIRE:-bf16}" --bucket "${BUCKET:-256}" \
                "$@" --set train.batch="$batch" --set train.eval_batch=16 --set train.epochs=1 --set train.log_every=1 \
                --set train.diagnose_every=0 >"$work/out" 2>"$work/err" || { cat "$work/err" >&2; exit 1; }
            # milliseconds of each step but the first ones, from the times at which they ended
            sed -n 's/^{"type":"step".*"seconds":\([0-9.]*\)}$/\1/p' "$work/run/metrics.jsonl" |
                awk 'NR > 4 { print 1000 * ($1 - last) } { last = $1 }' | median >>"$results/$wire-$overlap.ms"
            sed -n 's/.*sent \([0-9.]* [KMG]iB\), communicated \([0-9.]*\) s.*(\([0-9]*\) %).*/\3/p' "$work/out" | median \
                >>"$results/$wire-$overlap.hidden"
            sed -n 's/.*  rank 0 *sent \([0-9.]* [KMG]iB\).*/\1/p' "$work/out" >"$results/$wire-$overlap.sent"
        done
    done
    echo "round $round of $rounds" >&2
    round=$((round + 1))
done
echo "$rate, delay $delay, 2 ranks of $batch rows, $((steps)) steps, $sets"
echo
echo "| --grad-wire | sent by a rank | --overlap off, ms a step | --overlap on, ms a step | hidden |"
echo "|---|---|---|---|---|"
for wire in f32 bf16 int8; do
    echo "| $wire | $(cat "$results/$wire-on.sent") | $(median <"$results/$wire-off.ms") | $(median <"$results/$wire-on.ms") | $(median <"$results/$wire-on.hidden") % |"
done
