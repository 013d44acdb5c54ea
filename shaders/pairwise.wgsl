// P[b, (i, j)] = ⟨x[b, i], x[b, j]⟩ for i ≤ j, row-major. An invocation computes a 4 × 4 tile of (i, j).
struct P {
    total : u32, // examples · tiles an example
    m : u32,
    width : u32,
    tiles : u32, // tiles along one side
}
@group(0) @binding(0) var<storage, read> x : array<{{T}}>;
@group(0) @binding(1) var<storage, read_write> y : array<f32>;
@group(0) @binding(2) var<uniform> p : P;

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
    let each = p.tiles * (p.tiles + 1u) / 2u;
    let b = id / each;
    // tile row ti holds the tiles tj = ti ..
    var t = id % each;
    var ti = 0u;
    while (t >= p.tiles - ti) {
        t -= p.tiles - ti;
        ti += 1u;
    }
    let i0 = ti * 4u;
    let j0 = (ti + t) * 4u;
    let top = p.m - 1u;
    let base = b * p.m;
    let ai = (vec4<u32>(base) + min(vec4<u32>(i0, i0 + 1u, i0 + 2u, i0 + 3u), vec4<u32>(top))) * p.width;
    let aj = (vec4<u32>(base) + min(vec4<u32>(j0, j0 + 1u, j0 + 2u, j0 + 3u), vec4<u32>(top))) * p.width;
    var s0 = vec4<f32>(0.0);
    var s1 = vec4<f32>(0.0);
    var s2 = vec4<f32>(0.0);
    var s3 = vec4<f32>(0.0);
    for (var c = 0u; c < p.width; c += 1u) {
        let q0 = x[aj.x + c];
        let q1 = x[aj.y + c];
        let q2 = x[aj.z + c];
        let q3 = x[aj.w + c];
        var r = x[ai.x + c];
        s0 += vec4<f32>({{dot}}(r, q0), {{dot}}(r, q1), {{dot}}(r, q2), {{dot}}(r, q3));
        r = x[ai.y + c];
        s1 += vec4<f32>({{dot}}(r, q0), {{dot}}(r, q1), {{dot}}(r, q2), {{dot}}(r, q3));
        r = x[ai.z + c];
        s2 += vec4<f32>({{dot}}(r, q0), {{dot}}(r, q1), {{dot}}(r, q2), {{dot}}(r, q3));
        r = x[ai.w + c];
        s3 += vec4<f32>({{dot}}(r, q0), {{dot}}(r, q1), {{dot}}(r, q2), {{dot}}(r, q3));
    }
    let out = b * (p.m * (p.m + 1u) / 2u);
    var s = array<vec4<f32>, 4>(s0, s1, s2, s3);
    for (var k = 0u; k < 4u; k += 1u) {
        let i = i0 + k;
        if (i < p.m) {
            let row = out + i * (2u * p.m - i + 1u) / 2u - i;
            for (var l = 0u; l < 4u; l += 1u) {
                let j = j0 + l;
                if (j >= i && j < p.m) {
                    y[row + j] = s[k][l];
                }
            }
        }
    }
}

fn times(a : f32, b : f32) -> f32 {
    return a * b;
}
