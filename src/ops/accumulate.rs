//! `accumulate`: `state += x`, elementwise. Keeps running sums (the loss) on the device between read-backs.

use super::{Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp};
use crate::cpu_both;
use crate::gpu::kernel::{Bind, Kernel, fold_groups};
use crate::graph::{Graph, Shape, Tensor};

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Accumulate;

impl Accumulate {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let x = c.input(1);
        for (s, x) in c.state(0).iter_mut().zip(x) {
            *s += *x;
        }
    }
}

impl Op for Accumulate {
    fn name(&self) -> &'static str {
        "accumulate"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        assert_eq!(inputs[0].len(), inputs[1].len());
        vec![]
    }

    fn flops(&self, inputs: &[Shape], _: &[Shape]) -> f64 {
        inputs[0].len() as f64
    }

    fn vjp(&self, _: &mut Graph, _: &Vjp<'_>) -> Vec<Option<Tensor>> {
        vec![None, None]
    }

    fn mutates(&self) -> &'static [usize] {
        &[0]
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let n = r.inputs[0].len();
        Kernel {
            label: "accumulate".into(),
            source: include_str!("../../shaders/accumulate.wgsl").into(),
            entry: "main",
            constants: vec![],
            bindings: vec![Bind::In(0), Bind::In(1)],
            params: bytemuck::bytes_of(&(n as u32)).to_vec(),
            groups: fold_groups(n.div_ceil(64) as u64),
        }
        .into()
    }
}

impl Graph {
    /// `state += x` whenever the graph runs.
    pub fn accumulate_into(&mut self, state: Tensor, x: Tensor) {
        self.push_multi(Accumulate, &[state, x]);
    }
}
