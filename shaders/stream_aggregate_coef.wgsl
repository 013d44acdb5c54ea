// dpre[i] = <S[i], du>, one token an invocation (see ops/stream_aggregate.rs).
struct P {
    tokens : u32,
    width : u32, // elements of a row, in units of {{ELEM}}
    parts : u32,
    pad : u32,
}
@group(0) @binding(0) var<storage, read> s : array<{{ELEM}}>;
@group(0) @binding(1) var<storage, read> du : array<{{ELEM}}>;
@group(0) @binding(2) var<storage, read_write> dpre : array<f32>;
@group(0) @binding(3) var<uniform> p : P;

fn inner(a : {{ELEM}}, b : {{ELEM}}) -> f32 {
    return {{DOT}};
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wg : vec3<u32>,
    @builtin(num_workgroups) nw : vec3<u32>,
    @builtin(local_invocation_index) li : u32,
) {
    let t = (wg.x + wg.y * nw.x) * 64u + li;
    if (t >= p.tokens) {
        return;
    }
    let at = t * {{N}}u * p.width;
    var w_$i = 0.0;
    for (var c = 0u; c < p.width; c++) {
        let v = du[t * p.width + c];
        w_$i += inner(s[at + $iu * p.width + c], v);
    }
    dpre[t * {{N}}u + $iu] = w_$i;
}
