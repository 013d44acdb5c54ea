//! Sinkhorn-Knopp on the CPU (see `sinkhorn.rs` for the method): [`exact`], one token in f64, which is the
//! oracle and finishes the tokens whose scalings grow too far for f32; and f32 with one token a vector lane.

#![allow(clippy::needless_range_loop)] // several fixed-size arrays walked in step

use bytemuck::Zeroable;
use pulp::{Arch, Simd, WithSimd};

use super::sinkhorn::HUGE;

/// One token in f64.
pub mod exact {
    /// The scalings may grow to this before entries of K lost to underflow count.
    const LIMIT: f64 = 1e290;

    /// Scalings of each iteration in turn, c then r, 2n numbers; K; and r before the first. `None` if they
    /// leave the range in which this is exact.
    fn scalings(h: &[f64], n: usize, iterations: usize) -> Option<(Vec<f64>, Vec<f64>, Vec<f64>)> {
        let b: Vec<f64> = (0..n).map(|i| (0..n).map(|o| h[o * n + i]).fold(f64::MIN, f64::max)).collect();
        let a: Vec<f64> =
            (0..n).map(|o| (0..n).map(|i| h[o * n + i] - b[i]).fold(f64::MIN, f64::max)).collect();
        let k: Vec<f64> = (0..n * n).map(|j| (h[j] - b[j % n] - a[j / n]).exp()).collect();
        let r0: Vec<f64> = a.iter().map(|a| a.exp()).collect();
        let mut tape = Vec::with_capacity(2 * n * iterations);
        let (mut r, mut c) = (r0.clone(), vec![0.0; n]);
        let (mut top_r, mut top_c) = (1f64, 1f64);
        for _ in 0..iterations {
            for i in 0..n {
                c[i] = 1.0 / (0..n).map(|o| k[o * n + i] * r[o]).sum::<f64>();
                top_c = top_c.max(c[i]);
            }
            for o in 0..n {
                r[o] = 1.0 / (0..n).map(|i| k[o * n + i] * c[i]).sum::<f64>();
                top_r = top_r.max(r[o]);
            }
            tape.extend_from_slice(&c);
            tape.extend_from_slice(&r);
        }
        (top_r * top_c <= LIMIT).then_some((tape, k, r0))
    }

    /// The matrix after each half iteration, 2·iterations of them.
    fn matrices(h: &[f64], n: usize, iterations: usize) -> Vec<Vec<f64>> {
        if let Some((tape, k, r0)) = scalings(h, n, iterations) {
            let product = |c: &[f64], r: &[f64]| (0..n * n).map(|j| k[j] * c[j % n] * r[j / n]).collect();
            let mut out = Vec::with_capacity(2 * iterations);
            for s in 0..iterations {
                let (c, r) = tape[2 * n * s..2 * n * (s + 1)].split_at(n);
                let before = if s == 0 { &r0[..] } else { &tape[n * (2 * s - 1)..n * 2 * s] };
                out.push(product(c, before));
                out.push(product(c, r));
            }
            return out;
        }
        let mut z = h.to_vec();
        let mut out = Vec::with_capacity(2 * iterations);
        for half in 0..2 * iterations {
            for j in 0..n {
                let at = |k: usize| if half % 2 == 0 { k * n + j } else { j * n + k };
                let m = (0..n).map(|k| z[at(k)]).fold(f64::MIN, f64::max);
                let s = (0..n).map(|k| (z[at(k)] - m).exp()).sum::<f64>().ln();
                for k in 0..n {
                    // one after the other: beside a large maximum the logarithm would vanish
                    z[at(k)] = (z[at(k)] - m) - s;
                }
            }
            out.push(z.iter().map(|z| z.exp()).collect());
        }
        out
    }

    /// res of one token.
    pub fn forward(h: &[f64], n: usize, iterations: usize) -> Vec<f64> {
        matrices(h, n, iterations).pop().expect("at least one iteration")
    }

    /// dh of one token.
    pub fn backward(h: &[f64], g: &[f64], n: usize, iterations: usize) -> Vec<f64> {
        let steps = matrices(h, n, iterations);
        let mut d = vec![0.0; n * n];
        let last = &steps[2 * iterations - 1];
        for (d, (p, g)) in d.chunks_mut(n).zip(last.chunks(n).zip(g.chunks(n))) {
            // relative to the gradient at the largest entry
            let top = (1..n).fold(0, |m, i| if p[i] > p[m] { i } else { m });
            let s: f64 = p.iter().zip(g).map(|(p, x)| p * (x - g[top])).sum();
            for i in 0..n {
                d[i] = p[i] * ((g[i] - g[top]) - s);
            }
        }
        for (half, p) in steps[..2 * iterations - 1].iter().enumerate().rev() {
            for j in 0..n {
                let at = |k: usize| if half % 2 == 0 { k * n + j } else { j * n + k };
                let s: f64 = (0..n).map(|k| d[at(k)]).sum();
                for k in 0..n {
                    d[at(k)] -= p[at(k)] * s;
                }
            }
        }
        d
    }
}

