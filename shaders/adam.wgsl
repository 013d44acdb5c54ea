// One AdamW step on one element (or four) an invocation; in the lazy form only on rows that the batch names.
struct P {
    total : u32,
    width : u32, // lazy: elements a row
    rows : u32,  // lazy: rows of the table
    beta1 : f32,
    beta2 : f32,
    rest1 : f32, // 1 − β1
    rest2 : f32, // 1 − β2
    eps : f32,
    decay : f32,
    scale : f32, // of the learning rate
}
@group(0) @binding(0) var<storage, read_write> theta : array<{{T}}>;
@group(0) @binding(1) var<storage, read_write> m : array<{{T}}>;
@group(0) @binding(2) var<storage, read_write> v : array<{{T}}>;
@group(0) @binding(3) var<storage, read> grad : array<{{T}}>;
@group(0) @binding(4) var<storage, read> hyper : array<f32>;
@group(0) @binding(5) var<storage, read> norm2 : array<f32>;
{{unique}}
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
    {{at}}
    let clip = hyper[3];
    let n = norm2[0];
    // a bad step: see guard.wgsl
    if (n < 0.0) {
        return;
    }
    let factor = select(1.0, clip / sqrt(max(n, 1e-38)), clip > 0.0 && n > clip * clip);
    let lr = hyper[{{lr}}] * p.scale;
    let g = factor * grad[i];
    let a = p.beta1 * m[at] + p.rest1 * g;
    let b = p.beta2 * v[at] + p.rest2 * g * g;
    let t = theta[at];
    m[at] = a;
    v[at] = b;
    theta[at] = t - lr * ((a / hyper[1]) / (sqrt(b / hyper[2]) + p.eps) + p.decay * t);
}
