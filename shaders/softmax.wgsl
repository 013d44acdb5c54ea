// Softmax over the last axis, one row an invocation; the row's maximum is subtracted first.
struct P {
    rows : u32,
    n : u32, // vectors a row
    pad0 : u32,
    pad1 : u32,
}
alias V = vec4<f32>; // if vec4
alias V = f32; // unless vec4
@group(0) @binding(#) var<storage, read> x : array<V>; // unless in_place
@group(0) @binding(#) var<storage, read_write> y : array<V>;
@group(0) @binding(#) var<uniform> p : P;

fn hsum(v : V) -> f32 { return (v.x + v.y) + (v.z + v.w); } // if vec4
fn hsum(v : V) -> f32 { return v; } // unless vec4
fn hmax(v : V) -> f32 { return max(max(v.x, v.y), max(v.z, v.w)); } // if vec4
fn hmax(v : V) -> f32 { return v; } // unless vec4
fn load(i : u32) -> V { return x[i]; } // unless in_place
fn load(i : u32) -> V { return y[i]; } // if in_place

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
    var top = load(base);
    for (var i = 1u; i < p.n; i += 1u) {
        top = max(top, load(base + i));
    }
    let m = hmax(top);
    var s = V(0.0);
    for (var i = 0u; i < p.n; i += 1u) {
        let e = exp(load(base + i) - m);
        y[base + i] = e;
        s += e;
    }
    let r = 1.0 / hsum(s);
    for (var i = 0u; i < p.n; i += 1u) {
        y[base + i] *= r;
    }
}
