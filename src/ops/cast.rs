//! `cast`: the same numbers in another storage type, `[…]` → `[…]`. To 16 bits they are rounded to nearest, ties to even
//! ([`super::round`]); to 32 bits nothing changes. Also the only operation that reads or writes 16-bit values so far.
//!
//! On the device two halves share a u32, which every adapter has: no `shader-f16`. The shader works on bit patterns, so that
//! its results are those of the CPU to the bit, subnormals included.

use super::copy::words;
use super::{Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp, round};
use crate::cpu_both;
use crate::gpu::kernel::{Bind, Kernel, fold_groups};
use crate::graph::{DType, Form, Graph, Shape, Tensor};
use crate::par::*;

/// See the module's documentation. One of the two is f32.
#[derive(Clone, Debug)]
pub struct Cast {
    from: DType,
    to: DType,
}

impl Cast {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        const TASK: usize = 1 << 14;
        if self.to.is_half() {
            let (x, y) = (c.input(0), c.output_halves(0));
            y.par_chunks_mut(TASK).zip(x.par_chunks(TASK)).for_each(|(y, x)| {
                y.iter_mut().zip(x).for_each(|(y, x)| *y = round::store(self.to, *x));
            });
        } else {
            let (x, y) = (c.halves(0), c.output(0));
            y.par_chunks_mut(TASK).zip(x.par_chunks(TASK)).for_each(|(y, x)| {
                y.iter_mut().zip(x).for_each(|(y, x)| *y = round::load(self.from, *x));
            });
        }
    }
}

impl Op for Cast {
    fn name(&self) -> &'static str {
        "cast"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        vec![inputs[0]]
    }

    fn storage(&self, inputs: &[DType], _: usize) -> Vec<DType> {
        assert_eq!(inputs, [self.from], "a cast of another type");
        vec![self.to]
    }

    fn form(&self, inputs: &[Form]) -> Form {
        inputs[0]
    }

    fn flops(&self, _: &[Shape], _: &[Shape]) -> f64 {
        0.0
    }

    /// The gradient has the type of its value: rounded on its way to a half, exact on its way from one.
    fn vjp(&self, g: &mut Graph, v: &Vjp<'_>) -> Vec<Option<Tensor>> {
        let dy = v.grads[0].expect("called with a gradient");
        vec![Some(g.cast(dy, self.from))]
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let n = r.outputs[0].len();
        let pairs = n.div_ceil(2);
        let (half, entry) = match self.to {
            DType::F32 => (self.from, "widened"),
            to => (to, "narrowed"),
        };
        let kind = if half == DType::F16 { "f16" } else { "bf16" };
        Kernel {
            label: "cast".into(),
            source: include_str!("../../shaders/cast.wgsl")
                .replace("{{half}}", kind)
                .replace("{{body}}", entry)
                .into(),
            entry: "main",
            constants: vec![],
            bindings: vec![Bind::In(0), Bind::Out(0)],
            params: words(&[n as u32, pairs as u32]),
            groups: fold_groups(pairs.div_ceil(64) as u64),
        }
        .into()
    }
}

impl Graph {
    /// The same numbers stored as `to`; what is stored so already stays as it is. From one half to the other by way of f32.
    ///
    /// # Panics
    /// Of ids, or to ids.
    pub fn cast(&mut self, x: Tensor, to: DType) -> Tensor {
        let from = self.value(x).dtype;
        assert!(from != DType::U32 && to != DType::U32, "ids are no floats");
        match (from, to) {
            (a, b) if a == b => x,
            (a, b) if a.is_half() && b.is_half() => {
                let wide = self.cast(x, DType::F32);
                self.cast(wide, to)
            }
            (from, to) => self.push(Cast { from, to }, &[x]),
        }
    }
}

#[cfg(test)]
#[path = "cast_tests.rs"]
mod tests;
