// Factorisation machine over the slots of x[b, m, c]: one element (or four) of an example an invocation.
// forward:  y = ½ ((Σ_i x_i)² − Σ_i x_i²)      backward: dx_i = dy · (Σ_j x_j − x_i)
struct P {
    total : u32, // elements of one [b, c]
    m : u32,
    width : u32,
}
@group(0) @binding(0) var<storage, read> x : array<{{T}}>;
{{dy}}
@group(0) @binding({{y}}) var<storage, read_write> y : array<{{T}}>;
@group(0) @binding({{p}}) var<uniform> p : P;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wg : vec3<u32>,
    @builtin(num_workgroups) nw : vec3<u32>,
    @builtin(local_invocation_index) li : u32,
) {
    let id = (wg.x + wg.y * nw.x) * 64u + li;
    if (id >= p.total) {
        return;
    }
    let at = (id / p.width) * p.m * p.width + id % p.width;
    var s = {{T}}(0.0);
    var q = {{T}}(0.0);
    for (var i = 0u; i < p.m; i += 1u) {
        let v = x[at + i * p.width];
        s += v;
        q += v * v;
    }
    {{store}}
}
