//! `sinkhorn`: the Sinkhorn-Knopp projection of math.md section 4 (mHC, arXiv 2512.24880 eqs. 8 and 9).
//!
//! `h[.., n, n] → res[.., n, n]`, n = 1 to 8. With z = h, t times: z[·, i] -= logsumexp_o z[o, i] (columns),
//! then z[o, ·] -= logsumexp_i z[o, i] (rows); res = e^z. No ε: row sums are 1 to rounding for every t.
//! The gradient is that of the t iterations, which the backward kernel repeats instead of storing.
//!
//! How: with integers A[o], B[i] near the maxima of rows and columns (subtracting them from h is exact), the
//! matrix K = exp(h - A - B) is made once, and only its scalings are iterated,
//! c[i] = 1/Σ_o K[o, i] r[o], r[o] = 1/Σ_i K[o, i] c[i], from r = e^A; res = r K c. That costs n² exponentials
//! instead of 2tn². It is exact while no scaling has grown so far that entries of K lost to underflow would
//! count; tokens where one has are done again with potentials in the log domain: an integer and a factor near
//! 1 each, new exponentials each half iteration. Both stop when an iteration has changed nothing at all.
//!
//! Backward, in the potentials ln r, ln c: with P = r K c after a row step, ρ[o] the adjoint of ln r[o]:
//! dh -= ρ[o] P and γ[i] = -Σ_o ρ[o] P[o, i]; columns alike. The first row step subtracts from the incoming
//! gradient its value at the row's largest entry (res sums to 1 over a row, so that changes nothing): near the
//! identity the plain form cancels and loses a factor of 1 / (off-diagonal mass).

use super::cpu::par_rows;
use super::streams::{MAX_STREAMS, load_matrix, store_matrix, unroll};
use super::{Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp};
use crate::gpu::kernel::{Bind, Kernel, fold_groups};
use crate::graph::{Graph, Shape, Tensor};
use crate::{by_streams, cpu_both};

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Sinkhorn {
    n: usize,
    iterations: usize,
}

/// Gradient of [`Sinkhorn`]: inputs h, dres; output dh.
#[derive(Clone, Debug)]
pub struct SinkhornGrad {
    n: usize,
    iterations: usize,
}

/// Tokens that advance together, one a lane.
const L: usize = 16;
type V<T> = [T; L];
type Vector<T, const N: usize> = [V<T>; N];
type Matrix<T, const N: usize> = [[V<T>; N]; N];

/// The scalings may grow to this: what underflow took from K then stays below rounding.
fn limit<T: Real>() -> T {
    T::of(if size_of::<T>() == 4 { 1e24 } else { 1e290 })
}

/// Round to an integer, vectorisable.
#[inline(always)]
fn round<T: Real>(x: T) -> T {
    let magic = T::of(if size_of::<T>() == 4 { 12_582_912.0 } else { 6_755_399_441_055_744.0 });
    x + magic - magic
}

/// Sixteen tokens, one a lane; lanes beyond `tokens` hold zeros.
#[inline(always)]
fn load<T: Real, const N: usize>(x: &[T]) -> Matrix<T, N> {
    let mut m = [[[T::ZERO; L]; N]; N];
    for (l, token) in x.chunks_exact(N * N).take(L).enumerate() {
        for o in 0..N {
            for i in 0..N {
                m[o][i][l] = token[o * N + i];
            }
        }
    }
    m
}

#[inline(always)]
fn store<T: Real, const N: usize>(m: &Matrix<T, N>, y: &mut [T]) {
    for (l, token) in y.chunks_exact_mut(N * N).take(L).enumerate() {
        for o in 0..N {
            for i in 0..N {
                token[o * N + i] = m[o][i][l];
            }
        }
    }
}

/// c[i] = 1/Σ_o K[o, i] r[o]
#[inline(always)]
fn columns<T: Real, const N: usize>(k: &Matrix<T, N>, r: &Vector<T, N>) -> Vector<T, N> {
    let mut c = [[T::ZERO; L]; N];
    for o in 0..N {
        for i in 0..N {
            for l in 0..L {
                c[i][l] += k[o][i][l] * r[o][l];
            }
        }
    }
    for c in &mut c {
        for c in c {
            *c = T::ONE / *c;
        }
    }
    c
}

