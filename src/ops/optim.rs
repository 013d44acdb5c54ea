//! `adamw`: one step of AdamW on a parameter and its two moments, in place (math.md 7 and 8).
//!
//! g' = g·min(1, clip/√norm2); m = β1·m + (1−β1)·g'; v = β2·v + (1−β2)·g'²;
//! θ −= lr·( (m/(1−β1^t)) / (√(v/(1−β2^t)) + ε) + decay·θ ), with the old θ on the right.
//!
//! What changes from step to step is one small float input, [`hyper`]; what does not is in the operation. A norm2 below
//! 0 means that the step is to be left out ([`super::guard`]): nothing changes.

use super::copy::{typed, unit, words};

use super::{Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp, shapes};
use crate::cpu_both;
use crate::gpu::kernel::{Bind, Kernel, fold_groups};
use crate::graph::{Graph, Shape, Tensor, ValueType};
use crate::par::*;

/// Elements of the `hyper` input.
pub const HYPER: usize = 8;

/// The `hyper` input of every optimiser operation, for update number `t` (from 1): learning rate,
/// 1 − β1^t, 1 − β2^t, largest gradient norm (0 = no clipping), learning rate of embeddings, the two halves of t
/// (t mod 65536, t / 65536), zero.
/// Computed in f64: in f32, 1 − 0.999^t has lost half of its digits at t = 1.
pub fn hyper(lr: f64, embedding_lr: f64, beta1: f64, beta2: f64, t: u64, clip: f64) -> [f64; HYPER] {
    let bias = |beta: f64| -f64::exp_m1(t as f64 * beta.ln());
    [lr, bias(beta1), bias(beta2), clip, embedding_lr, (t & 0xFFFF) as f64, (t >> 16) as f64, 0.0]
}

/// What stays the same over a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay, scaled by the learning rate.
    pub decay: f64,
    /// Factor of the learning rate.
    pub lr_scale: f64,
}

impl Default for Adam {
    fn default() -> Self {
        Adam { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: 0.0, lr_scale: 1.0 }
    }
}

/// The factor of the gradient under clipping by global norm.
pub(crate) fn clip_factor<T: Real>(hyper: &[T], norm2: &[T]) -> T {
    let (clip, n) = (hyper[3], norm2[0]);
    if clip > T::ZERO && n > clip * clip { clip / n.sqrt() } else { T::ONE }
}

/// Whether [`super::guard`] has found the step bad.
pub(crate) fn left_out<T: Real>(norm2: &[T]) -> bool {
    norm2[0] < T::ZERO
}

/// The numbers of one step in the executor's precision.
#[derive(Clone, Copy)]
pub(crate) struct Step<T> {
    factor: T,
    lr: T,
    bias1: T,
    bias2: T,
    beta1: T,
    beta2: T,
    rest1: T,
    rest2: T,
    eps: T,
    decay: T,
}

impl Adam {
    pub(crate) fn step<T: Real>(&self, hyper: &[T], lr: usize, norm2: &[T]) -> Step<T> {
        Step {
            factor: clip_factor(hyper, norm2),
            lr: hyper[lr] * T::of(self.lr_scale),
            bias1: hyper[1],
            bias2: hyper[2],
            beta1: T::of(self.beta1),
            beta2: T::of(self.beta2),
            rest1: T::of(1.0 - self.beta1),
            rest2: T::of(1.0 - self.beta2),
            eps: T::of(self.eps),
            decay: T::of(self.decay),
        }
    }

