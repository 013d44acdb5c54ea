// Gradient of Sinkhorn-Knopp: repeats the iterations of sinkhorn.wgsl, keeps the row scalings of each on
// chip, and goes back through them: rho, gamma are the adjoints of ln r, ln c. See ops/sinkhorn.rs.
struct P {
    tokens : u32,
    iterations : u32,
    pad0 : u32,
    pad1 : u32,
}
@group(0) @binding(0) var<storage, read> h : array<{{ELEM}}>;
@group(0) @binding(1) var<storage, read> g : array<{{ELEM}}>;
@group(0) @binding(2) var<storage, read_write> y : array<{{ELEM}}>;
@group(0) @binding(3) var<uniform> p : P;

const N : u32 = {{N}}u;
var<private> tape_r : array<f32, {{TAPE}}>; // r before the first iteration and after each
var<private> tape_a : array<f32, {{TAPE}}>; // the integers beside them, in the log domain only
var<private> z : array<f32, {{NN}}>;
var<private> w : array<f32, {{NN}}>; // z on its way, for huge logits
var<private> d : array<f32, {{NN}}>;
var<private> b : array<f32, {{N}}>;
var<private> c : array<f32, {{N}}>;

// column potentials b - ln c from the row potentials of iteration s
fn columns(s : u32) {
    let at = s * N;
    for (var i = 0u; i < N; i++) {
        var m = z[i] - tape_a[at];
        for (var o = 1u; o < N; o++) {
            m = max(m, z[o * N + i] - tape_a[at + o]);
        }
        m = round(m);
        var t = 0.0;
        for (var o = 0u; o < N; o++) {
            t += exp(z[o * N + i] - (tape_a[at + o] + m)) * tape_r[at + o];
        }
        let e = round(-log(t)); // any integer near it will do
        c[i] = exp(-e) / t;
        b[i] = m - e;
    }
}

// row potentials of iteration s from the column potentials
fn rows(s : u32) {
    let at = s * N;
    for (var o = 0u; o < N; o++) {
        var m = z[o * N] - b[0];
        for (var i = 1u; i < N; i++) {
            m = max(m, z[o * N + i] - b[i]);
        }
        m = round(m);
        var t = 0.0;
        for (var i = 0u; i < N; i++) {
            t += exp(z[o * N + i] - (b[i] + m)) * c[i];
        }
        let e = round(-log(t));
        tape_r[at + o] = exp(-e) / t;
        tape_a[at + o] = m - e;
    }
}

fn weight(s : u32, o : u32, i : u32) -> f32 {
    return exp(z[o * N + i] - (tape_a[s * N + o] + b[i])) * (tape_r[s * N + o] * c[i]);
}

// z holds h, d the incoming gradient; leaves dh in d
fn log_domain(iterations : u32) {
    for (var o = 0u; o < N; o++) {
        tape_a[o] = 0.0;
        tape_r[o] = 1.0;
    }
    for (var s = 0u; s < iterations; s++) {
        columns(s);
        rows(s + 1u);
    }
    var gamma : array<f32, {{N}}>;
    var rho : array<f32, {{N}}>;
    for (var o = 0u; o < N; o++) {
        var top = weight(iterations, o, 0u);
        var zero = d[o * N];
        for (var i = 1u; i < N; i++) {
            let w = weight(iterations, o, i);
            if (w > top) {
                top = w;
                zero = d[o * N + i];
            }
        }
        var t = 0.0;
        for (var i = 0u; i < N; i++) {
            t += weight(iterations, o, i) * (d[o * N + i] - zero);
        }
        for (var i = 0u; i < N; i++) {
            let v = weight(iterations, o, i) * ((d[o * N + i] - zero) - t);
            d[o * N + i] = v;
            gamma[i] += v;
        }
    }
    for (var s = iterations; s > 0u; s--) {
        // b, c are the columns of iteration s, made from the rows of s - 1
        for (var o = 0u; o < N; o++) {
            rho[o] = 0.0;
            for (var i = 0u; i < N; i++) {
                let v = gamma[i] * weight(s - 1u, o, i);
                d[o * N + i] -= v;
                rho[o] -= v;
            }
        }
        if (s == 1u) {
            break;
        }
        columns(s - 2u);
        for (var i = 0u; i < N; i++) {
            gamma[i] = 0.0;
            for (var o = 0u; o < N; o++) {
                let v = rho[o] * weight(s - 1u, o, i);
                d[o * N + i] -= v;
                gamma[i] -= v;
            }
        }
    }
}

{{HALF_STEP}}
// leaves in w the matrix after so many half iterations
fn replay(halves : u32) {
    w[$o * {{N}} + $i] = 0.5 * z[$o * {{N}} + $i];
    for (var s = 0u; s < halves; s++) {
        if (s % 2u == 0u) {
            columns_in_place();
        } else {
            rows_in_place();
        }
    }
    w[$o * {{N}} + $i] = exp(2.0 * max(w[$o * {{N}} + $i], -50.0));
}

