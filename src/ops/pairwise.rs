//! `pairwise`: x `[B, m, d]` → `[B, m(m+1)/2]`, the inner products ⟨x_i, x_j⟩ for i ≤ j, row-major over
//! (i, j) (DLRM's interaction; math.md 2.5). Backward: dx_i = Σ_j (1 + δ_ij) · dP_ij · x_j.

use super::copy::{typed, unit, words};
use super::cpu::par_rows;
use super::tile::{LANES, padded, panel};
use super::{Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp};
use crate::cpu_both;
use crate::gpu::kernel::{Bind, Kernel, fold_groups};
use crate::graph::{Graph, Shape, Tensor};

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Pairwise {
    m: usize,
    d: usize,
}

/// The adjoint of [`Pairwise`]: inputs x and dP.
#[derive(Clone, Debug)]
pub struct PairwiseGrad(Pairwise);

/// Rows of a register tile.
const ROWS: usize = 4;

impl Pairwise {
    fn pairs(&self) -> usize {
        self.m * (self.m + 1) / 2
    }

    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (m, d) = (self.m, self.d);
        let x = c.input(0);
        let mp = padded(m);
        let pairs = self.pairs();
        par_rows(
            c.output(0),
            pairs,
            #[inline(always)]
            |first, out| {
                let mut xt = vec![T::ZERO; d * mp];
                for (out, x) in out.chunks_exact_mut(pairs).zip(x[first * m * d..].chunks_exact(m * d)) {
                    products(m, d, x, &mut xt, out);
                }
            },
        );
    }
}

/// The packed triangle of one example x `[m, d]`; `xt` is room for its transpose in whole panels.
#[inline(always)]
fn products<T: Real>(m: usize, d: usize, x: &[T], xt: &mut [T], out: &mut [T]) {
    let mp = padded(m);
    for (i, x) in x.chunks_exact(d).enumerate() {
        for (to, x) in xt.chunks_exact_mut(mp).zip(x) {
            to[i] = *x;
        }
    }
    let mut i = 0;
    while i < m {
        let n = if i + ROWS <= m { ROWS } else { 1 };
        for j0 in (i / LANES * LANES..m).step_by(LANES) {
            let a = &x[i * d..];
            let b = &xt[j0..];
            if n == ROWS {
                let t = panel::<T, ROWS>(a, d, d, b, mp);
                for (k, t) in t.iter().enumerate() {
                    put(out, m, i + k, j0, t);
                }
            } else {
                put(out, m, i, j0, &panel::<T, 1>(a, d, d, b, mp)[0]);
            }
        }
        i += n;
    }
}

/// Position of pair (i, i) in the packed triangle.
#[inline(always)]
fn diagonal(m: usize, i: usize) -> usize {
    i * (2 * m + 1 - i) / 2
}

/// Stores the part of a tile row that lies in the triangle.
#[inline(always)]
fn put<T: Real>(out: &mut [T], m: usize, i: usize, j0: usize, t: &[T; LANES]) {
    let (begin, end) = (i.max(j0), m.min(j0 + LANES));
    if begin < end {
        let at = diagonal(m, i) + begin - i;
        out[at..at + end - begin].copy_from_slice(&t[begin - j0..end - j0]);
    }
}

impl Op for Pairwise {
    fn name(&self) -> &'static str {
        "pairwise"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        assert_eq!(inputs[0].dims()[1..], [self.m, self.d]);
        vec![Shape::new(&[inputs[0].dim(0), self.pairs()])]
    }

    fn flops(&self, _: &[Shape], outputs: &[Shape]) -> f64 {
        (2 * outputs[0].len() * self.d) as f64
    }

    fn vjp(&self, g: &mut Graph, v: &Vjp<'_>) -> Vec<Option<Tensor>> {
        let dp = v.grads[0].expect("called with a gradient");
        vec![Some(g.push(PairwiseGrad(self.clone()), &[v.inputs[0], dp]))]
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let unit = unit(&[self.d]);
        let tiles = self.m.div_ceil(4);
        let total = r.inputs[0].dim(0) * tiles * (tiles + 1) / 2;
        Kernel {
            label: "pairwise".into(),
            source: typed(include_str!("../../shaders/pairwise.wgsl"), unit)
                .replace("{{dot}}", if unit == 4 { "dot" } else { "times" })
                .into(),
            entry: "main",
            constants: vec![],
            bindings: vec![Bind::In(0), Bind::Out(0)],
            params: words(&[total as u32, self.m as u32, (self.d / unit) as u32, tiles as u32]),
            groups: fold_groups(total.div_ceil(64) as u64),
        }
        .into()
    }
}

impl PairwiseGrad {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (m, d) = (self.0.m, self.0.d);
        let (x, dp) = (c.input(0), c.input(1));
        let pairs = self.0.pairs();
        let dw = padded(d);
        par_rows(
            c.output(0),
            m * d,
            #[inline(always)]
            |first, out| {
                let mut s = vec![T::ZERO; m * m];
                let mut panels = vec![T::ZERO; if dw == d { 0 } else { m * dw }];
                for (k, out) in out.chunks_exact_mut(m * d).enumerate() {
                    let x = &x[(first + k) * m * d..][..m * d];
                    let dp = &dp[(first + k) * pairs..][..pairs];
                    product_grad(m, d, x, dp, &mut s, &mut panels, out);
                }
            },
        );
    }
}