/// The scalings may grow to this in f32; the product of two sums is then still a normal number.
const LIMIT: f32 = 1e18;
/// The widest vector, in lanes.
const WIDEST: usize = 16;
/// Room for one token a lane.
type Lanes<const N: usize> = [[[f32; WIDEST]; N]; N];

/// Token by token into one lane each; lanes without a token hold zeros.
#[inline(always)]
fn spread<S: Simd, const N: usize>(x: &[f32], buffer: &mut Lanes<N>) -> [[S::f32s; N]; N] {
    if x.len() < S::F32_LANES * N * N {
        *buffer = [[[0.0; WIDEST]; N]; N];
    }
    for (l, token) in x.chunks_exact(N * N).enumerate().take(S::F32_LANES) {
        for o in 0..N {
            for i in 0..N {
                buffer[o][i][l] = token[o * N + i];
            }
        }
    }
    lanes::<S, N>(buffer)
}

#[inline(always)]
fn lanes<S: Simd, const N: usize>(buffer: &Lanes<N>) -> [[S::f32s; N]; N] {
    let mut m = [[S::f32s::zeroed(); N]; N];
    for o in 0..N {
        for i in 0..N {
            m[o][i] = S::as_simd_f32s(&buffer[o][i]).0[0];
        }
    }
    m
}

#[inline(always)]
fn gather<S: Simd, const N: usize>(m: &[[S::f32s; N]; N], y: &mut [f32]) {
    let mut buffer = [[[0f32; WIDEST]; N]; N];
    for o in 0..N {
        for i in 0..N {
            S::as_mut_simd_f32s(&mut buffer[o][i]).0[0] = m[o][i];
        }
    }
    for (l, token) in y.chunks_exact_mut(N * N).enumerate().take(S::F32_LANES) {
        for o in 0..N {
            for i in 0..N {
                token[o * N + i] = buffer[o][i][l];
            }
        }
    }
}

/// 1/x for each, two from one division.
#[inline(always)]
fn recip<S: Simd, const N: usize>(simd: S, x: &mut [S::f32s; N]) {
    let one = simd.splat_f32s(1.0);
    let (pairs, rest) = x.as_chunks_mut::<2>();
    for [a, b] in pairs {
        let inv = simd.div_f32s(one, simd.mul_f32s(*a, *b));
        (*a, *b) = (simd.mul_f32s(inv, *b), simd.mul_f32s(inv, *a));
    }
    for x in rest {
        *x = simd.div_f32s(one, *x);
    }
}

/// c[i] = 1/Σ_o K[o, i] r[o]
#[inline(always)]
fn columns<S: Simd, const N: usize>(simd: S, k: &[[S::f32s; N]; N], r: &[S::f32s; N]) -> [S::f32s; N] {
    let mut c = k[0];
    for c in &mut c {
        *c = simd.mul_f32s(*c, r[0]);
    }
    for o in 1..N {
        for i in 0..N {
            c[i] = simd.mul_add_e_f32s(k[o][i], r[o], c[i]);
        }
    }
    recip(simd, &mut c);
    c
}

/// r[o] = 1/Σ_i K[o, i] c[i]
#[inline(always)]
fn rows<S: Simd, const N: usize>(simd: S, k: &[[S::f32s; N]; N], c: &[S::f32s; N]) -> [S::f32s; N] {
    let mut r = [c[0]; N];
    for o in 0..N {
        r[o] = simd.mul_f32s(k[o][0], c[0]);
        for i in 1..N {
            r[o] = simd.mul_add_e_f32s(k[o][i], c[i], r[o]);
        }
    }
    recip(simd, &mut r);
    r
}

/// Where the iterations of some tokens ended.
struct Scaled<S: Simd, const N: usize> {
    k: [[S::f32s; N]; N],
    r0: [S::f32s; N],
    c: [S::f32s; N],
    r: [S::f32s; N],
    /// Lanes that left the range in which this is exact, a bit each.
    bad: u32,
}

