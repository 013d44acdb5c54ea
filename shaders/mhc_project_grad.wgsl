// dS = draw phi' + (2 / nd) dms S + what came before, one token an invocation with its draws in registers
// (see ops/mhc_project.rs, which writes the bindings and the inner step). `parts` invocations share a token.
struct P {
    tokens : u32,
    row : u32,     // units of a token's state
    stride : u32,  // units of phi that one unit of the state meets
    scale : f32,   // 2 / (n d)
    parts : u32,
    pad1 : u32,
    pad2 : u32,
    pad3 : u32,
}
{{DECLARE}}
@group(0) @binding({{UNIFORM}}) var<uniform> p : P;

fn inner(a : {{PHI}}, b : {{PHI}}) -> f32 {
    return {{DOT_PHI}};
}

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
{{LOAD}}
    for (var k = id % p.parts; k < p.row; k += p.parts) {
        let row = k * p.stride;
        let at = t * p.row + k;
        y[at] = {{STEP}};
    }
}
