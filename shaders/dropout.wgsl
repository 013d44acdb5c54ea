// y[i] = 0 or x[i] / (1 - p): a hash of key, site and i decides, as in ops/dropout.rs.
struct P {
    n : u32,
    site : u32,
    threshold : u32,
    scale : f32,
}
{{x}}
@group(0) @binding({{key}}) var<storage, read> key : array<u32>;
@group(0) @binding({{y}}) var<storage, read_write> y : array<f32>;
@group(0) @binding({{p}}) var<uniform> p : P;

fn mix32(v : u32) -> u32 {
    var x = (v ^ (v >> 16u)) * 0x7feb352du;
    x = (x ^ (x >> 15u)) * 0x846ca68bu;
    return x ^ (x >> 16u);
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wg : vec3<u32>,
    @builtin(num_workgroups) nw : vec3<u32>,
    @builtin(local_invocation_index) li : u32,
) {
    let i = (wg.x + wg.y * nw.x) * 64u + li;
    if (i >= p.n) {
        return;
    }
    let a = mix32(key[0] ^ p.site);
    let b = mix32(key[1] + p.site);
    let keep = mix32(mix32(i + a) ^ b) >= p.threshold;
    y[i] = select(0.0, {{read}} * p.scale, keep);
}
