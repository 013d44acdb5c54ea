// dphi = sum over runs of tokens; zeros in the columns of segments without a gradient.
struct P {
    len : u32,      // elements of phi
    runs : u32,
    columns : u32,
    n : u32,
    mask : u32,     // bits: pre, post, res have a gradient
    pad0 : u32,
    pad1 : u32,
    pad2 : u32,
}
@group(0) @binding(0) var<storage, read> x : array<f32>;
@group(0) @binding(1) var<storage, read_write> y : array<f32>;
@group(0) @binding(2) var<uniform> p : P;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wg : vec3<u32>,
    @builtin(num_workgroups) nw : vec3<u32>,
    @builtin(local_invocation_index) li : u32,
) {
    let i = (wg.x + wg.y * nw.x) * 64u + li;
    if (i >= p.len) {
        return;
    }
    let segment = min((i % p.columns) / p.n, 2u);
    var sum = 0.0;
    if (((p.mask >> segment) & 1u) == 1u) {
        for (var r = 0u; r < p.runs; r++) {
            sum += x[r * p.len + i];
        }
    }
    y[i] = sum;
}
