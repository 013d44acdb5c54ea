//! `conv2d`: x `[B, m, d]` seen as one-channel images, k `[channels, km, kd]` (odd sizes) →
//! y `[B, m, channels, d]`, a cross-correlation with stride 1 and zero "same" padding (math.md 2.6):
//! y[b, i, f, c] = Σ_{u, v} k[f, u, v] · x[b, i + u − ⌊km/2⌋, c + v − ⌊kd/2⌋].
//!
//! With channels beside slots, mixing both is a plain product over `i·channels + f`. Bias and activation
//! are maps of their own. On the CPU each example is copied once into a frame of zeros, so that the inner
//! loops are whole vectors without a border case.

use super::copy::{sum_kernel, words};
use super::cpu::{par_reduce_rows, par_rows};
use super::tile::{LANES, padded};
use super::{Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp};
use crate::cpu_both;
use crate::gpu::kernel::{Bind, Kernel, fold_groups};
use crate::graph::{Graph, Shape, Tensor};

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Conv2d {
    m: usize,
    d: usize,
    channels: usize,
    km: usize,
    kd: usize,
}

/// Gradient of the image: inputs dy and k.
#[derive(Clone, Debug)]
pub struct Conv2dGradInput(Conv2d);

/// Gradient of the kernel: inputs dy and x.
#[derive(Clone, Debug)]
pub struct Conv2dGradKernel(Conv2d);

/// Filters, or rows, of a register tile.
const ROWS: usize = 4;

impl Conv2d {
    /// Width of a row in a frame: whole panels, and the kernel's overhang.
    fn frame_width(&self) -> usize {
        padded(self.d) + self.kd - 1
    }

    /// A frame of zeros for images with `depth` planes a row.
    fn frame<T: Real>(&self, depth: usize) -> Vec<T> {
        vec![T::ZERO; (self.m + self.km - 1) * depth * self.frame_width()]
    }

    /// Copies an image `[m, depth, d]` into the middle of its frame.
    #[inline(always)]
    fn fill<T: Real>(&self, frame: &mut [T], depth: usize, x: &[T]) {
        let w = self.frame_width();
        let rows = frame.chunks_exact_mut(w).skip(self.km / 2 * depth);
        for (f, x) in rows.zip(x.chunks_exact(self.d)) {
            f[self.kd / 2..self.kd / 2 + self.d].copy_from_slice(x);
        }
    }

    /// Sixteen columns of `F` filters; `frame` starts at the first row and column that the kernel covers.
    #[inline(always)]
    fn tile<T: Real, const F: usize>(&self, frame: &[T], k: &[T]) -> [[T; LANES]; F] {
        let size = self.km * self.kd;
        let w = self.frame_width();
        let mut acc = [[T::ZERO; LANES]; F];
        for u in 0..self.km {
            for v in 0..self.kd {
                let x: &[T; LANES] = frame[u * w + v..].first_chunk().expect("inside the frame");
                for f in 0..F {
                    let k = k[f * size + u * self.kd + v];
                    for l in 0..LANES {
                        acc[f][l] += k * x[l];
                    }
                }
            }
        }
        acc
    }

    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (x, k) = (c.input(0), c.input(1));
        let (m, d) = (self.m, self.d);
        let each = m * self.channels * d;
        par_rows(
            c.output(0),
            each,
            #[inline(always)]
            |first, out| {
                let mut frame = self.frame(1);
                for (e, out) in out.chunks_exact_mut(each).enumerate() {
                    correlate(self, &x[(first + e) * m * d..][..m * d], k, &mut frame, out);
                }
            },
        );
    }

    fn macs(&self, batch: usize) -> f64 {
        (2 * batch * self.m * self.d * self.channels * self.km * self.kd) as f64
    }
}

/// y `[m, channels, d]` of one image.
#[inline(always)]
fn correlate<T: Real>(conv: &Conv2d, x: &[T], k: &[T], frame: &mut [T], out: &mut [T]) {
    let (d, ch, w) = (conv.d, conv.channels, conv.frame_width());
    let size = conv.km * conv.kd;
    conv.fill(frame, 1, x);
    for (i, out) in out.chunks_exact_mut(ch * d).enumerate() {
        for c0 in (0..d).step_by(LANES) {
            let n = LANES.min(d - c0);
            let frame = &frame[i * w + c0..];
            let mut f = 0;
            while f < ch {
                let k = &k[f * size..];
                if f + ROWS <= ch {
                    for (q, t) in conv.tile::<T, ROWS>(frame, k).iter().enumerate() {
                        out[(f + q) * d + c0..][..n].copy_from_slice(&t[..n]);
                    }
                    f += ROWS;
                } else {
                    let t = conv.tile::<T, 1>(frame, k);
                    out[f * d + c0..][..n].copy_from_slice(&t[0][..n]);
                    f += 1;
                }
            }
        }
    }
}

