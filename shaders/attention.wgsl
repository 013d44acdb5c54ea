// Attention, T queries of one (example, head) an invocation: each key and value is read once for T
// queries (loads, not arithmetic, are what a software driver waits for). One pass over the keys with a
// running maximum. lse[example, head, query] is kept for the adjoint.
struct P {
    tiles : u32, // batch · heads · ⌈m / T⌉
    m : u32,
    heads : u32,
    scale : f32,
}
const N = {{N}}u; // vectors a head
const T = {{T}}u; // queries an invocation
alias V = vec4<f32>; // if vec4
alias V = f32; // unless vec4
@group(0) @binding(#) var<storage, read> q : array<V>;
@group(0) @binding(#) var<storage, read> k : array<V>;
@group(0) @binding(#) var<storage, read> v : array<V>;
@group(0) @binding(#) var<storage, read_write> o : array<V>;
@group(0) @binding(#) var<storage, read_write> lse : array<f32>;
@group(0) @binding(#) var<uniform> p : P;

fn prod(a : V, b : V) -> f32 { return dot(a, b); } // if vec4
fn prod(a : V, b : V) -> f32 { return a * b; } // unless vec4

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wg : vec3<u32>,
    @builtin(num_workgroups) nw : vec3<u32>,
    @builtin(local_invocation_index) li : u32,
) {
    let tile = (wg.x + wg.y * nw.x) * 64u + li;
    if (tile >= p.tiles) {
        return;
    }
    let stride = p.heads * N;
    let per = (p.m + T - 1u) / T;
    let head = tile / per; // of the batch
    let first = head / p.heads * p.m * stride + head % p.heads * N;
    let i0 = tile % per * T;
    var qs : array<array<V, N>, T>;
    var top : array<f32, T>;
    for (var t = 0u; t < T; t += 1u) {
        let at = first + min(i0 + t, p.m - 1u) * stride;
        for (var c = 0u; c < N; c += 1u) {
            qs[t][c] = q[at + c] * p.scale;
        }
        top[t] = -3.0e38;
    }
    var sum : array<f32, T>;
    var acc : array<array<V, N>, T>;
    var row : array<V, N>;
    var value : array<V, N>;
    var key = first;
    for (var j = 0u; j < p.m; j += 1u) {
        for (var c = 0u; c < N; c += 1u) {
            row[c] = k[key + c];
            value[c] = v[key + c];
        }
        for (var t = 0u; t < T; t += 1u) {
            var s = 0.0;
            for (var c = 0u; c < N; c += 1u) {
                s += prod(qs[t][c], row[c]);
            }
            let m = max(top[t], s);
            let old = exp(top[t] - m);
            let e = exp(s - m);
            top[t] = m;
            sum[t] = sum[t] * old + e;
            for (var c = 0u; c < N; c += 1u) {
                acc[t][c] = acc[t][c] * old + e * value[c];
            }
        }
        key += stride;
    }
    for (var t = 0u; t < T; t += 1u) {
        let i = i0 + t;
        if (i < p.m) {
            let inv = 1.0 / sum[t];
            for (var c = 0u; c < N; c += 1u) {
                o[first + i * stride + c] = acc[t][c] * inv;
            }
            lse[head * p.m + i] = top[t] + log(sum[t]);
        }
    }
}
