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
//! count. Tokens where one has are done again: on the CPU in f64, on the device in the log domain, with
//! potentials that are an integer and a factor near 1 each. An iteration that changes nothing is the last.
//! Logits beyond [`HUGE`], where f32 has no such integers any more, are iterated in place as the definition says: what
//! is near 0, which alone counts, then keeps its digits whatever the logits were.
//!
//! Backward, in the potentials ln r, ln c: with P = r K c after a row step, ρ[o] the adjoint of ln r[o]:
//! dh -= ρ[o] P and γ[i] = -Σ_o ρ[o] P[o, i]; columns alike. The first row step subtracts from the incoming
//! gradient its value at the row's largest entry (res sums to 1 over a row, so that changes nothing): near the
//! identity the plain form cancels and loses a factor of 1 / (off-diagonal mass).

use super::sinkhorn_cpu as fast;
use super::streams::{FAST_STREAMS, MAX_STREAMS, load_matrix, store_matrix, unroll};
use super::{Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp};
use crate::gpu::kernel::{Bind, Kernel, fold_groups};
use crate::graph::{Graph, Shape, Tensor};
use crate::par::*;
use crate::{by_streams, cpu_both};

/// Potentials are sums of up to 2·8 logits; of these they are whole numbers that f32 holds.
pub(crate) const HUGE: f32 = 1e6;

/// Halves of an iteration in place, of half of each logit: the difference of two finite numbers may be infinite, that of their
/// halves is not.
const HALF_STEP: &str = "
fn columns_in_place() {
    let z_$o_$i = {{W}}[$o * {{N}} + $i];
    let m_$i = [[max o: z_$o_$i]];
    let v_$o_$i = z_$o_$i - m_$i;
    let l_$i = 0.5 * log([[+ o: exp(2.0 * max(v_$o_$i, -50.0))]]);
    {{W}}[$o * {{N}} + $i] = v_$o_$i - l_$i;
}

fn rows_in_place() {
    let z_$o_$i = {{W}}[$o * {{N}} + $i];
    let m_$o = [[max i: z_$o_$i]];
    let v_$o_$i = z_$o_$i - m_$o;
    let l_$o = 0.5 * log([[+ i: exp(2.0 * max(v_$o_$i, -50.0))]]);
    {{W}}[$o * {{N}} + $i] = v_$o_$i - l_$o;
}
";

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Sinkhorn {
    pub(crate) n: usize,
    pub(crate) iterations: usize,
}

/// Gradient of [`Sinkhorn`]: inputs h, dres; output dh.
#[derive(Clone, Debug)]
pub struct SinkhornGrad {
    n: usize,
    iterations: usize,
}

/// Blocks of tokens over the threads, `f(first token, block of y)`.
fn blocks<T: Real>(nn: usize, y: &mut [T], f: impl Fn(usize, &mut [T]) + Send + Sync) {
    const BLOCK: usize = 512;
    y.par_chunks_mut(BLOCK * nn).enumerate().for_each(|(b, y)| f(b * BLOCK * nn, y));
}

fn to64<T: Real>(x: &[T]) -> Vec<f64> {
    x.iter().map(|x| x.f64()).collect()
}

fn from64<T: Real>(x: &[f64], y: &mut [T]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = T::of(*x);
    }
}

impl Sinkhorn {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (n, t) = (self.n, self.iterations);
        let h = c.input(0);
        let res = c.output(0);
        if n == 1 {
            return res.fill(T::ONE);
        }
        blocks(n * n, res, |at, res| {
            let h = &h[at..][..res.len()];
            if size_of::<T>() == 4 && n <= FAST_STREAMS {
                let (h, res) = (bytemuck::cast_slice(h), bytemuck::cast_slice_mut(res));
                by_streams!(n, fast::forward(h, res, t))
            } else {
                for (h, res) in h.chunks_exact(n * n).zip(res.chunks_exact_mut(n * n)) {
                    from64(&fast::exact::forward(&to64(h), n, t), res);
                }
            }
        });
    }
}