// the same from the matrices themselves, each made anew: few tokens ever come here
fn huge_logits(iterations : u32) {
    replay(2u * iterations);
    for (var o = 0u; o < N; o++) {
        var top = o * N;
        for (var i = 1u; i < N; i++) {
            top = select(top, o * N + i, w[o * N + i] > w[top]);
        }
        let zero = d[top];
        var t = 0.0;
        for (var i = 0u; i < N; i++) {
            d[o * N + i] -= zero;
            t += w[o * N + i] * d[o * N + i];
        }
        for (var i = 0u; i < N; i++) {
            d[o * N + i] = w[o * N + i] * (d[o * N + i] - t);
        }
    }
    for (var s = 2u * iterations - 1u; s > 0u; s--) {
        replay(s);
        for (var j = 0u; j < N; j++) {
            // of an odd number of halves the last was one of columns
            let first = select(j * N, j, s % 2u == 1u);
            let stride = select(1u, N, s % 2u == 1u);
            var t = 0.0;
            for (var k = 0u; k < N; k++) {
                t += d[first + k * stride];
            }
            for (var k = 0u; k < N; k++) {
                d[first + k * stride] -= w[first + k * stride] * t;
            }
        }
    }
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
    let at = t * {{STRIDE}}u;
{{LOAD_H}}
{{LOAD_G}}
    let b_$i = round([[max o: h_$o_$i]]);
    let a_$o = round([[max i: h_$o_$i - b_$i]]);
    let k_$o_$i = exp(h_$o_$i - (a_$o + b_$i));
    var r_$o = exp(max(a_$o, -87.0));
    var c_$i = 1.0;
    tape_r[$o] = r_$o;
    var top_r = 1.0;
    var top_c = 1.0;
    var last = 0u; // the tape's last entry; later iterations repeat it
    for (var s = 1u; s <= p.iterations; s++) {
        c_$i = 1.0 / max([[+ o: k_$o_$i * r_$o]], 1e-30);
        let q_$o = 1.0 / max([[+ i: k_$o_$i * c_$i]], 1e-30);
        top_c = max(top_c, [[max i: c_$i]]);
        top_r = max(top_r, [[max o: q_$o]]);
        let still = [[&& o: q_$o == r_$o]];
        r_$o = q_$o;
        tape_r[s * N + $ou] = r_$o;
        last = s;
        if (still) {
            break;
        }
    }
    let size_$o = [[max i: abs(h_$o_$i)]];
    let size = [[max o: size_$o]];
    if (size > {{HUGE}} || top_r > 1e24 / top_c) {
        z[$o * {{N}} + $i] = h_$o_$i;
        d[$o * {{N}} + $i] = g_$o_$i;
        if (size > {{HUGE}}) {
            huge_logits(p.iterations);
        } else {
            log_domain(p.iterations);
        }
        let y_$o_$i = d[$o * {{N}} + $i];
{{STORE}}
        return;
    }
    // the last row step, relative to the gradient at the row's largest entry
    let w_$o_$i = k_$o_$i * c_$i * r_$o;
    var top_$o = w_$o_0;
    var zero_$o = g_$o_0;
    zero_$o = select(zero_$o, g_$o_$i, w_$o_$i > top_$o); top_$o = max(top_$o, w_$o_$i);
    let e_$o_$i = g_$o_$i - zero_$o;
    let sum_$o = [[+ i: w_$o_$i * e_$o_$i]];
    let d_$o_$i = w_$o_$i * (e_$o_$i - sum_$o);
    var gamma_$i = [[+ o: d_$o_$i]];
    var x_$o_$i = 0.0; // dh = d - K x
    for (var s = p.iterations; s > 0u; s--) {
        // here c is that of iteration s, r becomes that of s - 1
        let v_$i = gamma_$i * c_$i;
        r_$o = tape_r[min(s - 1u, last) * N + $ou];
        x_$o_$i += v_$i * r_$o;
        if (s == 1u) {
            break;
        }
        let u_$o = -([[+ i: v_$i * k_$o_$i]]) * r_$o * r_$o;
        if (s - 1u <= last) {
            let before = (s - 2u) * N;
            let f_$o = tape_r[before + $ou];
            c_$i = 1.0 / max([[+ o: k_$o_$i * f_$o]], 1e-30);
        }
        x_$o_$i += u_$o * c_$i;
        gamma_$i = -([[+ o: u_$o * k_$o_$i]]) * c_$i;
    }
    let y_$o_$i = d_$o_$i - k_$o_$i * x_$o_$i;
{{STORE}}
}
