// raw = vec(S) phi and ms = mean(vec(S)^2) in one pass over the state, one token an invocation, all columns
// in registers (see ops/mhc_project.rs, which writes the inner step).
struct P {
    tokens : u32,
    row : u32,     // units of a token's state
    stride : u32,  // units of phi that one unit of the state meets
    scale : f32,   // 1 / (n d)
    pad0 : u32,
    pad1 : u32,
    pad2 : u32,
    pad3 : u32,
}
@group(0) @binding(0) var<storage, read> s : array<{{S}}>;
@group(0) @binding(1) var<storage, read> phi : array<{{PHI}}>;
@group(0) @binding(2) var<storage, read_write> pre : array<f32>;
@group(0) @binding(3) var<storage, read_write> post : array<f32>;
@group(0) @binding(4) var<storage, read_write> res : array<f32>;
@group(0) @binding(5) var<storage, read_write> ms : array<f32>;
@group(0) @binding(6) var<uniform> p : P;

fn square(a : {{S}}) -> f32 {
    let b = a;
    return {{DOT_S}};
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
    var a_$o = {{PHI}}(0.0);
    var sum = 0.0;
    var row = 0u;
    for (var k = 0u; k < p.row; k++) {
        let x = s[t * p.row + k];
        sum += square(x);
{{STEP}}
        row += p.stride;
    }
{{STORE}}
    ms[t] = sum * p.scale;
}
