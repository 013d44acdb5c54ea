// Adjoint of attention to keys and values, one (example, head, key) an invocation: with a_i the
// recomputed weight of this key for query i, dv = Σ_i a_i·do_i, dk = scale·Σ_i a_i·(do_i·v − D_i)·q_i.
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
@group(0) @binding(#) var<storage, read> lse : array<f32>;
@group(0) @binding(#) var<storage, read> dout : array<V>;
@group(0) @binding(#) var<storage, read> dots : array<f32>;
@group(0) @binding(#) var<storage, read_write> dk : array<V>;
@group(0) @binding(#) var<storage, read_write> dv : array<V>;
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
    var kj : array<V, N>;
    var vj : array<V, N>;
    for (var c = 0u; c < N; c += 1u) {
        kj[c] = k[at + c] * p.scale;
        vj[c] = v[at + c];
    }
    var dkj : array<V, N>;
    var dvj : array<V, N>;
    var query = first;
    let rows = row - row % p.m;
    for (var i = 0u; i < p.m; i += 1u) {
        var s = 0.0;
        var da = 0.0;
        for (var c = 0u; c < N; c += 1u) {
            s += prod(q[query + c], kj[c]);
            da += prod(dout[query + c], vj[c]);
        }
        let a = exp(s - lse[rows + i]);
        let ds = a * (da - dots[rows + i]) * p.scale;
        for (var c = 0u; c < N; c += 1u) {
            dvj[c] += a * dout[query + c];
            dkj[c] += ds * q[query + c];
        }
        query += stride;
    }
    for (var c = 0u; c < N; c += 1u) {
        dk[at + c] = dkj[c];
        dv[at + c] = dvj[c];
    }
}
