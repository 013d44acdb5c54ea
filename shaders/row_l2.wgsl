// y[u, c] = grad[u, c] + lambda * s * table[unique[u], c]: one element (or four) an invocation.
struct P {
    total : u32,
    width : u32,
    rows : u32,   // rows of the table
    lambda : f32,
    frequency : u32, // whether s is the row's share of the batch
}
@group(0) @binding(0) var<storage, read> table : array<{{T}}>;
@group(0) @binding(1) var<storage, read> grad : array<{{T}}>;
@group(0) @binding(2) var<storage, read> ids : array<u32>;
@group(0) @binding(3) var<storage, read> segments : array<u32>;
@group(0) @binding(4) var<storage, read> hyper : array<f32>;
@group(0) @binding(5) var<storage, read_write> y : array<{{T}}>;
@group(0) @binding(6) var<uniform> p : P;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wg : vec3<u32>,
    @builtin(num_workgroups) nw : vec3<u32>,
    @builtin(local_invocation_index) li : u32,
) {
    let i = (wg.x + wg.y * nw.x) * 64u + li;
    if (i >= p.total) {
        return;
    }
    let u = i / p.width;
    let row = ids[u];
    var sum = grad[i];
    if (row < p.rows) {
        var f = p.lambda;
        if (p.frequency != 0u) {
            f *= f32(segments[u + 1u] - segments[u]) / hyper[7];
        }
        sum += f * table[row * p.width + i % p.width];
    }
    y[i] = sum;
}
