// u = sum_i pre[i] S[i] (see ops/stream_aggregate.rs). `parts` invocations share a token's row.
struct P {
    tokens : u32,
    width : u32, // elements of a row, in units of {{ELEM}}
    parts : u32,
    pad : u32,
}
@group(0) @binding(0) var<storage, read> s : array<{{ELEM}}>;
@group(0) @binding(1) var<storage, read> pre : array<f32>;
@group(0) @binding(2) var<storage, read_write> u : array<{{ELEM}}>;
@group(0) @binding(3) var<uniform> p : P;

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
    let w_$i = pre[t * {{N}}u + $iu];
    for (var c = id % p.parts; c < p.width; c += p.parts) {
        let at = t * {{N}}u * p.width + c;
        let x_$i = s[at + $iu * p.width];
        u[t * p.width + c] = [[+ i: w_$i * x_$i]];
    }
}