    /// The launch; `lazy` is (width, rows) of a table of which only some rows are touched.
    pub(crate) fn launch(
        &self,
        label: &'static str,
        elements: usize,
        lr: usize,
        lazy: Option<(usize, usize)>,
    ) -> GpuLaunch {
        let unit = unit(&[lazy.map_or(elements, |l| l.0)]);
        let total = elements / unit;
        let (width, rows) = lazy.unwrap_or((unit, 0));
        let (unique, at, p) = match lazy {
            None => ("", "let at = i;", "6"),
            Some(_) => (
                "@group(0) @binding(6) var<storage, read> ids : array<u32>;",
                "let row = ids[i / p.width];\n    if (row >= p.rows) {\n        return;\n    }\n    \
                 let at = row * p.width + i % p.width;",
                "7",
            ),
        };
        let source = typed(include_str!("../../shaders/adam.wgsl"), unit)
            .replace("{{unique}}", unique)
            .replace("{{at}}", at)
            .replace("{{lr}}", &lr.to_string())
            .replace("{{p}}", p);
        let f = |v: f64| (v as f32).to_bits();
        let params = [
            total as u32,
            (width / unit) as u32,
            rows as u32,
            f(self.beta1),
            f(self.beta2),
            f(1.0 - self.beta1),
            f(1.0 - self.beta2),
            f(self.eps),
            f(self.decay),
            f(self.lr_scale),
        ];
        Kernel {
            label: label.into(),
            source: source.into(),
            entry: "main",
            constants: vec![],
            bindings: (0..6 + lazy.is_some() as usize).map(Bind::In).collect(),
            params: words(&params),
            groups: fold_groups(total.div_ceil(64) as u64),
        }
        .into()
    }
}

/// One step over slices of equal length.
#[inline(always)]
pub(crate) fn adam<T: Real>(s: Step<T>, theta: &mut [T], m: &mut [T], v: &mut [T], g: &[T]) {
    for (((t, m), v), g) in theta.iter_mut().zip(m).zip(v).zip(g) {
        let g = s.factor * *g;
        *m = s.beta1 * *m + s.rest1 * g;
        *v = s.beta2 * *v + s.rest2 * g * g;
        let step = (*m / s.bias1) / ((*v / s.bias2).sqrt() + s.eps);
        *t -= s.lr * (step + s.decay * *t);
    }
}

/// Inputs: θ, m, v (updated), gradient, hyper, norm2.
#[derive(Clone, Debug)]
pub struct AdamW(Adam);

impl AdamW {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        const CHUNK: usize = 8192;
        let (theta, m, v) = (c.state(0), c.state(1), c.state(2));
        if left_out(c.input(5)) {
            return;
        }
        let step = self.0.step(c.input(4), 0, c.input(5));
        theta
            .par_chunks_mut(CHUNK)
            .zip(m.par_chunks_mut(CHUNK))
            .zip(v.par_chunks_mut(CHUNK))
            .zip(c.input(3).par_chunks(CHUNK))
            .for_each(|(((t, m), v), g)| {
                T::simd(
                    #[inline(always)]
                    || adam(step, t, m, v, g),
                )
            });
    }
}

impl Op for AdamW {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn outputs(&self, s: &[Shape]) -> Vec<Shape> {
        assert!(s[..4].iter().all(|x| x.len() == s[0].len()), "adamw of {s:?}");
        assert_eq!((s[4].len(), s[5].len()), (HYPER, 1));
        vec![]
    }

    fn flops(&self, inputs: &[Shape], _: &[Shape]) -> f64 {
        15.0 * inputs[0].len() as f64
    }

    fn cost(&self, inputs: &[ValueType], outputs: &[ValueType]) -> super::Cost {
        let moved = |v: &[ValueType]| v.iter().map(|v| v.bytes_of(inputs[0].shape.len())).sum();
        super::Cost {
            flops: self.flops(&shapes(inputs), &shapes(outputs)),
            read: moved(&inputs[..4]),
            written: moved(&inputs[..3]),
        }
    }

    fn vjp(&self, _: &mut Graph, _: &Vjp<'_>) -> Vec<Option<Tensor>> {
        unreachable!("adamw has no outputs")
    }

    fn mutates(&self) -> &'static [usize] {
        &[0, 1, 2]
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        self.0.launch("adamw", r.inputs[0].len(), 0, None)
    }
}