impl Op for Conv2d {
    fn name(&self) -> &'static str {
        "conv2d"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        assert_eq!(inputs[0].dims()[1..], [self.m, self.d]);
        assert_eq!(inputs[1].dims(), [self.channels, self.km, self.kd]);
        vec![Shape::new(&[inputs[0].dim(0), self.m, self.channels, self.d])]
    }

    fn flops(&self, inputs: &[Shape], _: &[Shape]) -> f64 {
        self.macs(inputs[0].dim(0))
    }

    fn vjp(&self, g: &mut Graph, v: &Vjp<'_>) -> Vec<Option<Tensor>> {
        let dy = v.grads[0].expect("called with a gradient");
        vec![
            v.wanted[0].then(|| g.push(Conv2dGradInput(self.clone()), &[dy, v.inputs[1]])),
            v.wanted[1].then(|| g.push(Conv2dGradKernel(self.clone()), &[dy, v.inputs[0]])),
        ]
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let (columns, filters) = (self.d.div_ceil(4), self.channels.div_ceil(4));
        let total = r.inputs[0].dim(0) * self.m * columns * filters;
        let p = [total, self.m, self.d, self.channels, self.km, self.kd, columns, filters];
        Kernel {
            label: "conv2d".into(),
            source: include_str!("../../shaders/conv2d.wgsl").into(),
            entry: "main",
            constants: vec![],
            bindings: vec![Bind::In(0), Bind::In(1), Bind::Out(0)],
            params: words(&p.map(|v| v as u32)),
            groups: fold_groups(total.div_ceil(64) as u64),
        }
        .into()
    }
}

impl Conv2dGradInput {
    /// Sixteen columns of `I` rows; `frame` `[row, channel, column]` starts at the tile's first row and column.
    #[inline(always)]
    fn tile<T: Real, const I: usize>(&self, frame: &[T], k: &[T]) -> [[T; LANES]; I] {
        let c = &self.0;
        let w = c.frame_width();
        let mut acc = [[T::ZERO; LANES]; I];
        for f in 0..c.channels {
            for u in 0..c.km {
                for v in 0..c.kd {
                    let k = k[(f * c.km + u) * c.kd + v];
                    let from = &frame[((c.km - 1 - u) * c.channels + f) * w + c.kd - 1 - v..];
                    for i in 0..I {
                        let g: &[T; LANES] =
                            from[i * c.channels * w..].first_chunk().expect("inside the frame");
                        for l in 0..LANES {
                            acc[i][l] += k * g[l];
                        }
                    }
                }
            }
        }
        acc
    }

    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (dy, k) = (c.input(0), c.input(1));
        let (m, d, ch) = (self.0.m, self.0.d, self.0.channels);
        par_rows(
            c.output(0),
            m * d,
            #[inline(always)]
            |first, out| {
                let mut frame = self.0.frame(ch);
                for (e, out) in out.chunks_exact_mut(m * d).enumerate() {
                    image_grad(self, &dy[(first + e) * m * ch * d..][..m * ch * d], k, &mut frame, out);
                }
            },
        );
    }
}

/// dX `[m, d]` of one image.
#[inline(always)]
fn image_grad<T: Real>(op: &Conv2dGradInput, dy: &[T], k: &[T], frame: &mut [T], out: &mut [T]) {
    let (m, d, ch, w) = (op.0.m, op.0.d, op.0.channels, op.0.frame_width());
    op.0.fill(frame, ch, dy);
    for c0 in (0..d).step_by(LANES) {
        let n = LANES.min(d - c0);
        let mut i = 0;
        while i < m {
            let frame = &frame[i * ch * w + c0..];
            if i + ROWS <= m {
                for (q, t) in op.tile::<T, ROWS>(frame, k).iter().enumerate() {
                    out[(i + q) * d + c0..][..n].copy_from_slice(&t[..n]);
                }
                i += ROWS;
            } else {
                let t = op.tile::<T, 1>(frame, k);
                out[i * d + c0..][..n].copy_from_slice(&t[0][..n]);
                i += 1;
            }
        }
    }
}

