// d/dx of layer norm, one row an invocation: with x̂ the normalised row and g = dy·γ,
// dx = (g − mean(g) − x̂·mean(g·x̂)) / σ, plus the accumulated gradient if there is one.
struct P {
    rows : u32,
    n : u32, // vectors a row
    inv : f32, // 1 / width
    pad : u32,
}
alias V = vec4<f32>; // if vec4
alias V = f32; // unless vec4
@group(0) @binding(#) var<storage, read> x : array<V>;
@group(0) @binding(#) var<storage, read> gamma : array<V>;
@group(0) @binding(#) var<storage, read> stats : array<vec2<f32>>;
@group(0) @binding(#) var<storage, read> dy : array<V>; // unless over_dy
@group(0) @binding(#) var<storage, read> acc : array<V>; // if acc
@group(0) @binding(#) var<storage, read_write> dx : array<V>;
@group(0) @binding(#) var<uniform> p : P;

fn hsum(v : V) -> f32 { return (v.x + v.y) + (v.z + v.w); } // if vec4
fn hsum(v : V) -> f32 { return v; } // unless vec4
fn first(v : V) -> f32 { return v.x; } // if vec4
fn first(v : V) -> f32 { return v; } // unless vec4
fn grad(i : u32) -> V { return dy[i]; } // unless over_dy
fn grad(i : u32) -> V { return dx[i]; } // if over_dy
fn plus(i : u32) -> V { return acc[i]; } // if acc
fn plus(i : u32) -> V { return dx[i]; } // if over_acc
fn plus(i : u32) -> V { return V(0.0); } // if plain

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
    let m = stats[row].x;
    let r = stats[row].y;
    var sg = V(0.0);
    var sgx = V(0.0);
    for (var i = 0u; i < p.n; i += 1u) {
        let g = grad(base + i) * gamma[i];
        sg += g;
        sgx += g * ((x[base + i] - x0) - m);
    }
    let a = hsum(sg) * p.inv;
    let b = hsum(sgx) * p.inv * r * r;
    for (var i = 0u; i < p.n; i += 1u) {
        let g = grad(base + i) * gamma[i];
        dx[base + i] = (g - a - ((x[base + i] - x0) - m) * b) * r + plus(base + i);
    }
}
