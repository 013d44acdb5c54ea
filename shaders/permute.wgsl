// y[i0, i1, i2, i3] = x[Σ i_k · s_k]: one element an invocation.
struct P {
    d : vec4<u32>, // sizes of y
    s : vec4<u32>, // steps in x
}
@group(0) @binding(0) var<storage, read> x : array<{{T}}>;
@group(0) @binding(1) var<storage, read_write> y : array<{{T}}>;
@group(0) @binding(2) var<uniform> p : P;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wg : vec3<u32>,
    @builtin(num_workgroups) nw : vec3<u32>,
    @builtin(local_invocation_index) li : u32,
) {
    let i = (wg.x + wg.y * nw.x) * 64u + li;
    if (i >= p.d.x * p.d.y * p.d.z * p.d.w) {
        return;
    }
    let r = i / p.d.w;
    let q = r / p.d.z;
    let at = vec4<u32>(q / p.d.y, q % p.d.y, r % p.d.z, i % p.d.w) * p.s;
    y[i] = x[at.x + at.y + at.z + at.w];
}