/// The uniform block of `conv2d_grad.wgsl`.
fn grad_params(c: &Conv2d, total: usize, batch: usize, per: usize) -> Vec<u8> {
    words(&[total, batch, c.m, c.d, c.channels, c.km, c.kd, per].map(|v| v as u32))
}

impl Op for Conv2dGradInput {
    fn name(&self) -> &'static str {
        "conv2d_grad_input"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        vec![Shape::new(&[inputs[0].dim(0), self.0.m, self.0.d])]
    }

    fn flops(&self, inputs: &[Shape], _: &[Shape]) -> f64 {
        self.0.macs(inputs[0].dim(0))
    }

    fn vjp(&self, _: &mut Graph, _: &Vjp<'_>) -> Vec<Option<Tensor>> {
        unreachable!("conv2d_grad_input: second derivatives are not needed")
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let batch = r.inputs[0].dim(0);
        let columns = self.0.d.div_ceil(4);
        let total = batch * self.0.m * columns;
        Kernel {
            label: "conv2d_grad_input".into(),
            source: include_str!("../../shaders/conv2d_grad.wgsl").into(),
            entry: "input",
            constants: vec![],
            bindings: vec![Bind::In(0), Bind::In(1), Bind::Out(0)],
            params: grad_params(&self.0, total, batch, columns),
            groups: fold_groups(total.div_ceil(64) as u64),
        }
        .into()
    }
}

impl Conv2dGradKernel {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (dy, x) = (c.input(0), c.input(1));
        let conv = &self.0;
        let (m, d, ch) = (conv.m, conv.d, conv.channels);
        let batch = x.len() / (m * d);
        par_reduce_rows(
            batch,
            8,
            c.output(0),
            #[inline(always)]
            |examples, part| {
                let mut frame = conv.frame(1);
                let mut lanes = vec![[T::ZERO; LANES]; ch * conv.km * conv.kd];
                let mut row = vec![T::ZERO; padded(d)];
                for e in examples {
                    let (dy, x) = (&dy[e * m * ch * d..][..m * ch * d], &x[e * m * d..][..m * d]);
                    kernel_grad(conv, dy, x, &mut frame, &mut row, &mut lanes);
                }
                for (p, s) in part.iter_mut().zip(&lanes) {
                    *p += super::real::sum(s);
                }
            },
        );
    }
}

/// Adds one image's dK, sixteen partial sums an element.
#[inline(always)]
fn kernel_grad<T: Real>(
    conv: &Conv2d,
    dy: &[T],
    x: &[T],
    frame: &mut [T],
    row: &mut [T],
    lanes: &mut [[T; LANES]],
) {
    let (d, ch, w, kd) = (conv.d, conv.channels, conv.frame_width(), conv.kd);
    conv.fill(frame, 1, x);
    for f in 0..ch {
        for u in 0..conv.km {
            // up to five columns of the kernel at a time stay in registers over the whole image
            let mut v = 0;
            while v < kd {
                let to = &mut lanes[(f * conv.km + u) * kd + v..];
                macro_rules! columns {
                    ($n:literal) => {{
                        let mut acc = [[T::ZERO; LANES]; $n];
                        for (i, dy) in dy.chunks_exact(d).skip(f).step_by(ch).enumerate() {
                            row[..d].copy_from_slice(dy);
                            for (c0, g) in row.as_chunks::<LANES>().0.iter().enumerate() {
                                let x = &frame[(i + u) * w + c0 * LANES + v..];
                                for q in 0..$n {
                                    let x: &[T; LANES] = x[q..].first_chunk().expect("inside the frame");
                                    for l in 0..LANES {
                                        acc[q][l] += g[l] * x[l];
                                    }
                                }
                            }
                        }
                        for (to, acc) in to.iter_mut().zip(&acc) {
                            for l in 0..LANES {
                                to[l] += acc[l];
                            }
                        }
                        v += $n;
                    }};
                }
                match kd - v {
                    5.. => columns!(5),
                    3.. => columns!(3),
                    _ => columns!(1),
                }
            }
        }
    }
}