/// Shifts, K, and the iterations; each iteration's scalings (c, r) go on the tape, if there is one, until
/// nothing changes any more.
#[inline(always)]
fn scale<S: Simd, const N: usize>(
    simd: S,
    h: &[f32],
    iterations: usize,
    mut tape: Option<&mut Vec<[[S::f32s; N]; 2]>>,
) -> Scaled<S, N> {
    let mut buffer = [[[0f32; WIDEST]; N]; N];
    let mut x = spread::<S, N>(h, &mut buffer);
    // integers near the maxima: subtracting them is exact
    let magic = simd.splat_f32s(12_582_912.0);
    let mut size = simd.abs_f32s(x[0][0]);
    for x in x.as_flattened() {
        size = simd.max_f32s(simd.abs_f32s(*x), size);
    }
    let mut b = x[0];
    let mut a = x[0];
    for i in 0..N {
        for o in 1..N {
            b[i] = simd.max_f32s(b[i], x[o][i]);
        }
        b[i] = simd.sub_f32s(simd.add_f32s(b[i], magic), magic);
    }
    for o in 0..N {
        a[o] = simd.sub_f32s(x[o][0], b[0]);
        for i in 1..N {
            a[o] = simd.max_f32s(a[o], simd.sub_f32s(x[o][i], b[i]));
        }
        a[o] = simd.sub_f32s(simd.add_f32s(a[o], magic), magic);
        for i in 0..N {
            x[o][i] = simd.sub_f32s(x[o][i], simd.add_f32s(a[o], b[i]));
            S::as_mut_simd_f32s(&mut buffer[o][i]).0[0] = x[o][i];
        }
    }
    let mut first = [[0f32; WIDEST]; N];
    for o in 0..N {
        S::as_mut_simd_f32s(&mut first[o]).0[0] = a[o];
    }
    for x in buffer.as_flattened_mut().as_flattened_mut() {
        *x = crate::ops::Real::exp(*x);
    }
    for x in first.as_flattened_mut() {
        *x = crate::ops::Real::exp(*x);
    }
    let k = lanes::<S, N>(&buffer);
    let mut r0 = a;
    for o in 0..N {
        r0[o] = S::as_simd_f32s(&first[o]).0[0];
    }

    let one = simd.splat_f32s(1.0);
    let (mut top_r, mut top_c) = (one, one);
    let (mut r, mut c) = (r0, r0);
    for s in 0..iterations {
        c = columns(simd, &k, &r);
        let new = rows(simd, &k, &c);
        for o in 0..N {
            // in this order a NaN is dropped, and the infinity that came before it stays
            top_r = simd.max_f32s(new[o], top_r);
            top_c = simd.max_f32s(c[o], top_c);
        }
        let before = r;
        r = new;
        if let Some(t) = &mut tape {
            t.push([c, r]);
        }
        if s % 4 == 3 {
            let mut moved = simd.splat_f32s(0.0);
            for o in 0..N {
                let up = simd.sub_f32s(new[o], before[o]);
                let down = simd.sub_f32s(before[o], new[o]);
                moved = simd.max_f32s(simd.max_f32s(up, down), moved);
            }
            if simd.reduce_max_f32s(moved) == 0.0 {
                break;
            }
        }
    }
    let mut top = [0f32; WIDEST];
    S::as_mut_simd_f32s(&mut top).0[0] = simd.mul_f32s(top_r, top_c);
    let mut sizes = [0f32; WIDEST];
    S::as_mut_simd_f32s(&mut sizes).0[0] = size;
    let mut bad = 0;
    for (l, (t, size)) in top.iter().zip(sizes).enumerate().take(S::F32_LANES) {
        bad |= u32::from(t.is_nan() || *t > LIMIT || size > HUGE) << l;
    }
    Scaled { k, r0, c, r, bad }
}

/// K c r
#[inline(always)]
fn result<S: Simd, const N: usize>(simd: S, s: &Scaled<S, N>) -> [[S::f32s; N]; N] {
    let mut p = s.k;
    for o in 0..N {
        for i in 0..N {
            p[o][i] = simd.mul_f32s(simd.mul_f32s(p[o][i], s.c[i]), s.r[o]);
        }
    }
    p
}

/// Calls `f` for the tokens of the bad lanes.
#[cold]
#[inline(never)]
fn redo(bad: u32, tokens: usize, f: &mut dyn FnMut(usize)) {
    (0..tokens.min(32)).filter(|l| bad >> l & 1 == 1).for_each(f);
}

fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| *x as f64).collect()
}

fn narrow(x: &[f64], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = *x as f32;
    }
}

struct Forward<'a, const N: usize> {
    h: &'a [f32],
    res: &'a mut [f32],
    iterations: usize,
}

impl<const N: usize> WithSimd for Forward<'_, N> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (nn, t) = (N * N, self.iterations);
        let group = S::F32_LANES * nn;
        for (h, y) in self.h.chunks(group).zip(self.res.chunks_mut(group)) {
            let s = scale::<S, N>(simd, h, t, None);
            gather::<S, N>(&result(simd, &s), y);
            if s.bad != 0 {
                redo(s.bad, h.len() / nn, &mut |l| {
                    let at = l * nn..(l + 1) * nn;
                    narrow(&exact::forward(&widen(&h[at.clone()]), N, t), &mut y[at]);
                });
            }
        }
    }
}

