// Runs of rows out of wider rows (slice), or into wider rows of zeros (pad): one element an invocation.
struct P {
    total : u32,  // elements of y
    x : u32,      // columns of x
    y : u32,      // columns of y
    offset : u32, // first column, in the wider of the two
}
@group(0) @binding(0) var<storage, read> x : array<{{T}}>;
@group(0) @binding(1) var<storage, read_write> y : array<{{T}}>;
@group(0) @binding(2) var<uniform> p : P;

@compute @workgroup_size(64)
fn slice(
    @builtin(workgroup_id) wg : vec3<u32>,
    @builtin(num_workgroups) nw : vec3<u32>,
    @builtin(local_invocation_index) li : u32,
) {
    let i = (wg.x + wg.y * nw.x) * 64u + li;
    if (i >= p.total) {
        return;
    }
    y[i] = x[(i / p.y) * p.x + p.offset + i % p.y];
}

@compute @workgroup_size(64)
fn pad(
    @builtin(workgroup_id) wg : vec3<u32>,
    @builtin(num_workgroups) nw : vec3<u32>,
    @builtin(local_invocation_index) li : u32,
) {
    let i = (wg.x + wg.y * nw.x) * 64u + li;
    if (i >= p.total) {
        return;
    }
    let c = i % p.y;
    var v = {{T}}(0.0);
    if (c >= p.offset && c < p.offset + p.x) {
        v = x[(i / p.y) * p.x + c - p.offset];
    }
    y[i] = v;
}