impl Op for Conv2dGradKernel {
    fn name(&self) -> &'static str {
        "conv2d_grad_kernel"
    }

    fn outputs(&self, _: &[Shape]) -> Vec<Shape> {
        vec![Shape::new(&[self.0.channels, self.0.km, self.0.kd])]
    }

    fn flops(&self, inputs: &[Shape], _: &[Shape]) -> f64 {
        self.0.macs(inputs[0].dim(0))
    }

    fn vjp(&self, _: &mut Graph, _: &Vjp<'_>) -> Vec<Option<Tensor>> {
        unreachable!("conv2d_grad_kernel: second derivatives are not needed")
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let batch = r.inputs[0].dim(0);
        let n = self.0.channels * self.0.km * self.0.kd;
        // enough runs to fill a device, few enough that summing them is nothing
        let per = batch.div_ceil((16384 / n).clamp(1, 512));
        let runs = batch.div_ceil(per);
        let total = runs * n;
        let first = Kernel {
            label: "conv2d_grad_kernel".into(),
            source: include_str!("../../shaders/conv2d_grad.wgsl").into(),
            entry: "kernel",
            constants: vec![],
            bindings: vec![Bind::In(0), Bind::In(1), Bind::Scratch(0)],
            params: grad_params(&self.0, total, batch, per),
            groups: fold_groups(total.div_ceil(64) as u64),
        };
        let second = sum_kernel("conv2d_grad_kernel", Bind::Scratch(0), Bind::Out(0), runs, n, runs);
        GpuLaunch { kernels: vec![first, second], scratch: vec![total] }
    }
}

impl Graph {
    /// Cross-correlates x `[B, m, d]` with the filters k `[channels, km, kd]` (odd) → `[B, m, channels, d]`.
    pub fn conv2d(&mut self, x: Tensor, k: Tensor) -> Tensor {
        let (xs, ks) = (x.shape(), k.shape());
        assert!(xs.rank() == 3 && ks.rank() == 3, "conv2d of {xs} with {ks}");
        let (km, kd) = (ks.dim(1), ks.dim(2));
        assert!(km % 2 == 1 && kd % 2 == 1, "conv2d needs odd kernels, not {km} × {kd}");
        self.push(Conv2d { m: xs.dim(1), d: xs.dim(2), channels: ks.dim(0), km, kd }, &[x, k])
    }
}

#[cfg(test)]
mod tests {
    use super::super::copy::tests::validated;
    use super::*;
    use crate::graph::tests::{check_vjp, noise, run64};

    /// (B, m, d, channels, km, kd)
    const CASES: [[usize; 6]; 5] =
        [[2, 5, 3, 1, 3, 3], [3, 6, 17, 5, 5, 1], [1, 1, 1, 2, 3, 5], [2, 4, 4, 4, 1, 1], [2, 2, 5, 3, 7, 9]];

    #[test]
    fn vjp() {
        for [b, m, d, ch, km, kd] in CASES {
            check_vjp(&[("x", vec![b, m, d]), ("k", vec![ch, km, kd])], |g, x| vec![g.conv2d(x[0], x[1])]);
        }
    }

    #[test]
    fn values() {
        for [b, m, d, ch, km, kd] in CASES {
            let mut g = Graph::new();
            let x = g.state("x", [b, m, d]);
            let k = g.state("k", [ch, km, kd]);
            let y = g.conv2d(x, k);
            let (xv, kv) = (noise(b * m * d, 1), noise(ch * km * kd, 2));
            let out = run64(&g, &[y], &[("x", xv.clone()), ("k", kv.clone())]);
            for (at, got) in out[0].iter().enumerate() {
                let (c, f, i, e) = (at % d, at / d % ch, at / d / ch % m, at / d / ch / m);
                let mut want = 0.0;
                for u in 0..km {
                    for v in 0..kd {
                        let (r, q) = ((i + u).wrapping_sub(km / 2), (c + v).wrapping_sub(kd / 2));
                        if r < m && q < d {
                            want += kv[(f * km + u) * kd + v] * xv[(e * m + r) * d + q];
                        }
                    }
                }
                assert!((got - want).abs() < 1e-13, "{b} {m} {d} {ch} {km} {kd} at {at}: {got}, {want}");
            }
        }
    }

    #[test]
    fn shaders_validate() {
        let op = Conv2d { m: 5, d: 7, channels: 3, km: 3, kd: 5 };
        validated(&op, &[&[4, 5, 7], &[3, 3, 5]]);
        validated(&Conv2dGradInput(op.clone()), &[&[4, 5, 3, 7], &[3, 3, 5]]);
        validated(&Conv2dGradKernel(op), &[&[4, 5, 3, 7], &[4, 5, 7]]);
    }

    #[test]
    fn device() {
        for [b, m, d, ch, km, kd] in CASES.into_iter().chain([[70, 27, 32, 4, 3, 3]]) {
            crate::graph::testing::check_device(|g| {
                let x = g.state("x", [b, m, d]);
                let k = g.state("k", [ch, km, kd]);
                vec![g.conv2d(x, k)]
            });
        }
    }
}