struct Backward<'a, const N: usize> {
    h: &'a [f32],
    g: &'a [f32],
    dh: &'a mut [f32],
    iterations: usize,
}

impl<const N: usize> WithSimd for Backward<'_, N> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (nn, t) = (N * N, self.iterations);
        let group = S::F32_LANES * nn;
        let mut tape = Vec::with_capacity(t);
        let mut buffer = [[[0f32; WIDEST]; N]; N];
        for ((h, g), y) in self.h.chunks(group).zip(self.g.chunks(group)).zip(self.dh.chunks_mut(group)) {
            tape.clear();
            let s = scale::<S, N>(simd, h, t, Some(&mut tape));
            let p = result(simd, &s);
            let mut d = spread::<S, N>(g, &mut buffer);
            // the last row step, relative to the gradient at the row's largest entry
            for o in 0..N {
                let (mut top, mut at) = (p[o][0], d[o][0]);
                for i in 1..N {
                    let more = simd.greater_than_f32s(p[o][i], top);
                    at = simd.select_f32s(more, d[o][i], at);
                    top = simd.max_f32s(top, p[o][i]);
                }
                let mut sum = simd.splat_f32s(0.0);
                for i in 0..N {
                    d[o][i] = simd.sub_f32s(d[o][i], at);
                    sum = simd.mul_add_e_f32s(p[o][i], d[o][i], sum);
                }
                for i in 0..N {
                    d[o][i] = simd.mul_f32s(p[o][i], simd.sub_f32s(d[o][i], sum));
                }
            }
            let mut gamma = d[0];
            for o in 1..N {
                for i in 0..N {
                    gamma[i] = simd.add_f32s(gamma[i], d[o][i]);
                }
            }
            // dh = d - K x
            let mut x = [[simd.splat_f32s(0.0); N]; N];
            let last = tape.len() - 1;
            let mut c = &tape[last][0];
            for s_ in (0..t).rev() {
                // iterations after `last` repeat it; iteration s starts from the r of s - 1
                let r = if s_ == 0 { &s.r0 } else { &tape[(s_ - 1).min(last)][1] };
                for i in 0..N {
                    gamma[i] = simd.mul_f32s(gamma[i], c[i]);
                }
                // u = ρ r
                let mut u = *r;
                for o in 0..N {
                    let mut sum = simd.mul_f32s(gamma[0], s.k[o][0]);
                    x[o][0] = simd.mul_add_e_f32s(gamma[0], r[o], x[o][0]);
                    for i in 1..N {
                        x[o][i] = simd.mul_add_e_f32s(gamma[i], r[o], x[o][i]);
                        sum = simd.mul_add_e_f32s(gamma[i], s.k[o][i], sum);
                    }
                    u[o] = simd.mul_f32s(simd.mul_f32s(sum, r[o]), r[o]);
                }
                if s_ == 0 {
                    break;
                }
                c = &tape[(s_ - 1).min(last)][0];
                // u has the sign of -ρ r: x loses it, γ gains it
                for i in 0..N {
                    let mut sum = simd.mul_f32s(u[0], s.k[0][i]);
                    x[0][i] = simd.negate_mul_add_e_f32s(u[0], c[i], x[0][i]);
                    for o in 1..N {
                        x[o][i] = simd.negate_mul_add_e_f32s(u[o], c[i], x[o][i]);
                        sum = simd.mul_add_e_f32s(u[o], s.k[o][i], sum);
                    }
                    gamma[i] = simd.mul_f32s(sum, c[i]);
                }
            }
            for o in 0..N {
                for i in 0..N {
                    d[o][i] = simd.negate_mul_add_e_f32s(s.k[o][i], x[o][i], d[o][i]);
                }
            }
            gather::<S, N>(&d, y);
            if s.bad != 0 {
                redo(s.bad, h.len() / nn, &mut |l| {
                    let at = l * nn..(l + 1) * nn;
                    let d = exact::backward(&widen(&h[at.clone()]), &widen(&g[at.clone()]), N, t);
                    narrow(&d, &mut y[at]);
                });
            }
        }
    }
}

/// res of consecutive tokens.
pub fn forward<const N: usize>(h: &[f32], res: &mut [f32], iterations: usize) {
    Arch::new().dispatch(Forward::<N> { h, res, iterations })
}

/// dh of consecutive tokens.
pub fn backward<const N: usize>(h: &[f32], g: &[f32], dh: &mut [f32], iterations: usize) {
    Arch::new().dispatch(Backward::<N> { h, g, dh, iterations })
}