/// r[o] = 1/Σ_i K[o, i] c[i]
#[inline(always)]
fn rows<T: Real, const N: usize>(k: &Matrix<T, N>, c: &Vector<T, N>) -> Vector<T, N> {
    let mut r = [[T::ZERO; L]; N];
    for o in 0..N {
        for i in 0..N {
            for l in 0..L {
                r[o][l] += k[o][i][l] * c[i][l];
            }
        }
    }
    for r in &mut r {
        for r in r {
            *r = T::ONE / *r;
        }
    }
    r
}

/// One iteration's scalings: (c, r).
type Step<T, const N: usize> = (Vector<T, N>, Vector<T, N>);

/// K and r before the first iteration.
#[inline(always)]
fn start<T: Real, const N: usize>(h: &Matrix<T, N>) -> (Matrix<T, N>, Vector<T, N>) {
    let mut b = h[0];
    for row in &h[1..] {
        for i in 0..N {
            for l in 0..L {
                b[i][l] = b[i][l].max(row[i][l]);
            }
        }
    }
    for b in &mut b {
        for b in b {
            *b = round(*b);
        }
    }
    let mut k = *h;
    let mut r = [[T::ZERO; L]; N];
    for o in 0..N {
        let mut a = [T::ZERO; L];
        for l in 0..L {
            a[l] = h[o][0][l] - b[0][l];
        }
        for i in 1..N {
            for l in 0..L {
                a[l] = a[l].max(h[o][i][l] - b[i][l]);
            }
        }
        for l in 0..L {
            a[l] = round(a[l]);
            r[o][l] = a[l].exp();
        }
        for i in 0..N {
            for l in 0..L {
                k[o][i][l] = (h[o][i][l] - (a[l] + b[i][l])).exp();
            }
        }
    }
    (k, r)
}

/// Iterates the scalings. `each` sees every iteration's (until nothing changes any more). Returns the last,
/// and whether no lane left the range in which this is exact.
#[inline(always)]
fn iterate<T: Real, const N: usize>(
    k: &Matrix<T, N>,
    r0: Vector<T, N>,
    iterations: usize,
    mut each: impl FnMut(&Step<T, N>),
) -> (Step<T, N>, bool) {
    let mut r = r0;
    let mut c = r0;
    let (mut top_r, mut top_c) = ([T::ONE; L], [T::ONE; L]);
    for _ in 0..iterations {
        c = columns(k, &r);
        let new = rows(k, &c);
        let mut moved = [T::ZERO; L];
        for o in 0..N {
            for l in 0..L {
                moved[l] = moved[l].max((new[o][l] - r[o][l]).abs());
                // in this order a NaN is dropped; the infinity that came before it stays
                top_r[l] = new[o][l].max(top_r[l]);
                top_c[l] = c[o][l].max(top_c[l]);
            }
        }
        r = new;
        each(&(c, r));
        if moved.iter().all(|m| *m == T::ZERO) {
            break;
        }
    }
    let good = (0..L).fold(true, |g, l| g & (top_r[l] * top_c[l] <= limit::<T>()));
    ((c, r), good)
}

/// Potentials in the log domain: `p = int - ln(factor)`, factor near 1.
#[derive(Clone, Copy)]
struct Potential<T, const N: usize> {
    int: Vector<T, N>,
    factor: Vector<T, N>,
}

/// One half iteration in the log domain: the column potentials from the row potentials (`COLUMNS`), or the
/// reverse.
#[inline(always)]
fn half<T: Real, const N: usize, const COLUMNS: bool>(
    h: &Matrix<T, N>,
    p: &Potential<T, N>,
) -> Potential<T, N> {
    let mut q = Potential { int: [[T::ZERO; L]; N], factor: [[T::ZERO; L]; N] };
    for j in 0..N {
        let z = |k: usize, l: usize| if COLUMNS { h[k][j][l] } else { h[j][k][l] };
        let mut m = [T::ZERO; L];
        for l in 0..L {
            m[l] = z(0, l) - p.int[0][l];
        }
        for k in 1..N {
            for l in 0..L {
                m[l] = m[l].max(z(k, l) - p.int[k][l]);
            }
        }
        let mut s = [T::ZERO; L];
        for m in &mut m {
            *m = round(*m);
        }
        for k in 0..N {
            for l in 0..L {
                s[l] += (z(k, l) - (p.int[k][l] + m[l])).exp() * p.factor[k][l];
            }
        }
        for l in 0..L {
            let f = T::ONE / s[l];
            // about ln f, from its binary exponent; any integer near it will do
            let e = ((f.f64().to_bits() >> 52) & 0x7ff) as f64 - 1023.0;
            let e = round(T::of(e * std::f64::consts::LN_2));
            q.factor[j][l] = f * (-e).exp();
            q.int[j][l] = m[l] - e;
        }
    }
    q
}

