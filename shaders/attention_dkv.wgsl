// Adjoint of attention to keys and values, T keys of one (example, head) an invocation: with a_i the
// recomputed weight of a key for query i, dv = Σ_i a_i·do_i, dk = scale·Σ_i a_i·(do_i·v − D_i)·q_i.
struct P {
    tiles : u32, // batch · heads · ⌈m / T⌉
    m : u32,
    heads : u32,
    scale : f32,
}
const N = {{N}}u; // vectors a head
const T = {{T}}u; // keys an invocation
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
    let tile = (wg.x + wg.y * nw.x) * 64u + li;
    if (tile >= p.tiles) {
        return;
    }
    let stride = p.heads * N;
    let per = (p.m + T - 1u) / T;
    let head = tile / per; // of the batch
    let first = head / p.heads * p.m * stride + head % p.heads * N;
    let i0 = tile % per * T;
    var ks : array<array<V, N>, T>;
    var vs : array<array<V, N>, T>;
    for (var t = 0u; t < T; t += 1u) {
        let at = first + min(i0 + t, p.m - 1u) * stride;
        for (var c = 0u; c < N; c += 1u) {
            ks[t][c] = k[at + c] * p.scale;
            vs[t][c] = v[at + c];
        }
    }
    var dks : array<array<V, N>, T>;
    var dvs : array<array<V, N>, T>;
    var row : array<V, N>;
    var grad : array<V, N>;
    var query = first;
    for (var i = 0u; i < p.m; i += 1u) {
        for (var c = 0u; c < N; c += 1u) {
            row[c] = q[query + c];
            grad[c] = dout[query + c];
        }
        let l = lse[head * p.m + i];
        let big_d = dots[head * p.m + i];
        for (var t = 0u; t < T; t += 1u) {
            var s = 0.0;
            var da = 0.0;
            for (var c = 0u; c < N; c += 1u) {
                s += prod(row[c], ks[t][c]);
                da += prod(grad[c], vs[t][c]);
            }
            let a = exp(s - l);
            let ds = a * (da - big_d) * p.scale;
            for (var c = 0u; c < N; c += 1u) {
                dks[t][c] += ds * row[c];
                dvs[t][c] += a * grad[c];
            }
        }
        query += stride;
    }
    for (var t = 0u; t < T; t += 1u) {
        let i = i0 + t;
        if (i < p.m) {
            for (var c = 0u; c < N; c += 1u) {
                dk[first + i * stride + c] = dks[t][c];
                dv[first + i * stride + c] = dvs[t][c];
            }
        }
    }
}