impl SinkhornGrad {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (n, t) = (self.n, self.iterations);
        let (h, g) = (c.input(0), c.input(1));
        let dh = c.output(0);
        if n == 1 {
            return dh.fill(T::ZERO);
        }
        blocks(n * n, dh, |at, dh| {
            let (h, g) = (&h[at..][..dh.len()], &g[at..][..dh.len()]);
            if size_of::<T>() == 4 && n <= FAST_STREAMS {
                let (h, g, dh) =
                    (bytemuck::cast_slice(h), bytemuck::cast_slice(g), bytemuck::cast_slice_mut(dh));
                by_streams!(n, fast::backward(h, g, dh, t))
            } else {
                let tokens = h.chunks_exact(n * n).zip(g.chunks_exact(n * n));
                for ((h, g), dh) in tokens.zip(dh.chunks_exact_mut(n * n)) {
                    from64(&fast::exact::backward(&to64(h), &to64(g), n, t), dh);
                }
            }
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
    let work = if label == "sinkhorn" { "z" } else { "w" };
    let source = template
        .replace("{{HALF_STEP}}", &HALF_STEP.replace("{{W}}", work))
        .replace("{{HUGE}}", &format!("{HUGE:.1}"))
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
                        assert!(e < 4e-6 * top, "{what}: {} {} of {top}", d32[k], dh[k]);
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
            let worst =
                (0..4).map(|i| ((0..4).map(|o| r[4 * o + i]).sum::<f64>() - 1.0).abs()).fold(0.0, f64::max);
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
    fn device() {
        use crate::graph::testing::{check_device_with, noise};
        // scales past 60 leave the safe range of the scalings, and take the shader's log domain
        for (n, t, scale, tokens) in [
            (1, 3, 1.0, 65),
            (2, 20, 3.0, 100),
            (3, 2, 80.0, 130),
            (4, 20, 1.0, 257),
            (4, 20, 100.0, 600),
            (5, 7, 20.0, 70),
            (8, 20, 100.0, 300),
            (4, 20, 1e10, 40),
            (2, 3, 3e38, 40),
        ] {
            check_device_with(
                |g| {
                    let h = g.state("h", [tokens, n, n]);
                    let r = g.sinkhorn(h, t);
                    let w = g.constant(r.shape(), noise(r.shape().len(), 900));
                    let mut out = g.gradients_from(&[(r, w)], &[h]);
                    out.push(r);
                    out
                },
                &[],
                scale,
                5e-6,
            );
        }
    }

    /// Logits of any finite size; where the answer is a permutation, or ties, it is that on every executor.
    #[test]
    fn huge_logits_give_doubly_stochastic_matrices() {
        use crate::graph::exec::{Device, Program, State};
        let mut devices = vec![Device::Cpu];
        devices.extend(crate::graph::testing::software_device());
        for (n, size) in [2, 3, 4, 8].into_iter().flat_map(|n| [1e7, 1e10, 1e20, 3e38].map(|s| (n, s))) {
            let size: f32 = size;
            // by token: one large entry a row; all alike; rows alike; two blocks of ties; all but one column small
            let value = |token: usize, o: usize, i: usize| match token {
                0 => {
                    if i == (o + 1) % n {
                        size
                    } else {
                        -size
                    }
                }
                1 => size,
                2 => {
                    if o == 0 {
                        size
                    } else {
                        -size
                    }
                }
                3 => {
                    if (o < n / 2) == (i < n / 2) {
                        size
                    } else {
                        -0.5 * size
                    }
                }
                4 => {
                    if i == 0 {
                        -size
                    } else {
                        3.0
                    }
                }
                _ => {
                    if i == o {
                        0.0
                    } else {
                        -size * (1.0 + (o * n + i) as f32 / 64.0) / 2.5
                    }
                }
            };
            let want = |token: usize, o: usize, i: usize| match token {
                0 => f32::from(u8::from(i == (o + 1) % n)),
                3 if n % 2 == 0 => f32::from(u8::from((o < n / 2) == (i < n / 2))) * 2.0 / n as f32,
                5 => f32::from(u8::from(i == o)),
                3 => f32::NAN,
                _ => 1.0 / n as f32,
            };
            let cells: Vec<(usize, usize, usize)> =
                (0..6 * n * n).map(|k| (k / (n * n), k / n % n, k % n)).collect();
            let h: Vec<f32> = cells.iter().map(|c| value(c.0, c.1, c.2)).collect();
            let mut g = Graph::new();
            let x = g.state("h", [6, n, n]);
            let r = g.sinkhorn(x, 20);
            let w = g.constant(r.shape(), noise(h.len(), 900));
            let mut keep = g.gradients_from(&[(r, w)], &[x]);
            keep.push(r);
            let mut first: Option<Vec<f32>> = None;
            for d in &devices {
                let mut s = State::new(d);
                s.set("h", &h).unwrap();
                let mut p = Program::compile(d, &s, &g, &keep, "test").unwrap();
                p.run(&mut s).unwrap();
                let got = pollster::block_on(p.read(&[0, 1])).unwrap();
                let what = format!("{}, n {n}, {size:e}", d.name());
                for (c, y) in cells.iter().zip(&got[1]) {
                    let want = want(c.0, c.1, c.2);
                    assert!(
                        y.is_finite() && (want.is_nan() || (y - want).abs() < 1e-5),
                        "{what}, {c:?}: {y}, not {want}"
                    );
                }
                for row in got[1].chunks(n) {
                    assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-5, "{what}: a row is {row:?}");
                }
                let first = first.get_or_insert_with(|| got[0].clone());
                for ((c, a), b) in cells.iter().zip(&got[0]).zip(first) {
                    assert!(a.is_finite() && (a - *b).abs() < 1e-5, "{what}, {c:?}: gradient {a}, not {b}");
                }
            }
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
