// Row-wise Adagrad: one row of the table (one unique id of the batch) an invocation.
struct P {
    segments : u32,
    width : u32,
    rows : u32,
    eps : f32,
    inv : f32, // 1 / elements a row
}
@group(0) @binding(0) var<storage, read_write> table : array<{{T}}>;
@group(0) @binding(1) var<storage, read_write> acc : array<f32>;
@group(0) @binding(2) var<storage, read> grad : array<{{T}}>;
@group(0) @binding(3) var<storage, read> ids : array<u32>;
@group(0) @binding(4) var<storage, read> hyper : array<f32>;
@group(0) @binding(5) var<storage, read> norm2 : array<f32>;
@group(0) @binding(6) var<uniform> p : P;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wg : vec3<u32>,
    @builtin(num_workgroups) nw : vec3<u32>,
    @builtin(local_invocation_index) li : u32,
) {
    let u = (wg.x + wg.y * nw.x) * 64u + li;
    if (u >= p.segments) {
        return;
    }
    let row = ids[u];
    if (row >= p.rows) {
        return;
    }
    let clip = hyper[3];
    let n = norm2[0];
    // a bad step: see guard.wgsl
    if (n < 0.0) {
        return;
    }
    let factor = select(1.0, clip / sqrt(max(n, 1e-38)), clip > 0.0 && n > clip * clip);
    var q = {{T}}(0.0);
    for (var c = 0u; c < p.width; c += 1u) {
        let g = factor * grad[u * p.width + c];
        q += g * g;
    }
    let a = acc[row] + {{sum}} * p.inv;
    acc[row] = a;
    let step = hyper[4] / (sqrt(a) + p.eps) * factor;
    for (var c = 0u; c < p.width; c += 1u) {
        let at = row * p.width + c;
        table[at] = table[at] - step * grad[u * p.width + c];
    }
}
