// raw = vec(S) phi and ms = mean(vec(S)^2) in one pass over the state: a tile of {{N}} tokens by {{WIDE}} groups
// of columns an invocation (see ops/mhc_project.rs, which writes the inner step).
struct P {
    tokens : u32,
    row : u32,     // units of a token's state
    stride : u32,  // groups of phi that one unit of the state meets
    scale : f32,   // 1 / (n d)
    groups : u32,  // groups of columns
    tiles : u32,   // tiles of columns
    own : u32,     // groups of pre, and of post
    pad : u32,
}
@group(0) @binding(0) var<storage, read> s : array<{{S}}>;
@group(0) @binding(1) var<storage, read> phi : array<{{C}}>;
@group(0) @binding(2) var<storage, read_write> pre : array<{{C}}>;
@group(0) @binding(3) var<storage, read_write> post : array<{{C}}>;
@group(0) @binding(4) var<storage, read_write> res : array<{{C}}>;
@group(0) @binding(5) var<storage, read_write> ms : array<f32>;
@group(0) @binding(6) var<uniform> p : P;

fn square(a : {{S}}) -> f32 {
    let b = a;
    return {{DOT_S}};
}

fn put(t : u32, group : u32, v : {{C}}, sum : f32) {
    if (t >= p.tokens) {
        return;
    }
    if (group == 0u) {
        ms[t] = sum * p.scale;
    }
    if (group < p.own) {
        pre[t * p.own + group] = v;
    } else if (group < 2u * p.own) {
        post[t * p.own + group - p.own] = v;
    } else {
        res[t * (p.groups - 2u * p.own) + group - 2u * p.own] = v;
    }
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wg : vec3<u32>,
    @builtin(num_workgroups) nw : vec3<u32>,
    @builtin(local_invocation_index) li : u32,
) {
    let id = (wg.x + wg.y * nw.x) * 64u + li;
    let group = id % p.tiles * {{WIDE}}u;
    let t = id / p.tiles * {{N}}u;
    if (t >= p.tokens) {
        return;
    }
    let s_$o = min(t + $ou, p.tokens - 1u) * p.row;
    var sum_$o = 0.0;
{{START}}
    var row = group;
    for (var k = 0u; k < p.row; k++) {
        let x_$o = s[s_$o + k];
        sum_$o += square(x_$o);
{{STEP}}
        row += p.stride;
    }
{{STORE}}
}
