// dS[i] = pre[i] du, plus what came before (see ops/stream_aggregate.rs).
struct P {
    tokens : u32,
    width : u32, // elements of a row, in units of {{ELEM}}
    parts : u32,
    pad : u32,
}
@group(0) @binding(0) var<storage, read> pre : array<f32>;
@group(0) @binding(1) var<storage, read> du : array<{{ELEM}}>;
@group(0) @binding(2) var<storage, read_write> y : array<{{ELEM}}>;
{{MORE}}
@group(0) @binding({{UNIFORM}}) var<uniform> p : P;

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
        let v = du[t * p.width + c];
        y[at + $iu * p.width] = w_$i * v{{ADD}};
    }
}
