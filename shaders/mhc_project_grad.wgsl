// dS = draw phi' + (2 / nd) dms S + what came before: a tile of {{N}} tokens by {{UNITS}} units of the state an
// invocation (see ops/mhc_project.rs, which writes the bindings and the inner step).
struct P {
    tokens : u32,
    row : u32,     // units of a token's state
    stride : u32,  // groups of phi that one unit of the state meets
    scale : f32,   // 2 / (n d)
    tiles : u32,   // tiles of a token's state
    pad1 : u32,
    pad2 : u32,
    pad3 : u32,
}
{{DECLARE}}
@group(0) @binding({{UNIFORM}}) var<uniform> p : P;

fn inner(a : {{C}}, b : {{C}}, c : f32) -> f32 {
    return {{INNER}};
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wg : vec3<u32>,
    @builtin(num_workgroups) nw : vec3<u32>,
    @builtin(local_invocation_index) li : u32,
) {
    let id = (wg.x + wg.y * nw.x) * 64u + li;
    let t = id / p.tiles * {{N}}u;
    if (t >= p.tokens) {
        return;
    }
    let k = id % p.tiles * {{UNITS}}u;
    let row = k * p.stride;
    let t_$o = min(t + $ou, p.tokens - 1u);
    let y_$o = t_$o * p.row + k;
{{LOAD}}
{{START}}
{{STEP}}
{{STORE}}
}