impl Graph {
    /// Updates the state `theta` and its moments `m`, `v` by `grad`, with `hyper [8]` (see [`hyper`]) and
    /// `norm2 [1]`, the squared global norm of all gradients.
    pub fn adamw(
        &mut self,
        options: Adam,
        theta: Tensor,
        m: Tensor,
        v: Tensor,
        grad: Tensor,
        hyper: Tensor,
        norm2: Tensor,
    ) {
        self.push_multi(AdamW(options), &[theta, m, v, grad, hyper, norm2]);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::copy::tests::validated;
    use super::*;

    #[test]
    fn bias_corrections_are_exact() {
        let h = hyper(0.1, 0.2, 0.9, 0.999, 1, 1.0);
        assert!((h[1] - 0.1).abs() < 1e-16 && (h[2] - 0.001).abs() < 1e-17);
        assert!((hyper(0.1, 0.2, 0.9, 0.999, 10, 1.0)[1] - (1.0 - 0.9f64.powi(10))).abs() < 1e-15);
        // β = 0: no correction
        assert_eq!(hyper(0.1, 0.2, 0.0, 0.0, 3, 1.0)[1], 1.0);
    }

    #[test]
    fn clipping_only_shortens() {
        assert_eq!(clip_factor(&[0.0f64, 0.0, 0.0, 2.0], &[16.0]), 0.5);
        assert_eq!(clip_factor(&[0.0f64, 0.0, 0.0, 2.0], &[4.0]), 1.0);
        assert_eq!(clip_factor(&[0.0f64, 0.0, 0.0, 2.0], &[0.0]), 1.0);
        assert_eq!(clip_factor(&[0.0f64, 0.0, 0.0, 0.0], &[16.0]), 1.0);
    }

    #[test]
    fn shaders_validate() {
        for n in [12, 7] {
            let s = [n];
            validated(&AdamW(Adam::default()), &[&s, &s, &s, &s, &[HYPER], &[1]]);
        }
    }

    /// Runs a graph that updates states on every executor; all states afterwards must agree with f64.
    pub(crate) fn check_update(
        build: impl Fn(&mut Graph),
        states: &[(&str, Vec<f64>)],
        ids: &[(&str, Vec<u32>)],
        tol: f64,
    ) {
        use crate::graph::StateId;
        use crate::graph::cpu::{CpuProgram, CpuState};
        use crate::graph::exec::{Device, Program, State};
        let mut g = Graph::new();
        build(&mut g);
        let mut p = CpuProgram::<f64>::new(g.clone(), &[]);
        let f32s = |v: &[f64]| v.iter().map(|x| *x as f32).collect::<Vec<_>>();
        let exact = |v: &[f64]| v.iter().map(|x| *x as f32 as f64).collect::<Vec<_>>();
        let mut want = CpuState { values: states.iter().map(|(n, v)| (n.into(), exact(v).into())).collect() };
        for (n, v) in ids {
            p.set_ids(n, v);
        }
        p.run(&mut want);
        let mut devices = vec![Device::Cpu];
        devices.extend(crate::graph::testing::software_device());
        for d in devices {
            let mut s = State::new(&d);
            for (n, v) in states {
                s.set(n, &f32s(v)).unwrap();
            }
            let mut p = Program::compile(&d, &s, &g, &[], "test").unwrap();
            for (n, v) in ids {
                p.set_ids(n, v).unwrap();
            }
            p.run(&mut s).unwrap();
            for (n, start) in states {
                let got = &pollster::block_on(s.get(&[n])).unwrap()[0];
                let want = want.values[&StateId::from(*n)].floats();
                assert!(want.iter().zip(start).any(|(a, b)| a != b), "{n} did not change");
                let top = want.iter().fold(0f64, |m, x| m.max(x.abs()));
                for (j, (w, x)) in want.iter().zip(got).enumerate() {
                    let e = (w - *x as f64).abs() / top;
                    assert!(e <= tol, "{}: {n}[{j}] is {x}, f64 says {w} (off by {e:e})", d.name());
                }
            }
        }
    }

    #[test]
    fn device() {
        use crate::graph::testing::noise;
        for (n, clip) in [(1, 0.0), (7, 0.5), (4096, 1.0), (30_001, 1000.0)] {
            let squares: Vec<f64> = noise(n, 3).iter().map(|x| x * x).collect();
            check_update(
                |g| {
                    let (t, m, v) = (g.state("t", [n]), g.state("m", [n]), g.state("v", [n]));
                    let grad = g.constant([n], noise(n, 4));
                    let n2 = g.sum_squares(&[grad]);
                    let h = g.constant([HYPER], hyper(0.01, 0.0, 0.9, 0.95, 3, clip).to_vec());
                    let o = Adam { decay: 0.1, lr_scale: 0.5, ..Adam::default() };
                    g.adamw(o, t, m, v, grad, h, n2);
                },
                &[("t", noise(n, 1)), ("m", noise(n, 2)), ("v", squares)],
                &[],
                1e-6,
            );
        }
    }
}
