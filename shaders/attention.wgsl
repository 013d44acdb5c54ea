// Attention, one (example, head, query) an invocation: a pass over the keys for the largest score, a
// second one for the weighted sum of the values. lse[example, head, query] is kept for the adjoint.
struct P {
    rows : u32, // batch · heads · m
    m : u32,
    heads : u32,
    scale : f32,
}
const N = {{N}}u; // vectors a head
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
    let row = (wg.x + wg.y * nw.x) * 64u + li;
    if (row >= p.rows) {
        return;
    }
    let stride = p.heads * N;
    let first = row / (p.m * p.heads) * p.m * stride + (row / p.m) % p.heads * N;
    let at = first + row % p.m * stride;
    var qi : array<V, N>;
    for (var c = 0u; c < N; c += 1u) {
        qi[c] = q[at + c] * p.scale;
    }
    var top = -3.0e38;
    var key = first;
    for (var j = 0u; j < p.m; j += 1u) {
        var s = 0.0;
        for (var c = 0u; c < N; c += 1u) {
            s += prod(qi[c], k[key + c]);
        }
        top = max(top, s);
        key += stride;
    }
    var sum = 0.0;
    var acc : array<V, N>;
    key = first;
    for (var j = 0u; j < p.m; j += 1u) {
        var s = 0.0;
        for (var c = 0u; c < N; c += 1u) {
            s += prod(qi[c], k[key + c]);
        }
        let e = exp(s - top);
        sum += e;
        for (var c = 0u; c < N; c += 1u) {
            acc[c] += e * v[key + c];
        }
        key += stride;
    }
    let inv = 1.0 / sum;
    for (var c = 0u; c < N; c += 1u) {
        o[at + c] = acc[c] * inv;
    }
    lse[row] = top + log(sum);
}
