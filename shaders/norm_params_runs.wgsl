// dγ = Σ_rows dy·x̂ and dβ = Σ_rows dy, first stage: fixed runs of `per` rows, one (run, column) an
// invocation, into part[run, 2, n] (RMS norm has no β: part[run, n]). No atomics, so repeats are equal.
struct P {
    rows : u32,
    n : u32, // vectors a row
    runs : u32,
    per : u32,
}
alias V = vec4<f32>; // if vec4
alias V = f32; // unless vec4
@group(0) @binding(#) var<storage, read> x : array<V>;
@group(0) @binding(#) var<storage, read> stats : array<vec2<f32>>; // if layer
@group(0) @binding(#) var<storage, read> stats : array<f32>; // unless layer
@group(0) @binding(#) var<storage, read> dy : array<V>;
@group(0) @binding(#) var<storage, read_write> part : array<V>;
@group(0) @binding(#) var<uniform> p : P;

fn first(v : V) -> f32 { return v.x; } // if vec4
fn first(v : V) -> f32 { return v; } // unless vec4
fn normal(row : u32, c : u32) -> V {
    let v = x[row * p.n + c];
    let s = stats[row];
    return ((v - first(x[row * p.n])) - s.x) * s.y; // if layer
    return v * s; // unless layer
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wg : vec3<u32>,
    @builtin(num_workgroups) nw : vec3<u32>,
    @builtin(local_invocation_index) li : u32,
) {
    let k = (wg.x + wg.y * nw.x) * 64u + li;
    if (k >= p.runs * p.n) {
        return;
    }
    let c = k % p.n;
    let run = k / p.n;
    var s = V(0.0);
    var t = V(0.0);
    let last = min((run + 1u) * p.per, p.rows);
    for (var row = run * p.per; row < last; row += 1u) {
        let g = dy[row * p.n + c];
        s += g * normal(row, c);
        t += g;
    }
    part[run * p.n + c] = s; // unless layer
    part[2u * run * p.n + c] = s; // if layer
    part[(2u * run + 1u) * p.n + c] = t; // if layer
}
