// y[r, c] = table[ids[r], c]: one element (or four) an invocation.
struct P {
    total : u32, // elements of y
    width : u32,
    last : u32,  // last row of the table
}
@group(0) @binding(0) var<storage, read> table : array<{{T}}>;
@group(0) @binding(1) var<storage, read> ids : array<u32>;
@group(0) @binding(2) var<storage, read_write> y : array<{{T}}>;
@group(0) @binding(3) var<uniform> p : P;

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
    y[i] = table[min(ids[i / p.width], p.last) * p.width + i % p.width];
}
