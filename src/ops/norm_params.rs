//! Gradient of the parameters of layer norm and RMS norm: `x [.., d]`, the forward's stats and `dy [.., d]`
//! → `dγ [d] = Σ_rows dy·x̂` and, for layer norm, `dβ [d] = Σ_rows dy`.
//!
//! Sums over rows in fixed runs, added in order: the result does not depend on the number of threads.

use super::cpu::par_reduce_rows;
use super::row::{by_width, kernel, shader};
use super::{Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp};
use crate::cpu_both;
use crate::gpu::kernel::Bind;
use crate::graph::{Graph, Shape, Tensor};

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(crate) struct NormParamsGrad {
    /// Layer norm (stats `[rows, 2]`, two outputs) or RMS norm (stats `[rows, 1]`, one).
    pub layer: bool,
}

#[inline(always)]
fn layer_rows<T: Real, const D: usize>(d: usize, x: &[T], stats: &[T], dy: &[T], p: &mut [T]) {
    let d = if D > 0 { D } else { d };
    let (dgamma, dbeta) = p.split_at_mut(d);
    let dbeta = &mut dbeta[..d];
    for ((x, dy), &[m, r]) in x.chunks_exact(d).zip(dy.chunks_exact(d)).zip(stats.as_chunks::<2>().0) {
        let x0 = x[0];
        for (((a, b), x), dy) in dgamma.iter_mut().zip(dbeta.iter_mut()).zip(x).zip(dy) {
            *a += *dy * (((*x - x0) - m) * r);
            *b += *dy;
        }
    }
}

#[inline(always)]
fn rms_rows<T: Real, const D: usize>(d: usize, x: &[T], stats: &[T], dy: &[T], p: &mut [T]) {
    let d = if D > 0 { D } else { d };
    let p = &mut p[..d];
    for ((x, dy), &r) in x.chunks_exact(d).zip(dy.chunks_exact(d)).zip(stats) {
        for ((a, x), dy) in p.iter_mut().zip(x).zip(dy) {
            *a += *dy * (*x * r);
        }
    }
}

impl NormParamsGrad {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (x, stats, dy) = (c.input(0), c.input(1), c.input(2));
        let dgamma = c.output(0);
        let d = dgamma.len();
        let (rows, per) = (x.len() / d, (16384 / d).max(1));
        if !self.layer {
            par_reduce_rows(
                rows,
                per,
                dgamma,
                #[inline(always)]
                |r, p| {
                    let (lo, hi) = (r.start * d, r.end * d);
                    by_width!(d, rms_rows(d, &x[lo..hi], &stats[r.start..r.end], &dy[lo..hi], p))
                },
            );
            return;
        }
        let dbeta = c.output(1);
        let mut both = vec![T::ZERO; 2 * d];
        par_reduce_rows(
            rows,
            per,
            &mut both,
            #[inline(always)]
            |r, p| {
                let (lo, hi) = (r.start * d, r.end * d);
                by_width!(d, layer_rows(d, &x[lo..hi], &stats[2 * r.start..2 * r.end], &dy[lo..hi], p))
            },
        );
        dgamma.copy_from_slice(&both[..d]);
        dbeta.copy_from_slice(&both[d..]);
    }
}

impl Op for NormParamsGrad {
    fn name(&self) -> &'static str {
        "norm_params_grad"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        vec![Shape::new(&[inputs[0].last()]); if self.layer { 2 } else { 1 }]
    }

    fn flops(&self, inputs: &[Shape], _: &[Shape]) -> f64 {
        (if self.layer { 6.0 } else { 3.0 }) * inputs[0].len() as f64
    }

    fn vjp(&self, _: &mut Graph, _: &Vjp<'_>) -> Vec<Option<Tensor>> {
        unreachable!("second derivatives of norms are not needed")
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let d = r.inputs[0].last();
        let rows = r.inputs[0].len() / d;
        let vec4 = d.is_multiple_of(4);
        let n = if vec4 { d / 4 } else { d };
        let mut flags = if vec4 { vec!["vec4"] } else { vec![] };
        let mut to = vec![Bind::Scratch(0), Bind::Out(0)];
        if self.layer {
            flags.push("layer");
            to.push(Bind::Out(1));
        }
        let per = rows.div_ceil(256).max(64).min(rows);
        let runs = rows.div_ceil(per);
        let params = [rows as u32, n as u32, runs as u32, per as u32];
        let parts = if self.layer { 2 } else { 1 };
        GpuLaunch {
            kernels: vec![
                kernel(
                    "norm_params_runs",
                    shader(include_str!("../../shaders/norm_params_runs.wgsl"), &flags, &[]),
                    "main",
                    vec![Bind::In(0), Bind::In(1), Bind::In(2), Bind::Scratch(0)],
                    &params,
                    runs * n,
                ),
                kernel(
                    "norm_params_total",
                    shader(include_str!("../../shaders/norm_params_total.wgsl"), &flags, &[]),
                    "main",
                    to,
                    &params,
                    parts * n,
                ),
            ],
            scratch: vec![runs * parts * d],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::row::tests::validate;

    #[test]
    fn shaders_are_valid() {
        for d in [1usize, 6, 32] {
            validate(&NormParamsGrad { layer: true }, &[&[300, d], &[300, 2], &[300, d]]);
            validate(&NormParamsGrad { layer: false }, &[&[300, d], &[300, 1], &[300, d]]);
        }
    }
}
