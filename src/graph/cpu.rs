//! The CPU executor: the graph in f32 (the fallback where there is no GPU) or f64 (the oracle).

use super::plan::{Plan, plan};
use super::{DType, Graph, InputId, Node, Role, Source, StateId, Tensor};
use crate::gpu::GpuError;
use crate::ops::Real;
use crate::ops::cpu::{Cpu, Slot};
use crate::ops::host::Pending;
use std::any::TypeId;
use std::collections::HashMap;
use std::time::Duration;
use web_time::Instant;

/// Persistent values.
#[derive(Clone, Debug, Default)]
pub struct CpuState<T> {
    /// Parameters and optimiser state.
    pub values: HashMap<StateId, Vec<T>>,
}

/// A compiled graph.
pub struct CpuProgram<T> {
    graph: Graph,
    plan: Plan,
    buffers: Vec<Vec<T>>,
    inputs: HashMap<InputId, InputBuffer<T>>,
    constants: HashMap<usize, Vec<T>>,
    /// Work of the host in progress, by node; and before which place of the order each is waited for, first to last.
    pending: HashMap<usize, Box<dyn Pending>>,
    waits: HashMap<usize, Vec<usize>>,
    /// Time in each node, when profiling.
    times: Option<Vec<Duration>>,
}

/// A value with numbers that are not finite.
#[derive(Clone, Debug, PartialEq)]
pub struct BadValue {
    /// Its name, or the operation that made it and where, with its shape.
    pub tensor: String,
    /// The operation that made it.
    pub op: &'static str,
    /// Where that stands in the model.
    pub scope: String,
    /// What it is for.
    pub role: Role,
    /// The computed value or state with the largest number that the operation read, and that number.
    pub largest: Option<(String, f64)>,
    /// Numbers that are not finite.
    pub bad: usize,
    /// Of how many.
    pub of: usize,
}

enum InputBuffer<T> {
    F(Vec<T>),
    U(Vec<u32>),
}

impl<T: Real> CpuProgram<T> {
    /// Plans and allocates. `keep` are the values that will be read.
    pub fn new(graph: Graph, keep: &[Tensor]) -> Self {
        let plan = plan(&graph, keep, &|_| vec![], &|op| op.may_alias());
        let buffers = plan.buffers.iter().map(|&n| vec![T::ZERO; n]).collect();
        let mut inputs = HashMap::new();
        let mut constants = HashMap::new();
        for (i, v) in graph.values.iter().enumerate() {
            match &v.source {
                Source::Input(n) => {
                    let len = v.shape.len();
                    let b = match v.dtype {
                        DType::F32 => InputBuffer::F(vec![T::ZERO; len]),
                        DType::U32 => InputBuffer::U(vec![0; len]),
                    };
                    inputs.insert(n.clone(), b);
                }
                Source::Const(c) => {
                    constants.insert(i, c.iter().map(|&x| T::of(x)).collect());
                }
                _ => {}
            }
        }
        let waits = plan.waits(&graph);
        CpuProgram { graph, plan, buffers, inputs, constants, pending: HashMap::new(), waits, times: None }
    }

    /// The memory plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Whether the graph reads this input.
    pub fn has_input(&self, id: impl Into<InputId>) -> bool {
        self.inputs.contains_key(&id.into())
    }

    /// Copies floats into an input.
    ///
    /// # Panics
    /// If there is no such input or its size differs.
    pub fn set(&mut self, id: impl Into<InputId>, data: &[f32]) {
        self.set_with(&id.into(), data, |x| T::of(f64::from(x)));
    }

    /// Copies floats into an input at full precision.
    ///
    /// # Panics
    /// As [`CpuProgram::set`].
    pub fn set64(&mut self, id: impl Into<InputId>, data: &[f64]) {
        self.set_with(&id.into(), data, T::of);
    }

    fn set_with<X: Copy>(&mut self, id: &InputId, data: &[X], of: impl Fn(X) -> T) {
        match self.inputs.get_mut(id) {
            Some(InputBuffer::F(b)) => {
                assert_eq!(b.len(), data.len(), "input {id}");
                b.iter_mut().zip(data).for_each(|(b, x)| *b = of(*x));
            }
            _ => panic!("no float input named {id}"),
        }
    }

