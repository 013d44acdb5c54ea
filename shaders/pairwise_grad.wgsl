// dx[b, i] = Σ_j (1 + δ_ij) · dP[b, (i, j)] · x[b, j]. An invocation computes one element (or four) of four
// rows i.
struct P {
    total : u32, // examples · blocks of four rows · width
    m : u32,
    width : u32,
    blocks : u32, // blocks of four rows an example
}
@group(0) @binding(0) var<storage, read> x : array<{{T}}>;
@group(0) @binding(1) var<storage, read> dp : array<f32>;
@group(0) @binding(2) var<storage, read_write> dx : array<{{T}}>;
@group(0) @binding(3) var<uniform> p : P;

fn weight(base : u32, i : u32, j : u32) -> f32 {
    let a = min(i, j);
    let v = dp[base + a * (2u * p.m - a + 1u) / 2u + max(i, j) - a];
    return select(v, v + v, i == j);
}

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
    let c = id % p.width;
    let r = id / p.width;
    let b = r / p.blocks;
    let i0 = (r % p.blocks) * 4u;
    let top = p.m - 1u;
    let i1 = min(i0 + 1u, top);
    let i2 = min(i0 + 2u, top);
    let i3 = min(i0 + 3u, top);
    let base = b * (p.m * (p.m + 1u) / 2u);
    var s0 = {{T}}(0.0);
    var s1 = {{T}}(0.0);
    var s2 = {{T}}(0.0);
    var s3 = {{T}}(0.0);
    for (var j = 0u; j < p.m; j += 1u) {
        let v = x[(b * p.m + j) * p.width + c];
        s0 += weight(base, i0, j) * v;
        s1 += weight(base, i1, j) * v;
        s2 += weight(base, i2, j) * v;
        s3 += weight(base, i3, j) * v;
    }
    let to = (b * p.m + i0) * p.width + c;
    dx[to] = s0;
    if (i0 + 1u < p.m) {
        dx[to + p.width] = s1;
    }
    if (i0 + 2u < p.m) {
        dx[to + 2u * p.width] = s2;
    }
    if (i0 + 3u < p.m) {
        dx[to + 3u * p.width] = s3;
    }
}