/// exp(h - A - B) r c
#[inline(always)]
fn normalized<T: Real, const N: usize>(
    h: &Matrix<T, N>,
    row: &Potential<T, N>,
    col: &Potential<T, N>,
) -> Matrix<T, N> {
    let mut p = *h;
    for o in 0..N {
        for i in 0..N {
            for l in 0..L {
                p[o][i][l] = (h[o][i][l] - (row.int[o][l] + col.int[i][l])).exp()
                    * (row.factor[o][l] * col.factor[i][l]);
            }
        }
    }
    p
}

/// Row potentials before the first iteration: all 0.
fn zero<T: Real, const N: usize>() -> Potential<T, N> {
    Potential { int: [[T::ZERO; L]; N], factor: [[T::ONE; L]; N] }
}

#[inline(never)]
fn forward_log<T: Real, const N: usize>(h: &Matrix<T, N>, iterations: usize) -> Matrix<T, N> {
    super::real::simd(
        #[inline(always)]
        || {
            let mut row = zero();
            let mut col = row;
            for _ in 0..iterations {
                col = half::<T, N, true>(h, &row);
                row = half::<T, N, false>(h, &col);
            }
            normalized(h, &row, &col)
        },
    )
}

/// P ⊙ (G - Σ_i P G): the gradient behind the last row step.
#[inline(always)]
fn last_row_step<T: Real, const N: usize>(p: &Matrix<T, N>, g: &Matrix<T, N>) -> Matrix<T, N> {
    let mut d = *g;
    for o in 0..N {
        let (mut top, mut at) = (p[o][0], g[o][0]);
        for i in 1..N {
            for l in 0..L {
                let more = p[o][i][l] > top[l];
                at[l] = if more { g[o][i][l] } else { at[l] };
                top[l] = if more { p[o][i][l] } else { top[l] };
            }
        }
        let mut s = [T::ZERO; L];
        for i in 0..N {
            for l in 0..L {
                d[o][i][l] = g[o][i][l] - at[l];
                s[l] += p[o][i][l] * d[o][i][l];
            }
        }
        for i in 0..N {
            for l in 0..L {
                d[o][i][l] = p[o][i][l] * (d[o][i][l] - s[l]);
            }
        }
    }
    d
}

#[inline(always)]
fn column_sums<T: Real, const N: usize>(d: &Matrix<T, N>) -> Vector<T, N> {
    let mut s = [[T::ZERO; L]; N];
    for o in 0..N {
        for i in 0..N {
            for l in 0..L {
                s[i][l] += d[o][i][l];
            }
        }
    }
    s
}

#[inline(never)]
fn backward_log<T: Real, const N: usize>(
    h: &Matrix<T, N>,
    g: &Matrix<T, N>,
    iterations: usize,
) -> Matrix<T, N> {
    super::real::simd(
        #[inline(always)]
        || {
            let mut tape = vec![zero::<T, N>()];
            for _ in 0..iterations {
                let col = half::<T, N, true>(h, &tape[tape.len() - 1]);
                tape.push(col);
                tape.push(half::<T, N, false>(h, &col));
            }
            let p = normalized(h, &tape[2 * iterations], &tape[2 * iterations - 1]);
            let mut d = last_row_step(&p, g);
            let mut gamma = column_sums(&d);
            for s in (0..iterations).rev() {
                let q = normalized(h, &tape[2 * s], &tape[2 * s + 1]);
                let mut rho = [[T::ZERO; L]; N];
                for o in 0..N {
                    for i in 0..N {
                        for l in 0..L {
                            let x = gamma[i][l] * q[o][i][l];
                            d[o][i][l] -= x;
                            rho[o][l] -= x;
                        }
                    }
                }
                if s == 0 {
                    break;
                }
                let p = normalized(h, &tape[2 * s], &tape[2 * s - 1]);
                gamma = [[T::ZERO; L]; N];
                for o in 0..N {
                    for i in 0..N {
                        for l in 0..L {
                            let x = rho[o][l] * p[o][i][l];
                            d[o][i][l] -= x;
                            gamma[i][l] -= x;
                        }
                    }
                }
            }
            d
        },
    )
}

