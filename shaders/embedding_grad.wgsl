// g[u, c] = Σ dy[order[q], c] · scale[q] over q of segment u: one element (or four) an invocation, so every
// row of the gradient has one writer. Empty segments give zeros.
struct P {
    total : u32, // elements of g
    width : u32,
    n : u32,     // length of order
    last : u32,  // last row of dy
}
@group(0) @binding(0) var<storage, read> dy : array<{{T}}>;
@group(0) @binding(1) var<storage, read> order : array<u32>;
@group(0) @binding(2) var<storage, read> segments : array<u32>;
{{scale}}
@group(0) @binding({{g}}) var<storage, read_write> g : array<{{T}}>;
@group(0) @binding({{p}}) var<uniform> p : P;

fn term(q : u32, c : u32) -> {{T}} {
    return dy[min(order[q], p.last) * p.width + c]{{times}};
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wg : vec3<u32>,
    @builtin(num_workgroups) nw : vec3<u32>,
    @builtin(local_invocation_index) li : u32,
) {
    let i = (wg.x + wg.y * nw.x) * 64u + li;
    if (i >= p.total) {
        return;
    }
    let u = i / p.width;
    let c = i % p.width;
    var q = min(segments[u], p.n);
    let end = min(segments[u + 1u], p.n);
    // four partial sums: a popular id has thousands of terms
    var s0 = {{T}}(0.0);
    var s1 = {{T}}(0.0);
    var s2 = {{T}}(0.0);
    var s3 = {{T}}(0.0);
    for (; q + 4u <= end; q += 4u) {
        s0 += term(q, c);
        s1 += term(q + 1u, c);
        s2 += term(q + 2u, c);
        s3 += term(q + 3u, c);
    }
    for (; q < end; q += 1u) {
        s0 += term(q, c);
    }
    g[i] = (s0 + s1) + (s2 + s3);
}
