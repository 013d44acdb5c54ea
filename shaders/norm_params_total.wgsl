// dγ and dβ, second stage: the sum of the runs, one column an invocation.
struct P {
    rows : u32,
    n : u32, // vectors a row
    runs : u32,
    per : u32,
}
alias V = vec4<f32>; // if vec4
alias V = f32; // unless vec4
@group(0) @binding(#) var<storage, read> part : array<V>;
@group(0) @binding(#) var<storage, read_write> dgamma : array<V>;
@group(0) @binding(#) var<storage, read_write> dbeta : array<V>; // if layer
@group(0) @binding(#) var<uniform> p : P;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wg : vec3<u32>,
    @builtin(num_workgroups) nw : vec3<u32>,
    @builtin(local_invocation_index) li : u32,
) {
    let k = (wg.x + wg.y * nw.x) * 64u + li;
    let step = 2u * p.n; // if layer
    let step = p.n; // unless layer
    if (k >= step) {
        return;
    }
    var a = V(0.0);
    var b = V(0.0);
    var run = 0u;
    for (; run + 2u <= p.runs; run += 2u) {
        a += part[run * step + k];
        b += part[(run + 1u) * step + k];
    }
    if (run < p.runs) {
        a += part[run * step + k];
    }
    if (k < p.n) {
        dgamma[k] = a + b;
    }
    if (k >= p.n) { // if layer
        dbeta[k - p.n] = a + b; // if layer
    } // if layer
}
