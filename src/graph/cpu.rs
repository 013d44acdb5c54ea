//! The CPU executor: the graph in f32 (the fallback where there is no GPU) or f64 (the oracle).

use super::plan::{Plan, plan};
use super::{Array, DType, Graph, InputId, Node, Role, Source, StateId, Tensor};
use crate::gpu::GpuError;
use crate::ops::cpu::{Cpu, Slot};
use crate::ops::host::Pending;
use crate::ops::{Real, round};
use std::any::TypeId;
use std::borrow::Cow;
use std::collections::HashMap;
use std::time::Duration;
use web_time::Instant;

/// Persistent values.
#[derive(Clone, Debug, Default)]
pub struct CpuState<T> {
    /// Parameters and optimiser state.
    pub values: HashMap<StateId, Array<T>>,
}

/// A compiled graph.
pub struct CpuProgram<T> {
    graph: Graph,
    plan: Plan,
    /// An element for every four bytes of the plan's; those of a 16-bit value are seen as u16.
    buffers: Vec<Vec<T>>,
    inputs: HashMap<InputId, Array<T>>,
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

/// The first elements of a buffer as a value of a type.
fn slot_of<T: Real>(b: &mut [T], dtype: DType, len: usize) -> Slot<T> {
    assert!(dtype.bytes(len) <= 4 * b.len(), "the plan's buffers fit their values");
    match dtype {
        DType::F32 => Slot::F(b.as_mut_ptr(), len),
        DType::F16 | DType::BF16 => Slot::H(b.as_mut_ptr().cast(), len),
        DType::U32 => panic!("no operation makes ids"),
    }
}

/// A whole array, as an operation sees it.
fn slot<T: Real>(a: &mut Array<T>) -> Slot<T> {
    match a {
        Array::F(v) => Slot::F(v.as_mut_ptr(), v.len()),
        Array::H(_, v) => Slot::H(v.as_mut_ptr(), v.len()),
        Array::U(v) => Slot::U(v.as_ptr(), v.len()),
    }
}

impl<T: Real> CpuProgram<T> {
    /// Plans and allocates. `keep` are the values that will be read.
    pub fn new(graph: Graph, keep: &[Tensor]) -> Self {
        let plan = plan(&graph, keep, &|_| vec![], &|op| op.may_alias());
        Self::planned(graph, plan)
    }

    /// The same unless the machine has no memory for it: then how many bytes it takes.
    pub fn new_within(graph: Graph, keep: &[Tensor]) -> Result<Self, u64> {
        let plan = plan(&graph, keep, &|_| vec![], &|op| op.may_alias());
        let inputs = graph.values.iter().filter(|v| matches!(v.source, Source::Input(_)));
        let values = inputs.map(|v| v.shape.len()).chain(plan.buffers.iter().map(|bytes| bytes.div_ceil(4)));
        let bytes = values.fold(0u64, |sum, n| sum.saturating_add((n * size_of::<T>()) as u64));
        match crate::memory::lacks(bytes as usize) {
            Some(_) => Err(bytes),
            None => Ok(Self::planned(graph, plan)),
        }
    }

    fn planned(graph: Graph, plan: Plan) -> Self {
        let buffers = plan.buffers.iter().map(|&bytes| vec![T::ZERO; bytes.div_ceil(4)]).collect();
        let mut inputs = HashMap::new();
        let mut constants = HashMap::new();
        for (i, v) in graph.values.iter().enumerate() {
            match &v.source {
                Source::Input(n) => {
                    inputs.insert(n.clone(), Array::zeros(v.dtype, v.shape.len()));
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

    /// Copies floats into an input; one of 16 bits gets the nearest.
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
            Some(Array::F(b)) => {
                assert_eq!(b.len(), data.len(), "input {id}");
                b.iter_mut().zip(data).for_each(|(b, x)| *b = of(*x));
            }
            Some(Array::H(dtype, b)) => {
                assert_eq!(b.len(), data.len(), "input {id}");
                b.iter_mut().zip(data).for_each(|(b, x)| *b = round::store(*dtype, of(*x)));
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
            Some(Array::U(b)) => b.copy_from_slice(data),
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
                        slot_of(&mut self.buffers[self.plan.buffer_of[&t.index()]], v.dtype, len)
                    }
                    Source::Const(_) => Slot::F(self.constants[&t.index()].as_ptr() as *mut T, len),
                    Source::State(name) => {
                        let b = state.values.get_mut(name).unwrap_or_else(|| panic!("no state named {name}"));
                        assert_eq!((b.len(), b.dtype()), (len, v.dtype), "state {name}");
                        slot(b)
                    }
                    Source::Input(name) => slot(self.inputs.get_mut(name).expect("made in new")),
                });
            }
            let outputs = node
                .outputs
                .iter()
                .map(|t| {
                    let dtype = self.graph.values[t.index()].dtype;
                    slot_of(&mut self.buffers[self.plan.buffer_of[&t.index()]], dtype, t.shape().len())
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
                let made = self.graph.value_type(*t);
                assert_eq!((v.dtype(), v.len()), (made.dtype, made.shape.len()), "the host's work");
                match v {
                    Array::F(v) => b.iter_mut().zip(v).for_each(|(b, v)| *b = T::of(f64::from(v))),
                    Array::H(_, v) => bytemuck::cast_slice_mut(b)[..v.len()].copy_from_slice(&v),
                    Array::U(_) => unreachable!("no operation makes ids"),
                }
            }
        }
        Ok(())
    }

    /// A value of any kind, as the host's work takes it.
    fn value(&self, state: &CpuState<T>, t: Tensor) -> Array {
        let f32s = |v: &[T]| Array::F(v.iter().map(|x| x.f64() as f32).collect());
        let whole = |a: &Array<T>| match a {
            Array::F(v) => f32s(v),
            Array::H(dtype, v) => Array::H(*dtype, v.clone()),
            Array::U(v) => Array::U(v.clone()),
        };
        let v = &self.graph.values[t.index()];
        match &v.source {
            Source::State(id) => whole(&state.values[id]),
            Source::Input(id) => whole(&self.inputs[id]),
            Source::Node(..) if v.dtype.is_half() => Array::H(v.dtype, self.halves(t).to_vec()),
            Source::Node(..) | Source::Const(_) => f32s(&self.floats(t)),
        }
    }

    /// The bits of a computed 16-bit value.
    fn halves(&self, t: Tensor) -> &[u16] {
        let b = &self.buffers[self.plan.buffer_of[&t.index()]];
        &bytemuck::cast_slice(b)[..t.shape().len()]
    }

    /// The numbers of a value that is no state.
    fn floats(&self, t: Tensor) -> Cow<'_, [T]> {
        let v = &self.graph.values[t.index()];
        match &v.source {
            Source::Const(_) => Cow::Borrowed(&self.constants[&t.index()]),
            Source::Input(id) => self.inputs[id].floats(),
            _ if v.dtype.is_half() => {
                Cow::Owned(self.halves(t).iter().map(|h| round::load(v.dtype, *h)).collect())
            }
            _ => Cow::Borrowed(&self.buffers[self.plan.buffer_of[&t.index()]][..t.shape().len()]),
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
                if !self.plan.buffer_of.contains_key(&t.index()) {
                    continue;
                }
                let values = self.floats(*t);
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
                Source::Node(..) => self.floats(*t),
                Source::State(id) => state.values.get(id).map_or(Cow::Borrowed(&[][..]), Array::floats),
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
        self.floats(t).into_owned()
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