/// dX `[m, d]` of one example. `s` is room for dP as a symmetric matrix with its diagonal doubled,
/// `panels` for x in whole panels (not used when d is a multiple of them).
#[inline(always)]
fn product_grad<T: Real>(
    m: usize,
    d: usize,
    x: &[T],
    dp: &[T],
    s: &mut [T],
    panels: &mut [T],
    out: &mut [T],
) {
    let dw = padded(d);
    for i in 0..m {
        let row = &dp[diagonal(m, i)..][..m - i];
        s[i * m + i..(i + 1) * m].copy_from_slice(row);
        s[i * m + i] += row[0];
        for (to, v) in s[(i + 1) * m..].chunks_exact_mut(m).zip(&row[1..]) {
            to[i] = *v;
        }
    }
    let b = if dw == d {
        x
    } else {
        for (w, x) in panels.chunks_exact_mut(dw).zip(x.chunks_exact(d)) {
            w[..d].copy_from_slice(x);
        }
        &*panels
    };
    let mut i = 0;
    while i < m {
        let n = if i + ROWS <= m { ROWS } else { 1 };
        for c0 in (0..d).step_by(LANES) {
            let w = LANES.min(d - c0);
            let mut store = |i: usize, t: &[T; LANES]| {
                out[i * d + c0..][..w].copy_from_slice(&t[..w]);
            };
            if n == ROWS {
                let t = panel::<T, ROWS>(&s[i * m..], m, m, &b[c0..], dw);
                for (k, t) in t.iter().enumerate() {
                    store(i + k, t);
                }
            } else {
                store(i, &panel::<T, 1>(&s[i * m..], m, m, &b[c0..], dw)[0]);
            }
        }
        i += n;
    }
}

impl Op for PairwiseGrad {
    fn name(&self) -> &'static str {
        "pairwise_grad"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        vec![inputs[0]]
    }

    fn flops(&self, inputs: &[Shape], _: &[Shape]) -> f64 {
        (2 * inputs[0].len() * self.0.m) as f64
    }

    fn vjp(&self, _: &mut Graph, _: &Vjp<'_>) -> Vec<Option<Tensor>> {
        unreachable!("pairwise_grad: second derivatives are not needed")
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let unit = unit(&[self.0.d]);
        let (blocks, width) = (self.0.m.div_ceil(4), self.0.d / unit);
        let total = r.inputs[0].dim(0) * blocks * width;
        Kernel {
            label: "pairwise_grad".into(),
            source: typed(include_str!("../../shaders/pairwise_grad.wgsl"), unit).into(),
            entry: "main",
            constants: vec![],
            bindings: vec![Bind::In(0), Bind::In(1), Bind::Out(0)],
            params: words(&[total as u32, self.0.m as u32, width as u32, blocks as u32]),
            groups: fold_groups(total.div_ceil(64) as u64),
        }
        .into()
    }
}

impl Graph {
    /// Inner products of all pairs i ≤ j of slots: x `[B, m, d]` → `[B, m(m+1)/2]`, row-major over (i, j).
    pub fn pairwise(&mut self, x: Tensor) -> Tensor {
        assert_eq!(x.shape().rank(), 3, "pairwise needs [batch, slots, width], not {}", x.shape());
        self.push(Pairwise { m: x.dim(1), d: x.dim(2) }, &[x])
    }
}

#[cfg(test)]
mod tests {
    use super::super::copy::tests::validated;
    use super::*;
    use crate::graph::tests::{check_vjp, noise, run64};

    #[test]
    fn vjp() {
        for (b, m, d) in [(2, 5, 3), (1, 1, 1), (3, 2, 17), (2, 18, 4)] {
            check_vjp(&[("x", vec![b, m, d])], |g, x| vec![g.pairwise(x[0])]);
        }
    }

    #[test]
    fn values_in_order() {
        for (b, m, d) in [(3, 5, 4), (2, 37, 16), (1, 1, 3), (40, 27, 32)] {
            let mut g = Graph::new();
            let x = g.state("x", [b, m, d]);
            let y = g.pairwise(x);
            let v = noise(b * m * d, 2);
            let out = run64(&g, &[y], &[("x", v.clone())]);
            let mut at = 0;
            for e in 0..b {
                for i in 0..m {
                    for j in i..m {
                        let (p, q) = ((e * m + i) * d, (e * m + j) * d);
                        let want: f64 = (0..d).map(|c| v[p + c] * v[q + c]).sum();
                        assert!((out[0][at] - want).abs() < 1e-13, "({i}, {j})");
                        at += 1;
                    }
                }
            }
            assert_eq!(at, out[0].len());
        }
    }

    #[test]
    fn shaders_validate() {
        for d in [8, 3] {
            let op = Pairwise { m: 5, d };
            validated(&op, &[&[3, 5, d]]);
            validated(&PairwiseGrad(op), &[&[3, 5, d], &[3, 15]]);
        }
    }

    #[test]
    fn device() {
        for (b, m, d) in [(3, 5, 3), (70, 27, 32), (1, 1, 4), (2, 8, 1), (5, 13, 8)] {
            crate::graph::testing::check_device(|g| {
                let x = g.state("x", [b, m, d]);
                vec![g.pairwise(x)]
            });
        }
    }
}
