// S'[o] = sum_i res[o, i] S[i] + post[o] f, the streams of a token in registers (see ops/stream_merge.rs).
// `parts` invocations share a token's row.
struct P {
    tokens : u32,
    width : u32, // elements of a row, in units of {{ELEM}}
    parts : u32,
    pad : u32,
}
@group(0) @binding(0) var<storage, read> s : array<{{ELEM}}>;
@group(0) @binding(1) var<storage, read> f : array<{{ELEM}}>;
@group(0) @binding(2) var<storage, read> res : array<f32>;
@group(0) @binding(3) var<storage, read> post : array<f32>;
@group(0) @binding(4) var<storage, read_write> y : array<{{ELEM}}>;
@group(0) @binding(5) var<uniform> p : P;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wg : vec3<u32>,
    @builtin(num_workgroups) nw : vec3<u32>,
    @builtin(local_invocation_index) li : u32,
) {
    let id = (wg.x + wg.y * nw.x) * 64u + li;
    let t = id / p.parts;
    if (t >= p.tokens) {
        return;
    }
    let r_$o_$i = res[t * {{N}}u * {{N}}u + $ou * {{N}}u + $iu];
    let p_$o = post[t * {{N}}u + $ou];
    let row = t * {{N}}u * p.width;
    for (var c = id % p.parts; c < p.width; c += p.parts) {
        let v = f[t * p.width + c];
        let x_$i = s[row + $iu * p.width + c];
        y[row + $ou * p.width + c] = p_$o * v + [[+ i: r_$o_$i * x_$i]];
    }
}
