// Layer norm over the last axis, one row an invocation. The row's first element is subtracted before
// the mean is taken, so that rows with a large mean keep their digits; stats = (mean − first, 1/σ).
// Short rows stay in registers; long ones are read twice, with the sums taken about the mean of their
// first vector, so that one element far out costs few digits of the variance.
struct P {
    rows : u32,
    n : u32, // vectors a row
    inv : f32, // 1 / width
    eps : f32,
}
const N = {{N}}u; // if short
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
    var q = V(0.0);
    var v : array<V, N>; // if short
    for (var i = 0u; i < N; i += 1u) { // if short
        v[i] = x[base + i] - x0; // if short
        s += v[i]; // if short
    } // if short
    let m = hsum(s) * p.inv; // if short
    for (var i = 0u; i < N; i += 1u) { // if short
        v[i] -= m; // if short
        q += v[i] * v[i]; // if short
    } // if short
    let r = 1.0 / sqrt(hsum(q) * p.inv + p.eps); // if short
    for (var i = 0u; i < N; i += 1u) { // if short
        y[base + i] = v[i] * r * gamma[i] + beta[i]; // if short
    } // if short
    let c = hsum(x[base] - x0) * 0.25; // if long4
    let c = 0.0; // if long1
    for (var i = 0u; i < p.n; i += 1u) { // unless short
        let t = (x[base + i] - x0) - c; // unless short
        s += t; // unless short
        q += t * t; // unless short
    } // unless short
    let dm = hsum(s) * p.inv; // unless short
    let m = c + dm; // unless short
    let r = 1.0 / sqrt(max(hsum(q) * p.inv - dm * dm, 0.0) + p.eps); // unless short
    for (var i = 0u; i < p.n; i += 1u) { // unless short
        y[base + i] = ((x[base + i] - x0) - m) * r * gamma[i] + beta[i]; // unless short
    } // unless short
    stats[row] = vec2<f32>(m, r);
}
