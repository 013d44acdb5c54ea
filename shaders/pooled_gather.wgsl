// y[r, c] = Σ table[ids[q], c] · weights[q] over q of bag r, divided by the bag's length for a mean.
// One element (or four) of a bag an invocation.
struct P {
    total : u32, // elements of y
    width : u32,
    last : u32,  // last row of the table
    n : u32,     // length of ids
    mean : u32,
}
@group(0) @binding(0) var<storage, read> table : array<{{T}}>;
@group(0) @binding(1) var<storage, read> ids : array<u32>;
@group(0) @binding(2) var<storage, read> offsets : array<u32>;
{{weights}}
@group(0) @binding({{y}}) var<storage, read_write> y : array<{{T}}>;
@group(0) @binding({{p}}) var<uniform> p : P;

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
    let r = i / p.width;
    let c = i % p.width;
    let first = min(offsets[r], p.n);
    let last = min(offsets[r + 1u], p.n);
    var s = {{T}}(0.0);
    for (var q = first; q < last; q += 1u) {
        s += table[min(ids[q], p.last) * p.width + c]{{times}};
    }
    if (p.mean != 0u) {
        s = s * (1.0 / f32(max(last, first + 1u) - first));
    }
    y[i] = s;
}
