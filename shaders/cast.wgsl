// y = x in another storage type: f32 on one side, {{half}} on the other, two of which share a u32. One pair an invocation, on
// bit patterns: rounding is that of ops/round.rs to the bit, and no driver flushes a subnormal.
struct P {
    total : u32, // elements
    pairs : u32, // ⌈total / 2⌉
}
@group(0) @binding(0) var<storage, read> x : array<u32>;
@group(0) @binding(1) var<storage, read_write> y : array<u32>;
@group(0) @binding(2) var<uniform> p : P;

fn narrow_bf16(bits : u32) -> u32 {
    let sign = (bits >> 16u) & 0x8000u;
    let a = bits & 0x7fffffffu;
    if (a > 0x7f800000u) {
        return sign | 0x7fc0u;
    }
    if (a > 0x7f7f0000u) {
        return sign | 0x7f7fu;
    }
    return sign | ((a + 0x7fffu + ((a >> 16u) & 1u)) >> 16u);
}

fn narrow_f16(bits : u32) -> u32 {
    let sign = (bits >> 16u) & 0x8000u;
    let a = bits & 0x7fffffffu;
    if (a > 0x7f800000u) {
        return sign | 0x7e00u;
    }
    if (a > 0x477fe000u) {
        return sign | 0x7bffu;
    }
    let exponent = a >> 23u;
    let dropped = select(126u - max(exponent, 1u), 13u, exponent >= 113u);
    if (dropped > 24u) {
        return sign;
    }
    let significand = select((a & 0x7fffffu) | 0x800000u, a, exponent == 0u);
    let units = (significand + (1u << (dropped - 1u)) - 1u + ((significand >> dropped) & 1u)) >> dropped;
    return sign | (units + ((max(exponent, 113u) - 113u) << 10u));
}

fn widen_bf16(half : u32) -> u32 {
    return half << 16u;
}

fn widen_f16(half : u32) -> u32 {
    let sign = (half & 0x8000u) << 16u;
    let e = (half >> 10u) & 31u;
    let m = half & 0x3ffu;
    if (e == 31u) {
        return sign | 0x7f800000u | (m << 13u);
    }
    if (e > 0u) {
        return sign | ((e + 112u) << 23u) | (m << 13u);
    }
    if (m == 0u) {
        return sign;
    }
    let lead = firstLeadingBit(m);
    return sign | ((lead + 103u) << 23u) | ((m << (23u - lead)) & 0x7fffffu);
}

fn narrowed(pair : u32) {
    let i = 2u * pair;
    var both = narrow_{{half}}(x[i]);
    if (i + 1u < p.total) {
        both |= narrow_{{half}}(x[i + 1u]) << 16u;
    }
    y[pair] = both;
}

fn widened(pair : u32) {
    let i = 2u * pair;
    let both = x[pair];
    y[i] = widen_{{half}}(both & 0xffffu);
    if (i + 1u < p.total) {
        y[i + 1u] = widen_{{half}}(both >> 16u);
    }
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wg : vec3<u32>,
    @builtin(num_workgroups) nw : vec3<u32>,
    @builtin(local_invocation_index) li : u32,
) {
    let pair = (wg.x + wg.y * nw.x) * 64u + li;
    if (pair >= p.pairs) {
        return;
    }
    {{body}}(pair);
}