    /// Copies ids into an input.
    ///
    /// # Panics
    /// As [`CpuProgram::set`].
    pub fn set_ids(&mut self, id: impl Into<InputId>, data: &[u32]) {
        let id = id.into();
        match self.inputs.get_mut(&id) {
            Some(InputBuffer::U(b)) => b.copy_from_slice(data),
            _ => panic!("no id input named {id}"),
        }
    }

    /// Measure the time of each node from now on.
    pub fn profile(&mut self) {
        self.times = Some(vec![Duration::ZERO; self.graph.nodes.len()]);
    }

    /// Whether times are measured.
    pub fn is_profiling(&self) -> bool {
        self.times.is_some()
    }

    /// Measures no longer.
    pub fn stop_profile(&mut self) {
        self.times = None;
    }

    /// Time in each node since [`CpuProgram::profile`].
    pub fn times(&self) -> impl Iterator<Item = (&Node, Duration)> {
        let t = self.times.as_deref().unwrap_or_default();
        self.plan.order.iter().filter_map(|&n| t.get(n).map(|d| (&self.graph.nodes[n], *d)))
    }

    /// Executes every node once.
    ///
    /// # Panics
    /// If a state is missing or has another size than the graph's, or the host's work fails.
    pub fn run(&mut self, state: &mut CpuState<T>) {
        self.run_some(state, 0, &mut || false).expect("the host's work is done");
    }

    /// Executes nodes from the `at`-th on. `pause` is asked after each: once it says yes, the place to go on
    /// from is returned. `None`: all are done.
    ///
    /// # Errors
    /// If the host's work fails.
    ///
    /// # Panics
    /// If a state is missing or has another size than the graph's.
    pub fn run_some(
        &mut self,
        state: &mut CpuState<T>,
        at: usize,
        pause: &mut dyn FnMut() -> bool,
    ) -> Result<Option<usize>, GpuError> {
        if at == 0 {
            // a run that failed may have left some
            self.pending.clear();
        }
        for at in at..self.plan.order.len() {
            let n = self.plan.order[at];
            let begin = self.times.is_some().then(Instant::now);
            self.wait_before(at)?;
            let node = &self.graph.nodes[n];
            if let Some(work) = node.op.host() {
                let work = work.clone();
                let inputs = node.inputs.iter().map(|t| self.value(state, *t)).collect();
                self.pending.insert(n, work.start(inputs));
                continue;
            }
            let mut inputs = Vec::with_capacity(node.inputs.len());
            for t in &node.inputs {
                let v = &self.graph.values[t.index()];
                let len = t.shape().len();
                inputs.push(match &v.source {
                    Source::Node(..) => {
                        let b = &mut self.buffers[self.plan.buffer_of[&t.index()]];
                        Slot::F(b.as_mut_ptr(), len)
                    }
                    Source::Const(_) => Slot::F(self.constants[&t.index()].as_ptr() as *mut T, len),
                    Source::State(name) => {
                        let b = state.values.get_mut(name).unwrap_or_else(|| panic!("no state named {name}"));
                        assert_eq!(b.len(), len, "state {name}");
                        Slot::F(b.as_mut_ptr(), len)
                    }
                    Source::Input(name) => match self.inputs.get_mut(name).expect("made in new") {
                        InputBuffer::F(b) => Slot::F(b.as_mut_ptr(), len),
                        InputBuffer::U(b) => Slot::U(b.as_ptr(), len),
                    },
                });
            }
            let outputs = node
                .outputs
                .iter()
                .map(|t| {
                    let b = &mut self.buffers[self.plan.buffer_of[&t.index()]];
                    Slot::F(b.as_mut_ptr(), t.shape().len())
                })
                .collect();
            // SAFETY: buffers outlive the call; the plan gives outputs buffers of their own except for
            // pairs in may_alias; states are separate allocations, and a node names each at most once.
            let ctx = unsafe { Cpu::new(inputs, outputs) };
            call(node.op.as_ref(), ctx);
            if let (Some(b), Some(t)) = (begin, &mut self.times) {
                t[n] += b.elapsed();
            }
            if at + 1 < self.plan.order.len() && pause() {
                return Ok(Some(at + 1));
            }
        }
        self.wait_before(self.plan.order.len())?;
        Ok(None)
    }

