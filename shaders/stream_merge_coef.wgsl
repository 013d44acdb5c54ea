// dres[o, i] = <dS'[o], S[i]>, dpost[o] = <dS'[o], f>, one token an invocation (see ops/stream_merge.rs).
struct P {
    tokens : u32,
    width : u32, // elements of a row, in units of {{ELEM}}
    parts : u32,
    pad : u32,
}
@group(0) @binding(0) var<storage, read> s : array<{{ELEM}}>;
@group(0) @binding(1) var<storage, read> f : array<{{ELEM}}>;
@group(0) @binding(2) var<storage, read> g : array<{{ELEM}}>;
@group(0) @binding(3) var<storage, read_write> dres : array<f32>;
@group(0) @binding(4) var<storage, read_write> dpost : array<f32>;
@group(0) @binding(5) var<uniform> p : P;

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
    let row = t * {{N}}u * p.width;
    var r_$o_$i = 0.0;
    var p_$o = 0.0;
    for (var c = 0u; c < p.width; c++) {
        let v = f[t * p.width + c];
        let x_$i = s[row + $iu * p.width + c];
        let g_$o = g[row + $ou * p.width + c];
        r_$o_$i += inner(g_$o, x_$i);
        p_$o += inner(g_$o, v);
    }
    dres[t * {{N}}u * {{N}}u + $ou * {{N}}u + $iu] = r_$o_$i;
    dpost[t * {{N}}u + $ou] = p_$o;
}