/// res of consecutive tokens.
#[inline(always)]
fn forward<T: Real, const N: usize>(h: &[T], res: &mut [T], iterations: usize) {
    if N == 1 {
        return res.fill(T::ONE);
    }
    for (h, res) in h.chunks(L * N * N).zip(res.chunks_mut(L * N * N)) {
        let h = load::<T, N>(h);
        let (mut m, r0) = start(&h);
        let ((c, r), good) = iterate(&m, r0, iterations, |_| {});
        if good {
            for o in 0..N {
                for i in 0..N {
                    for l in 0..L {
                        m[o][i][l] = m[o][i][l] * c[i][l] * r[o][l];
                    }
                }
            }
            store(&m, res);
        } else {
            store(&forward_log(&h, iterations), res);
        }
    }
}

/// dh of consecutive tokens.
#[inline(always)]
fn backward<T: Real, const N: usize>(h: &[T], g: &[T], dh: &mut [T], iterations: usize) {
    if N == 1 {
        return dh.fill(T::ZERO);
    }
    let mut tape: Vec<Step<T, N>> = Vec::with_capacity(iterations);
    let group = L * N * N;
    for ((h, g), dh) in h.chunks(group).zip(g.chunks(group)).zip(dh.chunks_mut(group)) {
        let (h, g) = (load::<T, N>(h), load::<T, N>(g));
        let (k, r0) = start(&h);
        tape.clear();
        let ((c, r), good) = iterate(&k, r0, iterations, |s| tape.push(*s));
        if !good {
            store(&backward_log(&h, &g, iterations), dh);
            continue;
        }
        let mut p = k;
        for o in 0..N {
            for i in 0..N {
                for l in 0..L {
                    p[o][i][l] = k[o][i][l] * c[i][l] * r[o][l];
                }
            }
        }
        let mut d = last_row_step(&p, &g);
        let mut gamma = column_sums(&d);
        // dh = d - K ⊙ x
        let mut x = [[[T::ZERO; L]; N]; N];
        let last = tape.len() - 1;
        for s in (0..iterations).rev() {
            // iterations after `last` repeat it: iteration s starts from the r of iteration s - 1
            let (c, _) = &tape[s.min(last)];
            let r = if s == 0 { &r0 } else { &tape[(s - 1).min(last)].1 };
            for i in 0..N {
                for l in 0..L {
                    gamma[i][l] = gamma[i][l] * c[i][l];
                }
            }
            let mut rho = [[T::ZERO; L]; N];
            for o in 0..N {
                for i in 0..N {
                    for l in 0..L {
                        x[o][i][l] += gamma[i][l] * r[o][l];
                        rho[o][l] += gamma[i][l] * k[o][i][l];
                    }
                }
            }
            if s == 0 {
                break;
            }
            // rho is -ρ/r here; ρ·r follows, then γ of the iteration before
            for o in 0..N {
                for l in 0..L {
                    rho[o][l] = -(rho[o][l] * r[o][l] * r[o][l]);
                }
            }
            let c = &tape[(s - 1).min(last)].0;
            gamma = [[T::ZERO; L]; N];
            for o in 0..N {
                for i in 0..N {
                    for l in 0..L {
                        x[o][i][l] += rho[o][l] * c[i][l];
                        gamma[i][l] -= rho[o][l] * k[o][i][l];
                    }
                }
            }
            for i in 0..N {
                for l in 0..L {
                    gamma[i][l] = gamma[i][l] * c[i][l];
                }
            }
        }
        for o in 0..N {
            for i in 0..N {
                for l in 0..L {
                    d[o][i][l] -= k[o][i][l] * x[o][i][l];
                }
            }
        }
        store(&d, dh);
    }
}

