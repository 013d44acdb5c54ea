// Adjoint of attention to the queries, one (example, head, query) an invocation. With a_j the recomputed
// weight, ds_j = a_j·(do·v_j − D), D = do·o: dq = scale·Σ_j ds_j·k_j. D is kept for attention_dkv.
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
@group(0) @binding(#) var<storage, read> o : array<V>;
@group(0) @binding(#) var<storage, read> lse : array<f32>;
@group(0) @binding(#) var<storage, read> dout : array<V>;
@group(0) @binding(#) var<storage, read_write> dq : array<V>;
@group(0) @binding(#) var<storage, read_write> dots : array<f32>;
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
    var di : array<V, N>;
    var big_d = 0.0;
    for (var c = 0u; c < N; c += 1u) {
        qi[c] = q[at + c] * p.scale;
        di[c] = dout[at + c];
        big_d += prod(di[c], o[at + c]);
    }
    let l = lse[row];
    var acc : array<V, N>;
    var key = first;
    for (var j = 0u; j < p.m; j += 1u) {
        var s = 0.0;
        var da = 0.0;
        for (var c = 0u; c < N; c += 1u) {
            s += prod(qi[c], k[key + c]);
            da += prod(di[c], v[key + c]);
        }
        let ds = exp(s - l) * (da - big_d);
        for (var c = 0u; c < N; c += 1u) {
            acc[c] += ds * k[key + c];
        }
        key += stride;
    }
    for (var c = 0u; c < N; c += 1u) {
        dq[at + c] = acc[c] * p.scale;
    }
    dots[row] = big_d;
}
