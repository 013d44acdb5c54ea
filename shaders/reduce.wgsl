// Sum over the middle axis of [outer, n, inner], in `runs` runs of `per` rows each:
// y[outer, runs, inner]. One output an invocation; with runs = 1 this is the whole sum.
struct P {
    n : u32,
    inner : u32,
    runs : u32,
    per : u32,
    total : u32, // outer · runs · inner
}
@group(0) @binding(0) var<storage, read> x : array<f32>;
@group(0) @binding(1) var<storage, read_write> y : array<f32>;
@group(0) @binding(2) var<uniform> p : P;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wg : vec3<u32>,
    @builtin(num_workgroups) nw : vec3<u32>,
    @builtin(local_invocation_index) li : u32,
) {
    let i = (wg.x + wg.y * nw.x) * 64u + li;
    if (i >= p.total) {
        return;
    }
    let c = i % p.inner;
    let run = (i / p.inner) % p.runs;
    let o = i / (p.inner * p.runs);
    let first = run * p.per;
    let last = min(first + p.per, p.n);
    // four partial sums: shorter chains, and less rounding
    var s0 = 0.0;
    var s1 = 0.0;
    var s2 = 0.0;
    var s3 = 0.0;
    var r = first;
    var at = (o * p.n + first) * p.inner + c;
    let step = p.inner;
    for (; r + 4u <= last; r += 4u) {
        s0 += x[at];
        s1 += x[at + step];
        s2 += x[at + 2u * step];
        s3 += x[at + 3u * step];
        at += 4u * step;
    }
    for (; r < last; r += 1u) {
        s0 += x[at];
        at += step;
    }
    y[i] = (s0 + s1) + (s2 + s3);
}
