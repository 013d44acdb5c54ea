// Layer norm over the last axis, one row an invocation. The row's first element is subtracted before
// the mean is taken, so that rows with a large mean keep their digits; stats = (mean − first, 1/σ).
struct P {
    rows : u32,
    n : u32, // vectors a row
    inv : f32, // 1 / width
    eps : f32,
}
alias V = vec4<f32>; // if vec4
alias V = f32; // unless vec4
@group(0) @binding(#) var<storage, read> x : array<V>;
@group(0) @binding(#) var<storage, read> gamma : array<V>;
@group(0) @binding(#) var<storage, read> beta : array<V>;
@group(0) @binding(#) var<storage, read_write> y : array<V>;
@group(0) @binding(#) var<storage, read_write> stats : array<vec2<f32>>;
@group(0) @binding(#) var<uniform> p : P;

fn hsum(v : V) -> f32 { return (v.x + v.y) + (v.z + v.w); } // if vec4
fn hsum(v : V) -> f32 { return v; } // unless vec4
fn first(v : V) -> f32 { return v.x; } // if vec4
fn first(v : V) -> f32 { return v; } // unless vec4

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
    let x0 = first(x[base]);
    var s = V(0.0);
    for (var i = 0u; i < p.n; i += 1u) {
        s += x[base + i] - x0;
    }
    let m = hsum(s) * p.inv;
    var q = V(0.0);
    for (var i = 0u; i < p.n; i += 1u) {
        let t = (x[base + i] - x0) - m;
        q += t * t;
    }
    let r = 1.0 / sqrt(hsum(q) * p.inv + p.eps);
    for (var i = 0u; i < p.n; i += 1u) {
        y[base + i] = ((x[base + i] - x0) - m) * r * gamma[i] + beta[i];
    }
    stats[row] = vec2<f32>(m, r);
}
