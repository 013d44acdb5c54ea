//! `guard`: keeps a step that went wrong from spoiling the state. guard `[2]` (state), loss `[1]`, norm2 `[1]`,
//! hyper `[8]` → `[1]`: norm2, or −1 from the first step on whose loss or gradient norm is not finite.
//!
//! The state is zero until then; it then holds that step's number, `hyper[5] + 65536·hyper[6]`, and stays. An optimiser
//! that is given −1 for the squared norm leaves everything as it is: the state on the device remains that before the
//! bad step, however many steps follow before the host looks.

use super::{Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp};
use crate::cpu_both;
use crate::gpu::kernel::{Bind, Kernel};
use crate::graph::{Graph, Shape, Tensor};

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Guard;

impl Guard {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (loss, norm2, hyper) = (c.input(1)[0], c.input(2)[0], c.input(3));
        let step = [hyper[5], hyper[6]];
        let state = c.state(0);
        let finite = |x: T| x.f64().is_finite();
        if state[0] == T::ZERO && state[1] == T::ZERO && !(finite(loss) && finite(norm2)) {
            state.copy_from_slice(&step);
        }
        let good = state[0] == T::ZERO && state[1] == T::ZERO;
        c.output(0)[0] = if good { norm2 } else { -T::ONE };
    }
}

impl Op for Guard {
    fn name(&self) -> &'static str {
        "guard"
    }

    fn outputs(&self, s: &[Shape]) -> Vec<Shape> {
        assert_eq!((s[0].len(), s[1].len(), s[2].len(), s[3].len()), (2, 1, 1, super::optim::HYPER));
        vec![Shape::new(&[1])]
    }

    fn flops(&self, _: &[Shape], _: &[Shape]) -> f64 {
        0.0
    }

    fn vjp(&self, _: &mut Graph, _: &Vjp<'_>) -> Vec<Option<Tensor>> {
        unreachable!("guard stands after the gradients")
    }

    fn mutates(&self) -> &'static [usize] {
        &[0]
    }

    cpu_both!();

    fn gpu(&self, _: &GpuRequest<'_>) -> GpuLaunch {
        Kernel {
            label: "guard".into(),
            source: include_str!("../../shaders/guard.wgsl").into(),
            entry: "main",
            constants: vec![],
            bindings: vec![Bind::In(0), Bind::In(1), Bind::In(2), Bind::In(3), Bind::Out(0)],
            params: vec![],
            groups: [1, 1, 1],
        }
        .into()
    }
}

impl Graph {
    /// `norm2`, or −1 once a loss or squared norm was not finite; `guard [2]` then holds the step. See
    /// [`super::guard`].
    pub fn guard(&mut self, guard: Tensor, loss: Tensor, norm2: Tensor, hyper: Tensor) -> Tensor {
        self.push(Guard, &[guard, loss, norm2, hyper])
    }
}

#[cfg(test)]
mod tests {
    use super::super::copy::tests::validated;
    use super::*;
    use crate::graph::exec::{Device, Program, State};
    use crate::graph::testing::software_device;
    use crate::ops::optim::{Adam, HYPER};

    #[test]
    fn shader_validates() {
        validated(&Guard, &[&[2], &[1], &[1], &[HYPER]]);
    }

    /// A state that is touched only by good steps, in every optimiser; sticky; the first bad step is named.
    #[test]
    fn bad_steps_change_nothing_on_any_device() {
        let mut g = Graph::new();
        let (loss, n2) = (g.input("loss", [1]), g.input("norm2", [1]));
        let hyper = g.input("hyper", [HYPER]);
        let grad = g.input("grad", [6]);
        let unique = g.input_ids("unique", [2]);
        let guard = g.state("guard", [2]);
        let n = g.guard(guard, loss, n2, hyper);
        let s = |g: &mut Graph, name: &str, shape: &[usize]| g.state(name, shape);
        let (t, m, v) = (s(&mut g, "t", &[6]), s(&mut g, "m", &[6]), s(&mut g, "v", &[6]));
        g.adamw(Adam::default(), t, m, v, grad, hyper, n);
        let (e, em, ev) = (s(&mut g, "e", &[4, 3]), s(&mut g, "em", &[4, 3]), s(&mut g, "ev", &[4, 3]));
        let rows = grad.reshaped([2, 3]);
        g.lazy_adam(Adam::default(), e, em, ev, rows, unique, hyper, n);
        let (a, acc) = (s(&mut g, "a", &[4, 3]), s(&mut g, "acc", &[4]));
        g.row_adagrad(1e-8, a, acc, rows, unique, hyper, n);
        let names = ["t", "m", "v", "e", "em", "ev", "a", "acc"];
        for device in [Some(Device::Cpu), software_device()].into_iter().flatten() {
            let mut state = State::new(&device);
            state.set("guard", &[0.0, 0.0]).unwrap();
            for (name, shape) in g.states().into_iter().filter(|s| s.0 != "guard".into()) {
                state.set(&name, &vec![0.5; shape.len()]).unwrap();
            }
            let mut p = Program::compile(&device, &state, &g, &[n], "guard").unwrap();
            p.set_ids("unique", &[1, 3]).unwrap();
            let mut step = |state: &mut State, number: u32, loss: f32, norm2: f32, grad: f32| {
                p.set("loss", &[loss]).unwrap();
                p.set("norm2", &[norm2]).unwrap();
                p.set("grad", &[grad; 6]).unwrap();
                let (low, high) = ((number & 0xFFFF) as f32, (number >> 16) as f32);
                p.set("hyper", &[0.1, 0.1, 0.1, 1.0, 0.1, low, high, 0.0]).unwrap();
                p.run(state).unwrap();
                let v = pollster::block_on(state.get(&names)).unwrap();
                (v, pollster::block_on(state.get(&["guard"])).unwrap().remove(0))
            };
            let name = device.name();
            let (start, _) = step(&mut state, 1, 0.7, 4.0, 0.3);
            for bad in [(f32::NAN, 1.0), (0.7, f32::INFINITY), (f32::NEG_INFINITY, 1.0), (0.7, f32::NAN)] {
                state.set("guard", &[0.0, 0.0]).unwrap();
                let (same, at) = step(&mut state, 65_536 + 9, bad.0, bad.1, f32::NAN);
                assert_eq!((&same, at), (&start, vec![9.0, 1.0]), "{name} {bad:?}");
                let (same, at) = step(&mut state, 65_536 + 10, 0.7, 4.0, 0.3);
                assert_eq!((&same, at), (&start, vec![9.0, 1.0]), "{name}: it stays");
            }
            state.set("guard", &[0.0, 0.0]).unwrap();
            let (moved, at) = step(&mut state, 2, 0.7, 4.0, 0.3);
            assert_eq!(at, [0.0, 0.0]);
            for ((was, is), what) in start.iter().zip(&moved).zip(names) {
                assert_ne!(was, is, "{name}: a good step moves {what}");
            }
        }
    }
}
