//! `host`: work of the host in the middle of a graph: communication between ranks.
//!
//! An executor copies the inputs out as soon as they exist, hands them to [`HostWork::start`], goes on with whatever does
//! not need the outputs, and asks for these ([`Pending::wait`]) only where they are read. So communication overlaps with
//! computation by where its operations stand in the schedule, and the plan puts each right after its last input
//! (`graph::plan`). Without such operations a program pays nothing.

use super::{Cpu, GpuLaunch, GpuRequest, Op, Vjp};
use crate::graph::{Array, DType, Graph, Shape, Tensor};
use std::fmt::Debug;
use std::sync::Arc;

/// What the host does.
pub trait HostWork: Debug + Send + Sync {
    /// Short name.
    fn name(&self) -> &'static str;

    /// The shape rule.
    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape>;

    /// The storage types of so many outputs, of the inputs' types, as [`Op::storage`]; f32 only unless it says otherwise.
    fn storage(&self, inputs: &[DType], outputs: usize) -> Vec<DType> {
        assert!(inputs.iter().all(|d| *d == DType::F32), "{} takes f32, not {inputs:?}", self.name());
        vec![DType::F32; outputs]
    }

    /// Begins with copies of the inputs. Works of one graph are started in the same order in every run.
    fn start(&self, inputs: Vec<Array>) -> Box<dyn Pending>;
}

/// Work in progress.
pub trait Pending: Send {
    /// Waits for the outputs.
    ///
    /// # Errors
    /// One line that says what failed.
    fn wait(self: Box<Self>) -> Result<Vec<Array>, String>;
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Host(pub Arc<dyn HostWork>);

impl Op for Host {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        self.0.outputs(inputs)
    }

    fn storage(&self, inputs: &[DType], outputs: usize) -> Vec<DType> {
        self.0.storage(inputs, outputs)
    }

    fn flops(&self, _: &[Shape], _: &[Shape]) -> f64 {
        0.0
    }

    fn vjp(&self, _: &mut Graph, _: &Vjp<'_>) -> Vec<Option<Tensor>> {
        unreachable!("{}: put between ranks after the backward pass was made", self.name())
    }

    fn host(&self) -> Option<&Arc<dyn HostWork>> {
        Some(&self.0)
    }

    fn cpu32(&self, _: &mut Cpu<'_, f32>) {
        unreachable!("executors call the host's work themselves")
    }

    fn cpu64(&self, _: &mut Cpu<'_, f64>) {
        unreachable!("executors call the host's work themselves")
    }

    fn gpu(&self, _: &GpuRequest<'_>) -> GpuLaunch {
        GpuLaunch::default()
    }
}

impl Graph {
    /// Work of the host on `inputs`.
    pub fn host(&mut self, work: Arc<dyn HostWork>, inputs: &[Tensor]) -> Vec<Tensor> {
        self.push_multi(Host(work), inputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::exec::{Device, Program, State};
    use crate::graph::testing::software_device;
    use std::sync::Mutex;

    /// Doubles its inputs, and writes down what was asked of it.
    #[derive(Debug)]
    struct Double {
        label: &'static str,
        log: Arc<Mutex<Vec<String>>>,
        fails: bool,
    }

    struct Doubling {
        label: &'static str,
        log: Arc<Mutex<Vec<String>>>,
        values: Vec<Vec<f32>>,
        fails: bool,
    }

    impl HostWork for Double {
        fn name(&self) -> &'static str {
            "double"
        }
        fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
            inputs.to_vec()
        }
        fn start(&self, values: Vec<Array>) -> Box<dyn Pending> {
            let values = values.into_iter().map(Array::into_f32).collect();
            self.log.lock().unwrap().push(format!("start {}", self.label));
            Box::new(Doubling { label: self.label, log: self.log.clone(), values, fails: self.fails })
        }
    }

    impl Pending for Doubling {
        fn wait(self: Box<Self>) -> Result<Vec<Array>, String> {
            self.log.lock().unwrap().push(format!("wait {}", self.label));
            if self.fails {
                return Err("rank 3 was lost".into());
            }
            let double = |v: Vec<f32>| Array::F(v.iter().map(|x| 2.0 * x).collect());
            Ok(self.values.into_iter().map(double).collect())
        }
    }

    fn devices() -> Vec<Device> {
        [Some(Device::Cpu), software_device()].into_iter().flatten().collect()
    }

    #[test]
    fn work_begins_early_and_is_waited_for_late() {
        for device in devices() {
            let log = Arc::new(Mutex::new(vec![]));
            let work =
                |label| Arc::new(Double { label, log: log.clone(), fails: false }) as Arc<dyn HostWork>;
            let mut g = Graph::new();
            let x = g.input("x", [6]);
            let a = g.affine(x, 3.0, 1.0);
            let a = g.sum_all(a);
            // long after the value it needs was made
            let b = g.softmax(x.reshaped([2, 3]));
            let b = g.sum_squares(&[b]);
            let da = g.host(work("a"), &[a, x])[0];
            let db = g.host(work("b"), &[b])[0];
            // nobody reads it, but the other ranks wait for it
            g.host(work("c"), &[b]);
            let y = g.add(da, db);
            let mut state = State::new(&device);
            let mut p = Program::compile(&device, &state, &g, &[y, da, db], "test").unwrap();
            for k in 0..3 {
                p.set("x", &[1.0, 2.0, 3.0, 4.0, 5.0, k as f32]).unwrap();
                p.run(&mut state).unwrap();
                let v = pollster::block_on(p.read(&[0, 1, 2])).unwrap();
                assert_eq!(v[1], [2.0 * (3.0 * (15.0 + k as f32) + 6.0)], "{}", device.name());
                assert!((v[0][0] - v[1][0] - v[2][0]).abs() < 1e-4 && v[2][0] > 0.0);
            }
            let log = log.lock().unwrap();
            let first: Vec<&str> = log[..6].iter().map(String::as_str).collect();
            assert_eq!(first, ["start a", "start b", "start c", "wait a", "wait b", "wait c"]);
        }
    }

    #[test]
    fn a_failure_ends_the_run() {
        for device in devices() {
            let mut g = Graph::new();
            let x = g.input("x", [2]);
            let x = g.affine(x, 1.0, 0.0);
            let work = Arc::new(Double { label: "a", log: Arc::default(), fails: true });
            let y = g.host(work, &[x])[0];
            let y = g.add(y, y);
            let mut state = State::new(&device);
            let mut p = Program::compile(&device, &state, &g, &[y], "test").unwrap();
            let e = p.run(&mut state).unwrap_err().to_string();
            assert_eq!(e, "rank 3 was lost");
        }
    }
}