impl Sinkhorn {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (n, t) = (self.n, self.iterations);
        let h = c.input(0);
        let res = c.output(0);
        par_rows(res, n * n, |first, res| {
            let h = &h[first * n * n..][..res.len()];
            by_streams!(n, forward::<T>(h, res, t))
        });
    }
}

impl SinkhornGrad {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (n, t) = (self.n, self.iterations);
        let (h, g) = (c.input(0), c.input(1));
        let dh = c.output(0);
        par_rows(dh, n * n, |first, dh| {
            let at = first * n * n;
            let (h, g) = (&h[at..][..dh.len()], &g[at..][..dh.len()]);
            by_streams!(n, backward::<T>(h, g, dh, t))
        });
    }
}

fn launch(
    label: &'static str,
    template: &str,
    n: usize,
    iterations: usize,
    tokens: usize,
    bindings: Vec<Bind>,
) -> GpuLaunch {
    let source = template
        .replace("{{LOAD_H}}", &load_matrix("h", "h", n))
        .replace("{{LOAD_G}}", &load_matrix("g", "g", n))
        .replace("{{STORE}}", &store_matrix("y", "y", n))
        .replace("{{ELEM}}", if n.is_multiple_of(4) { "vec4<f32>" } else { "f32" })
        .replace("{{STRIDE}}", &if n.is_multiple_of(4) { n * n / 4 } else { n * n }.to_string())
        .replace("{{NN}}", &(n * n).to_string())
        .replace("{{TAPE}}", &((iterations + 1) * n).to_string());
    Kernel {
        label: label.into(),
        source: unroll(&source, n).into(),
        entry: "main",
        constants: vec![],
        bindings,
        params: bytemuck::cast_slice(&[tokens as u32, iterations as u32, 0, 0]).to_vec(),
        groups: fold_groups(tokens.div_ceil(64) as u64),
    }
    .into()
}

impl Op for Sinkhorn {
    fn name(&self) -> &'static str {
        "sinkhorn"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        vec![inputs[0]]
    }

    fn flops(&self, inputs: &[Shape], _: &[Shape]) -> f64 {
        let n = self.n as f64;
        inputs[0].len() as f64 * (3.0 + self.iterations as f64 * (4.0 + 2.0 / n))
    }

    fn vjp(&self, g: &mut Graph, v: &Vjp<'_>) -> Vec<Option<Tensor>> {
        let dres = v.grads[0].expect("called with a gradient");
        let op = SinkhornGrad { n: self.n, iterations: self.iterations };
        vec![Some(g.push(op, &[v.inputs[0], dres]))]
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let tokens = r.inputs[0].len() / (self.n * self.n);
        let text = include_str!("../../shaders/sinkhorn.wgsl");
        launch("sinkhorn", text, self.n, self.iterations, tokens, vec![Bind::In(0), Bind::Out(0)])
    }
}

impl Op for SinkhornGrad {
    fn name(&self) -> &'static str {
        "sinkhorn_grad"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        assert_eq!(inputs[0].len(), inputs[1].len());
        vec![inputs[0]]
    }

    fn flops(&self, inputs: &[Shape], _: &[Shape]) -> f64 {
        let n = self.n as f64;
        inputs[0].len() as f64 * (12.0 + self.iterations as f64 * (12.0 + 6.0 / n))
    }

    fn vjp(&self, _: &mut Graph, _: &Vjp<'_>) -> Vec<Option<Tensor>> {
        unreachable!("second derivatives are not needed")
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let tokens = r.inputs[0].len() / (self.n * self.n);
        let text = include_str!("../../shaders/sinkhorn_grad.wgsl");
        let bind = vec![Bind::In(0), Bind::In(1), Bind::Out(0)];
        launch("sinkhorn_grad", text, self.n, self.iterations, tokens, bind)
    }
}

