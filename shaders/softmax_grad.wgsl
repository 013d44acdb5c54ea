// d/dx of softmax, one row an invocation: dx = y·(dy − Σ dy·y).
struct P {
    rows : u32,
    n : u32, // vectors a row
    pad0 : u32,
    pad1 : u32,
}
const N = {{N}}u; // if short
alias V = vec4<f32>; // if vec4
alias V = f32; // unless vec4
@group(0) @binding(#) var<storage, read> y : array<V>;
@group(0) @binding(#) var<storage, read> dy : array<V>; // unless in_place
@group(0) @binding(#) var<storage, read_write> dx : array<V>;
@group(0) @binding(#) var<uniform> p : P;

fn hsum(v : V) -> f32 { return (v.x + v.y) + (v.z + v.w); } // if vec4
fn hsum(v : V) -> f32 { return v; } // unless vec4
// the entry of `at` where `top` is largest
fn best(top : V, at : V) -> f32 { // if vec4
    let a = select(vec2<f32>(top.x, at.x), vec2<f32>(top.y, at.y), top.y > top.x); // if vec4
    let b = select(vec2<f32>(top.z, at.z), vec2<f32>(top.w, at.w), top.w > top.z); // if vec4
    return select(a.y, b.y, b.x > a.x); // if vec4
} // if vec4
fn best(top : V, at : V) -> f32 { return at; } // unless vec4
fn grad(i : u32) -> V { return dy[i]; } // unless in_place
fn grad(i : u32) -> V { return dx[i]; } // if in_place

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
    // dx does not change when a constant is taken from dy: the one at the largest y leaves nothing to
    // cancel where the row is saturated
    var top = V(-1.0);
    var at = V(0.0);
    var a : array<V, N>; // if short
    var g : array<V, N>; // if short
    for (var i = 0u; i < N; i += 1u) { // if short
        a[i] = y[base + i]; // if short
        g[i] = grad(base + i); // if short
        at = select(at, g[i], a[i] > top); // if short
        top = max(top, a[i]); // if short
    } // if short
    for (var i = 0u; i < p.n; i += 1u) { // unless short
        let v = y[base + i]; // unless short
        at = select(at, grad(base + i), v > top); // unless short
        top = max(top, v); // unless short
    } // unless short
    let c = best(top, at);
    var s = V(0.0);
    for (var i = 0u; i < N; i += 1u) { // if short
        g[i] -= V(c); // if short
        s += a[i] * g[i]; // if short
    } // if short
    for (var i = 0u; i < p.n; i += 1u) { // unless short
        s += y[base + i] * (grad(base + i) - V(c)); // unless short
    } // unless short
    let t = hsum(s);
    for (var i = 0u; i < N; i += 1u) { // if short
        dx[base + i] = a[i] * (g[i] - t); // if short
    } // if short
    for (var i = 0u; i < p.n; i += 1u) { // unless short
        dx[base + i] = y[base + i] * ((grad(base + i) - V(c)) - t); // unless short
    } // unless short
}
