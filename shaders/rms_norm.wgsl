// RMS norm over the last axis, one row an invocation: y = x·r·w, r = 1/√(mean(x²) + ε).
struct P {
    rows : u32,
    n : u32, // vectors a row
    inv : f32, // 1 / width
    eps : f32,
}
alias V = vec4<f32>; // if vec4
alias V = f32; // unless vec4
@group(0) @binding(#) var<storage, read> x : array<V>;
@group(0) @binding(#) var<storage, read> w : array<V>; // if weight
@group(0) @binding(#) var<storage, read_write> y : array<V>;
@group(0) @binding(#) var<storage, read_write> stats : array<f32>;
@group(0) @binding(#) var<uniform> p : P;

fn hsum(v : V) -> f32 { return (v.x + v.y) + (v.z + v.w); } // if vec4
fn hsum(v : V) -> f32 { return v; } // unless vec4
fn weight(i : u32) -> V { return w[i]; } // if weight
fn weight(i : u32) -> V { return V(1.0); } // unless weight

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
    let base = row * p.n;
    var q = V(0.0);
    for (var i = 0u; i < p.n; i += 1u) {
        let t = x[base + i];
        q += t * t;
    }
    let r = 1.0 / sqrt(hsum(q) * p.inv + p.eps);
    for (var i = 0u; i < p.n; i += 1u) {
        y[base + i] = x[base + i] * r * weight(i);
    }
    stats[row] = r;
}