impl Graph {
    /// Sinkhorn-Knopp over the last two axes: `h[.., n, n] → res[.., n, n]`, row index = output stream.
    ///
    /// # Panics
    /// If the last two axes differ or are not in 1..=8, or there are no iterations.
    pub fn sinkhorn(&mut self, h: Tensor, iterations: usize) -> Tensor {
        let d = h.shape().dims();
        let n = h.shape().last();
        assert!(
            d.len() >= 2 && d[d.len() - 2] == n && n <= MAX_STREAMS,
            "sinkhorn of {}: the last two axes are n x n with n in 1..=8",
            h.shape()
        );
        assert!(iterations >= 1, "sinkhorn needs at least one iteration");
        self.push(Sinkhorn { n, iterations }, &[h])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::tests::{check_vjp_at, noise};
    use crate::ops::cpu::Slot;

    /// The definition, one token, f64: (res, gradient for cotangent g).
    fn naive(h: &[f64], g: &[f64], n: usize, t: usize) -> (Vec<f64>, Vec<f64>) {
        let mut z = h.to_vec();
        let mut tape = vec![];
        for _ in 0..t {
            for axis in 0..2 {
                for j in 0..n {
                    let at = |k: usize| if axis == 0 { k * n + j } else { j * n + k };
                    let m = (0..n).map(|k| z[at(k)]).fold(f64::MIN, f64::max);
                    let s = m + (0..n).map(|k| (z[at(k)] - m).exp()).sum::<f64>().ln();
                    (0..n).for_each(|k| z[at(k)] -= s);
                }
                tape.push(z.iter().map(|z| z.exp()).collect::<Vec<_>>());
            }
        }
        let res: Vec<f64> = z.iter().map(|z| z.exp()).collect();
        let mut d: Vec<f64> = res.iter().zip(g).map(|(p, g)| p * g).collect();
        for (k, p) in tape.iter().enumerate().rev() {
            for j in 0..n {
                let at = |m: usize| if k % 2 == 0 { m * n + j } else { j * n + m };
                let s: f64 = (0..n).map(|m| d[at(m)]).sum();
                (0..n).for_each(|m| d[at(m)] -= p[at(m)] * s);
            }
        }
        (res, d)
    }

    fn run<T: Real>(h: &[T], g: &[T], n: usize, t: usize) -> (Vec<T>, Vec<T>) {
        let (mut res, mut dh) = (vec![T::ZERO; h.len()], vec![T::ZERO; h.len()]);
        let slot = |x: &[T]| Slot::F(x.as_ptr() as *mut T, x.len());
        // SAFETY: the buffers live through the calls and do not overlap.
        let mut c = unsafe { Cpu::new(vec![slot(h)], vec![Slot::F(res.as_mut_ptr(), res.len())]) };
        Sinkhorn { n, iterations: t }.run(&mut c);
        // SAFETY: as above.
        let mut c = unsafe { Cpu::new(vec![slot(h), slot(g)], vec![Slot::F(dh.as_mut_ptr(), dh.len())]) };
        SinkhornGrad { n, iterations: t }.run(&mut c);
        (res, dh)
    }

    /// Logits of one kind for `tokens` tokens.
    fn logits(kind: usize, n: usize, tokens: usize) -> Vec<f64> {
        let x = noise(tokens * n * n, 3 + kind as u64 + 10 * n as u64);
        let diag = |k: usize| if (k % (n * n)).is_multiple_of(n + 1) { 0.0 } else { -6.0 };
        x.iter()
            .enumerate()
            .map(|(k, x)| match kind {
                0 => *x,
                1 => 8.0 * x,
                2 => 80.0 * x,
                3 => 100.0 * x,
                // near the identity, as trained models are
                4 => diag(k) + 0.3 * x,
                _ => 0.0,
            })
            .map(|x| x as f32 as f64)
            .collect()
    }

    #[test]
    fn equals_the_definition_in_both_precisions() {
        for n in 1..=8 {
            for t in [1, 2, 3, 20] {
                for kind in 0..6 {
                    let tokens = if kind == 3 { 400 } else { 37 };
                    let h = logits(kind, n, tokens);
                    let g: Vec<f64> = noise(h.len(), 9).iter().map(|x| *x as f32 as f64).collect();
                    let nn = n * n;
                    let (mut res, mut dh) = (vec![], vec![]);
                    for (h, g) in h.chunks(nn).zip(g.chunks(nn)) {
                        let (r, d) = naive(h, g, n, t);
                        res.extend(r);
                        dh.extend(d);
                    }
                    let single = |x: &[f64]| x.iter().map(|x| *x as f32).collect::<Vec<_>>();
                    let (r64, d64) = run(&h, &g, n, t);
                    let (r32, d32) = run(&single(&h), &single(&g), n, t);
                    let top = dh.iter().fold(1e-30f64, |m, x| m.max(x.abs()));
                    for k in 0..h.len() {
                        let what = format!("n {n}, t {t}, kind {kind}, element {k}");
                        assert!((r64[k] - res[k]).abs() < 1e-12, "{what}: {} {}", r64[k], res[k]);
                        assert!((d64[k] - dh[k]).abs() < 1e-12, "{what}: {} {}", d64[k], dh[k]);
                        assert!((r32[k] as f64 - res[k]).abs() < 2e-6, "{what}: {} {}", r32[k], res[k]);
                        let e = (d32[k] as f64 - dh[k]).abs();
                        assert!(e < 2e-6 * top.max(1e-30), "{what}: {} {} of {top}", d32[k], dh[k]);
                    }
                    for row in r32.chunks(n) {
                        let s: f64 = row.iter().map(|x| *x as f64).sum();
                        assert!((s - 1.0).abs() < 5e-7, "n {n}, t {t}, kind {kind}: a row sums to {s}");
                    }
                }
            }
        }
    }

    #[test]
    fn rows_come_last_and_index_the_output() {
        // row sums are 1 at every t; column sums are not: that pins the order
        let h: Vec<f64> = logits(1, 4, 1);
        for t in 1..=3 {
            let (r, _) = run(&h, &h, 4, t);
            for o in 0..4 {
                assert!((r[4 * o..4 * o + 4].iter().sum::<f64>() - 1.0).abs() < 1e-14);
            }
            let worst = (0..4)
                .map(|i| ((0..4).map(|o| r[4 * o + i]).sum::<f64>() - 1.0).abs())
                .fold(0.0, f64::max);
            assert!(worst > 1e-3, "column sums of a truncated iteration are not 1: {worst}");
        }
        // orientation, by hand at n = 2, t = 1: h = [[ln 3, 0], [0, 0]]; columns (3/4, 1/4), (1/2, 1/2)
        let (r, _) = run(&[3f64.ln(), 0.0, 0.0, 0.0], &[0.0; 4], 2, 1);
        for (got, want) in r.iter().zip([0.6, 0.4, 1.0 / 3.0, 2.0 / 3.0]) {
            assert!((got - want).abs() < 1e-15, "{r:?}");
        }
        // one stream: exactly 1
        assert_eq!(run(&[-3.7f32, 80.0], &[1.0, 2.0], 1, 20), (vec![1.0, 1.0], vec![0.0, 0.0]));
    }

    #[test]
    fn gradients_near_the_identity_keep_their_digits() {
        // off-diagonal mass e^-10: the plain form would be wrong by 1e-3 of the largest entry
        let n = 4;
        let h: Vec<f64> = noise(64 * 16, 4)
            .iter()
            .enumerate()
            .map(|(k, x)| (x * 0.5 - if (k % 16).is_multiple_of(5) { 0.0 } else { 10.0 }) as f32 as f64)
            .collect();
        let g: Vec<f64> = noise(h.len(), 5).iter().map(|x| *x as f32 as f64).collect();
        let single = |x: &[f64]| x.iter().map(|x| *x as f32).collect::<Vec<_>>();
        let (_, d) = run(&single(&h), &single(&g), n, 20);
        let (_, want) = run(&h, &g, n, 20);
        let top = want.iter().fold(0f64, |m, x| m.max(x.abs()));
        let worst = d.iter().zip(&want).fold(0f64, |m, (a, b)| m.max((*a as f64 - b).abs()));
        assert!(worst < 3e-6 * top, "{worst:e} of {top:e}");
    }

    #[test]
    fn adjoint() {
        for (n, t) in [(1, 3), (2, 2), (3, 20), (4, 20), (5, 1), (8, 4)] {
            check_vjp_at(&[("h", vec![3, 5, n, n])], 4.0, |g, x| vec![g.sinkhorn(x[0], t)]);
        }
    }

    #[test]
    fn shaders_are_valid() {
        for n in 1..=8 {
            let mut g = Graph::new();
            let h = g.state("h", [3, n, n]);
            let r = g.sinkhorn(h, 20);
            let s = g.sum_all(r);
            g.gradients(s, &[h]);
            crate::ops::streams::tests::validate_graph(&g);
        }
    }
}