    /// Takes the outputs of the host's work that the operation at this place of the order reads.
    fn wait_before(&mut self, at: usize) -> Result<(), GpuError> {
        let Some(nodes) = self.waits.get(&at) else { return Ok(()) };
        for n in nodes {
            let pending = self.pending.remove(n).expect("started before");
            let values = pending.wait().map_err(GpuError::Host)?;
            for (t, v) in self.graph.nodes[*n].outputs.iter().zip(values) {
                let b = &mut self.buffers[self.plan.buffer_of[&t.index()]];
                for (b, v) in b[..t.shape().len()].iter_mut().zip(v) {
                    *b = T::of(f64::from(v));
                }
            }
        }
        Ok(())
    }

    /// A value of any kind, as the host's work takes it.
    fn value(&self, state: &CpuState<T>, t: Tensor) -> Vec<f32> {
        let f32s = |v: &[T]| v.iter().map(|x| x.f64() as f32).collect();
        match &self.graph.values[t.index()].source {
            Source::State(name) => f32s(&state.values[name]),
            _ => f32s(&self.read(t)),
        }
    }

    /// Executes nodes up to the first that makes a number that is not finite, or that would update a state: what came
    /// first to be not finite, if anything did.
    pub fn first_bad(&mut self, state: &mut CpuState<T>) -> Option<BadValue> {
        for at in 0..self.plan.order.len() {
            let n = self.plan.order[at];
            if !self.graph.nodes[n].op.mutates().is_empty() {
                return None;
            }
            if self.run_some(state, at, &mut || true).is_err() {
                return None;
            }
            let node = &self.graph.nodes[n];
            for t in &node.outputs {
                let Some(b) = self.plan.buffer_of.get(&t.index()) else { continue };
                let values = &self.buffers[*b][..t.shape().len()];
                let bad = values.iter().filter(|x| !x.f64().is_finite()).count();
                if bad > 0 {
                    return Some(BadValue {
                        largest: self.largest_input(state, n),
                        tensor: self.graph.describe(*t),
                        op: node.op.name(),
                        scope: node.scope.to_string(),
                        role: node.role,
                        bad,
                        of: values.len(),
                    });
                }
            }
        }
        None
    }

    /// The input of a node with the largest number, and that number; of those that it has not overwritten.
    fn largest_input(&self, state: &CpuState<T>, n: usize) -> Option<(String, f64)> {
        let node = &self.graph.nodes[n];
        let gone = self.plan.in_place.get(&n).map(|(i, _)| *i);
        let mut best: Option<(String, f64)> = None;
        for (_, t) in node.inputs.iter().enumerate().filter(|(i, _)| Some(*i) != gone) {
            let values = match &self.graph.values[t.index()].source {
                Source::Node(..) => &self.buffers[self.plan.buffer_of[&t.index()]][..t.shape().len()],
                Source::State(name) => state.values.get(name).map_or(&[][..], Vec::as_slice),
                Source::Input(_) | Source::Const(_) => continue,
            };
            let top = values.iter().fold(0f64, |m, x| m.max(x.f64().abs()));
            if best.as_ref().is_none_or(|b| top > b.1) {
                best = Some((self.graph.describe(*t), top));
            }
        }
        best
    }

    /// The value of a kept tensor, or of an input.
    pub fn read(&self, t: Tensor) -> Vec<T> {
        match &self.graph.values[t.index()].source {
            Source::Const(_) => self.constants[&t.index()].clone(),
            Source::Input(n) => match &self.inputs[n] {
                InputBuffer::F(b) => b.clone(),
                InputBuffer::U(b) => b.iter().map(|&x| T::of(x as f64)).collect(),
            },
            _ => self.buffers[self.plan.buffer_of[&t.index()]][..t.shape().len()].to_vec(),
        }
    }
}

/// `cpu32` or `cpu64`, whichever `T` is.
fn call<T: Real>(op: &dyn crate::ops::Op, mut c: Cpu<'_, T>) {
    let p = &mut c as *mut Cpu<'_, T>;
    // SAFETY: T is exactly the type named by the TypeId, so the two Cpu types are the same type.
    unsafe {
        if TypeId::of::<T>() == TypeId::of::<f32>() {
            op.cpu32(&mut *(p as *mut Cpu<'_, f32>));
        } else {
            assert!(TypeId::of::<T>() == TypeId::of::<f64>());
            op.cpu64(&mut *(p as *mut Cpu<'_, f64>));
        }
    }
}
