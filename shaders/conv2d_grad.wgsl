// Adjoints of conv2d.
// input:  dx[b, i, c] = Σ_{f, u, v} k[f, u, v] · dy[b, i − u + ⌊km/2⌋, f, c − v + ⌊kd/2⌋], four columns an
//         invocation.
// kernel: dk[f, u, v] = Σ_{b, i, c} dy[b, i, f, c] · x[b, i + u − ⌊km/2⌋, c + v − ⌊kd/2⌋], one element of a
//         run of `per` examples an invocation; the runs are summed by reduce.wgsl.
struct P {
    total : u32,
    batch : u32,
    m : u32,
    d : u32,
    channels : u32,
    km : u32,
    kd : u32,
    per : u32, // input: ⌈d/4⌉; kernel: examples a run
}
@group(0) @binding(0) var<storage, read> dy : array<f32>;
@group(0) @binding(1) var<storage, read> other : array<f32>; // k, or x
@group(0) @binding(2) var<storage, read_write> out : array<f32>;
@group(0) @binding(3) var<uniform> p : P;

fn at(row : u32, c : i32) -> f32 {
    let inside = c >= 0 && c < i32(p.d);
    return select(0.0, dy[row + u32(clamp(c, 0, i32(p.d) - 1))], inside);
}

@compute @workgroup_size(64)
fn input(
    @builtin(workgroup_id) wg : vec3<u32>,
    @builtin(num_workgroups) nw : vec3<u32>,
    @builtin(local_invocation_index) li : u32,
) {
    let id = (wg.x + wg.y * nw.x) * 64u + li;
    if (id >= p.total) {
        return;
    }
    let c0 = (id % p.per) * 4u;
    let bi = id / p.per;
    let i = bi % p.m;
    let b = bi / p.m;
    var s = vec4<f32>(0.0);
    for (var u = 0u; u < p.km; u += 1u) {
        let r = i32(i + p.km / 2u) - i32(u);
        if (r < 0 || r >= i32(p.m)) {
            continue;
        }
        for (var f = 0u; f < p.channels; f += 1u) {
            let row = ((b * p.m + u32(r)) * p.channels + f) * p.d;
            let c = i32(c0 + p.kd / 2u);
            var g = vec4<f32>(0.0, at(row, c + 1), at(row, c + 2), at(row, c + 3));
            for (var v = 0u; v < p.kd; v += 1u) {
                g.x = at(row, c - i32(v));
                s += other[(f * p.km + u) * p.kd + v] * g;
                g = vec4<f32>(0.0, g.xyz);
            }
        }
    }
    let to = bi * p.d + c0;
    for (var l = 0u; l < 4u; l += 1u) {
        if (c0 + l < p.d) {
            out[to + l] = s[l];
        }
    }
}

@compute @workgroup_size(64)
fn kernel(
    @builtin(workgroup_id) wg : vec3<u32>,
    @builtin(num_workgroups) nw : vec3<u32>,
    @builtin(local_invocation_index) li : u32,
) {
    let id = (wg.x + wg.y * nw.x) * 64u + li;
    if (id >= p.total) {
        return;
    }
    let n = p.channels * p.km * p.kd;
    let v = id % p.kd;
    let u = (id / p.kd) % p.km;
    let f = (id / (p.kd * p.km)) % p.channels;
    let run = id / n;
    // rows and columns whose neighbour lies inside
    let hm = p.km / 2u;
    let hd = p.kd / 2u;
    let i0 = max(hm, u) - u;
    let i1 = u32(clamp(i32(p.m + hm) - i32(u), 0, i32(p.m)));
    let c0 = max(hd, v) - v;
    let c1 = u32(clamp(i32(p.d + hd) - i32(v), 0, i32(p.d)));
    var s = 0.0;
    for (var b = run * p.per; b < min((run + 1u) * p.per, p.batch); b += 1u) {
        var e = 0.0;
        for (var i = i0; i < i1; i += 1u) {
            let src = ((b * p.m + i) * p.channels + f) * p.d;
            let to = (b * p.m + i + u - hm) * p.d;
            var t = 0.0;
            for (var c = c0; c < c1; c += 1u) {
                t += dy[src + c] * other[to + c + v - hd];
            }
            e += t;
        }
        s += e;
    }
    out[id] = s;
}
