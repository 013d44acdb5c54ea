// y[b, i, f, c] = Σ_{u, v} k[f, u, v] · x[b, i + u − ⌊km/2⌋, c + v − ⌊kd/2⌋], zeros outside.
// An invocation computes four columns c of four filters f.
struct P {
    total : u32,
    m : u32,
    d : u32,
    channels : u32,
    km : u32,
    kd : u32,
    columns : u32, // ⌈d/4⌉
    filters : u32, // ⌈channels/4⌉
}
@group(0) @binding(0) var<storage, read> x : array<f32>;
@group(0) @binding(1) var<storage, read> k : array<f32>;
@group(0) @binding(2) var<storage, read_write> y : array<f32>;
@group(0) @binding(3) var<uniform> p : P;

fn at(row : u32, c : i32) -> f32 {
    let inside = c >= 0 && c < i32(p.d);
    return select(0.0, x[row + u32(clamp(c, 0, i32(p.d) - 1))], inside);
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
    let c0 = (id % p.columns) * 4u;
    let f0 = ((id / p.columns) % p.filters) * 4u;
    let bi = id / (p.columns * p.filters);
    let i = bi % p.m;
    let b = bi / p.m;
    let size = p.km * p.kd;
    let f = min(vec4<u32>(f0, f0 + 1u, f0 + 2u, f0 + 3u), vec4<u32>(p.channels - 1u)) * size;
    // s_l: four filters at column c0 + l
    var s0 = vec4<f32>(0.0);
    var s1 = vec4<f32>(0.0);
    var s2 = vec4<f32>(0.0);
    var s3 = vec4<f32>(0.0);
    for (var u = 0u; u < p.km; u += 1u) {
        let r = i32(i + u) - i32(p.km / 2u);
        if (r < 0 || r >= i32(p.m)) {
            continue;
        }
        let row = (b * p.m + u32(r)) * p.d;
        let c = i32(c0) - i32(p.kd / 2u);
        // a window of four neighbours slides along the row
        var x0 = at(row, c);
        var x1 = at(row, c + 1);
        var x2 = at(row, c + 2);
        for (var v = 0u; v < p.kd; v += 1u) {
            let x3 = at(row, c + i32(v) + 3);
            let q = u * p.kd + v;
            let w = vec4<f32>(k[f.x + q], k[f.y + q], k[f.z + q], k[f.w + q]);
            s0 += x0 * w;
            s1 += x1 * w;
            s2 += x2 * w;
            s3 += x3 * w;
            x0 = x1;
            x1 = x2;
            x2 = x3;
        }
    }
    var s = array<vec4<f32>, 4>(s0, s1, s2, s3);
    for (var q = 0u; q < 4u; q += 1u) {
        if (f0 + q < p.channels) {
            let to = (bi * p.channels + f0 + q) * p.d + c0;
            for (var l = 0u; l < 4u; l += 1u) {
                if (c0 + l < p.d) {
                    y[to + l] = s[l][q];
                }
            }
        }
    }
}
