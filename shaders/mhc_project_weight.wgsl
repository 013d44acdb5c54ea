// Part of dphi = sum over tokens of vec(S)' draw: one run of tokens, {{TALL}} elements of the state by {{WIDE}}
// groups of {{COLS}} columns of one segment (pre, post or res) an invocation (see ops/mhc_project.rs, which
// writes the inner step). The runs are added by mhc_project_sum.wgsl.
struct P {
    tokens : u32,
    per : u32,      // tokens of a run
    runs : u32,
    tiles : u32,    // tiles of a token's state
    groups : u32,   // groups of columns of the segment
    first : u32,    // the segment's first column in phi
    columns : u32,  // columns of phi
    pad : u32,
}
@group(0) @binding(0) var<storage, read> s : array<{{S}}>;
@group(0) @binding(1) var<storage, read> draw : array<{{G}}>;
@group(0) @binding(2) var<storage, read_write> y : array<f32>; // [runs, n d, columns]
@group(0) @binding(3) var<uniform> p : P;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wg : vec3<u32>,
    @builtin(num_workgroups) nw : vec3<u32>,
    @builtin(local_invocation_index) li : u32,
) {
    let id = (wg.x + wg.y * nw.x) * 64u + li;
    let across = p.groups / {{WIDE}}u;
    let group = id % across * {{WIDE}}u;
    let tile = (id / across) % p.tiles;
    let run = id / (across * p.tiles);
    if (run >= p.runs) {
        return;
    }
{{START}}
    let last = min((run + 1u) * p.per, p.tokens);
    for (var t = run * p.per; t < last; t++) {
        let at = (t * p.tiles + tile) * {{UNITS}}u;
{{LOAD}}
    }
    let to = (run * p.tiles + tile) * {{TALL}}u * p.columns + p.first + group * {{COLS}}u;
{{STORE}}
}
