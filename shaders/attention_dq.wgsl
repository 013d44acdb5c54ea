// Adjoint of attention to the queries, T of one (example, head) an invocation. With a_j the recomputed
// weight, ds_j = a_j·(do·v_j − D), D = do·o: dq = scale·Σ_j ds_j·k_j. D is kept for attention_dkv.
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
    var dos : array<array<V, N>, T>;
    var l : array<f32, T>;
    var big_d : array<f32, T>;
    for (var t = 0u; t < T; t += 1u) {
        let i = min(i0 + t, p.m - 1u);
        let at = first + i * stride;
        for (var c = 0u; c < N; c += 1u) {
            qs[t][c] = q[at + c] * p.scale;
            dos[t][c] = dout[at + c];
            big_d[t] += prod(dos[t][c], o[at + c]);
        }
        l[t] = lse[head * p.m + i];
    }
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
            var da = 0.0;
            for (var c = 0u; c < N; c += 1u) {
                s += prod(qs[t][c], row[c]);
                da += prod(dos[t][c], value[c]);
            }
            let ds = exp(s - l[t]) * (da - big_d[t]);
            for (var c = 0u; c < N; c += 1u) {
                acc[t][c] += ds * row[c];
            }
        }
        key += stride;
    }
    for (var t = 0u; t < T; t += 1u) {
        let i = i0 + t;
        if (i < p.m) {
            for (var c = 0u; c < N; c += 1u) {
                dq[first + i * stride + c] = acc[t][c] * p.scale;
            }
            dots[head * p.m + i] = big_d[t];
        }
    }
}
