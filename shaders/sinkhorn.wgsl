// Sinkhorn-Knopp, one token an invocation, its n x n matrix in registers (unrolled by ops/streams.rs).
// K = exp(h - A - B) once, then only scalings: c = 1/(K' r), r = 1/(K c), res = r K c. A token whose
// scalings leave the safe range is done again in the log domain. See ops/sinkhorn.rs.
struct P {
    tokens : u32,
    iterations : u32,
    pad0 : u32,
    pad1 : u32,
}
@group(0) @binding(0) var<storage, read> h : array<{{ELEM}}>;
@group(0) @binding(1) var<storage, read_write> y : array<{{ELEM}}>;
@group(0) @binding(2) var<uniform> p : P;

const N : u32 = {{N}}u;
var<private> z : array<f32, {{NN}}>; // h, for the log domain
var<private> a : array<f32, {{N}}>;  // row potentials: a - ln r
var<private> r : array<f32, {{N}}>;
var<private> b : array<f32, {{N}}>;  // column potentials: b - ln c
var<private> c : array<f32, {{N}}>;

// column potentials from row potentials
fn columns() {
    for (var i = 0u; i < N; i++) {
        var m = z[i] - a[0];
        for (var o = 1u; o < N; o++) {
            m = max(m, z[o * N + i] - a[o]);
        }
        m = round(m);
        var s = 0.0;
        for (var o = 0u; o < N; o++) {
            s += exp(z[o * N + i] - (a[o] + m)) * r[o];
        }
        let e = round(-log(s)); // any integer near it will do
        c[i] = exp(-e) / s;
        b[i] = m - e;
    }
}

// row potentials from column potentials
fn rows() {
    for (var o = 0u; o < N; o++) {
        var m = z[o * N] - b[0];
        for (var i = 1u; i < N; i++) {
            m = max(m, z[o * N + i] - b[i]);
        }
        m = round(m);
        var s = 0.0;
        for (var i = 0u; i < N; i++) {
            s += exp(z[o * N + i] - (b[i] + m)) * c[i];
        }
        let e = round(-log(s));
        r[o] = exp(-e) / s;
        a[o] = m - e;
    }
}

fn weight(o : u32, i : u32) -> f32 {
    return exp(z[o * N + i] - (a[o] + b[i])) * (r[o] * c[i]);
}

{{HALF_STEP}}
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
    let at = t * {{STRIDE}}u;
{{LOAD_H}}
    // integers near the maxima: subtracting them is exact
    let b_$i = round([[max o: h_$o_$i]]);
    let a_$o = round([[max i: h_$o_$i - b_$i]]);
    let k_$o_$i = exp(h_$o_$i - (a_$o + b_$i));
    var r_$o = exp(max(a_$o, -87.0));
    var c_$i = 1.0;
    var top_r = 1.0;
    var top_c = 1.0;
    for (var s = 0u; s < p.iterations; s++) {
        c_$i = 1.0 / max([[+ o: k_$o_$i * r_$o]], 1e-30);
        let q_$o = 1.0 / max([[+ i: k_$o_$i * c_$i]], 1e-30);
        top_c = max(top_c, [[max i: c_$i]]);
        top_r = max(top_r, [[max o: q_$o]]);
        let still = [[&& o: q_$o == r_$o]];
        r_$o = q_$o;
        if (still) {
            break;
        }
    }
    var y_$o_$i = k_$o_$i * c_$i * r_$o;
    let size_$o = [[max i: abs(h_$o_$i)]];
    let size = [[max o: size_$o]];
    if (size > {{HUGE}}) {
        z[$o * {{N}} + $i] = 0.5 * h_$o_$i;
        for (var s = 0u; s < p.iterations; s++) {
            columns_in_place();
            rows_in_place();
        }
        y_$o_$i = exp(2.0 * max(z[$o * {{N}} + $i], -50.0));
    } else if (top_r > 1e24 / top_c) {
        z[$o * {{N}} + $i] = h_$o_$i;
        a[$o] = 0.0;
        r[$o] = 1.0;
        for (var s = 0u; s < p.iterations; s++) {
            columns();
            rows();
        }
        y_$o_$i = weight($ou, $iu);
    }
{{STORE}}
}
