//! The device executor: the same graph as one prepared list of dispatches.
//!
//! Everything is decided when the program is made: shaders, sizes, buffers, bind groups. A step uploads
//! its inputs, submits, and returns; nothing is read back unless asked for.

use super::exec::NodeTime;
use super::plan::{Plan, plan};
use super::{Graph, InputId, Role, Source, StateId, Tensor};
#[cfg(not(target_arch = "wasm32"))]
use crate::gpu::buffer::ReadBack;
use crate::gpu::kernel::{Bind, Kernel};
use crate::gpu::{Buffer, CommandList, Gpu, GpuError, Launch, Profile, Region};
use crate::ops::host::HostWork;
#[cfg(not(target_arch = "wasm32"))]
use crate::ops::host::Pending;
use crate::ops::{GpuCaps, GpuLaunch, GpuRequest, Op};
use std::collections::HashMap;
#[cfg(not(target_arch = "wasm32"))]
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Persistent values on the device.
#[derive(Debug)]
pub struct GpuState {
    gpu: Gpu,
    values: HashMap<StateId, (Buffer, usize)>,
}

impl GpuState {
    /// No values yet.
    pub fn new(gpu: &Gpu) -> Self {
        GpuState { gpu: gpu.clone(), values: HashMap::new() }
    }

    /// Creates or overwrites a value.
    pub fn set(&mut self, id: &StateId, data: &[f32]) -> Result<(), GpuError> {
        match self.values.get(id) {
            Some((b, n)) if *n == data.len() => self.gpu.write(b, 0, data),
            _ => {
                let b = self.gpu.create_buffer_with(&id.to_string(), data)?;
                self.values.insert(id.clone(), (b, data.len()));
                Ok(())
            }
        }
    }

    /// Copies values to the host.
    pub async fn get(&self, ids: &[StateId]) -> Result<Vec<Vec<f32>>, GpuError> {
        let reads: Vec<_> = ids
            .iter()
            .map(|id| {
                let (b, len) = self.values.get(id).unwrap_or_else(|| panic!("no state named {id}"));
                (b, 0..*len as u64)
            })
            .collect();
        self.gpu.read_many_async(&reads).await
    }
}

/// A compiled graph on a device.
#[derive(Debug)]
pub struct GpuProgram {
    gpu: Gpu,
    plan: Plan,
    commands: CommandList,
    /// Operation, scope and role of each dispatch.
    origins: Vec<(&'static str, Arc<str>, Role)>,
    inputs: HashMap<InputId, Buffer>,
    /// Kept values and inputs: where to read them.
    readable: HashMap<usize, (Buffer, usize)>,
    host: Vec<HostNode>,
    /// The run's order; empty where the host has no work.
    #[cfg_attr(target_arch = "wasm32", allow(dead_code))]
    stages: Vec<Stage>,
}

/// A part of a run; numbers are places in `host`.
#[derive(Clone, Debug)]
#[cfg_attr(target_arch = "wasm32", allow(dead_code))]
enum Stage {
    Launch(Range<usize>),
    Begin(usize),
    Wait(usize),
}

/// Work of the host.
#[derive(Debug)]
#[cfg_attr(target_arch = "wasm32", allow(dead_code))]
struct HostNode {
    work: Arc<dyn HostWork>,
    inputs: Vec<(Buffer, usize)>,
    outputs: Vec<(Buffer, usize)>,
}

/// The launches of every node that the kept values need, without a device: what a test validates, and what
/// [`GpuProgram`] compiles. Also the memory plan.
pub fn lower(g: &Graph, keep: &[Tensor], caps: &GpuCaps) -> (Plan, Vec<(usize, GpuLaunch)>) {
    // sharing a buffer changes the shader, scratch sizes change the plan: plan once for sharing with the
    // scratch that the launches will ask for, which does not depend on sharing
    let shapes = |ts: &[Tensor]| ts.iter().map(Tensor::shape).collect::<Vec<_>>();
    let launch = |n: usize, in_place| {
        let node = &g.nodes[n];
        let (inputs, outputs) = (shapes(&node.inputs), shapes(&node.outputs));
        node.op.gpu(&GpuRequest { inputs: &inputs, outputs: &outputs, in_place, caps })
    };
    let p = plan(g, keep, &|n| launch(n, None).scratch, &|op: &dyn Op| op.may_alias_gpu());
    let launches = p.order.iter().map(|&n| (n, launch(n, p.in_place.get(&n).copied()))).collect();
    (p, launches)
}

/// What a computed value's buffer is called in errors.
fn buffer_name(g: &Graph, t: Tensor) -> String {
    match g.value(t).source {
        Source::Node(n, _) if g.nodes[n].role == Role::Backward => format!("{} (backward)", g.describe(t)),
        _ => g.describe(t),
    }
}

impl GpuProgram {
    /// Lowers, allocates, compiles. States that the graph uses must exist.
    pub fn new(
        gpu: &Gpu,
        caps: &GpuCaps,
        g: &Graph,
        keep: &[Tensor],
        state: &GpuState,
        label: &str,
    ) -> Result<Self, GpuError> {
        let (plan, launches) = lower(g, keep, caps);
        let mut names: Vec<String> = vec![String::new(); plan.buffers.len()];
        for (v, b) in &plan.buffer_of {
            if names[*b].is_empty() {
                names[*b] = buffer_name(g, Tensor { id: *v as u32, shape: g.values[*v].shape });
            }
        }
        let buffers: Vec<Buffer> = plan
            .buffers
            .iter()
            .zip(&names)
            .map(|(&n, name)| gpu.create_buffer(name, 4 * n as u64))
            .collect::<Result<_, _>>()?;
        let mut inputs = HashMap::new();
        let mut constants = HashMap::new();
        let used: std::collections::HashSet<usize> = plan
            .order
            .iter()
            .flat_map(|&n| g.nodes[n].inputs.iter().map(|t| t.index()))
            .chain(keep.iter().map(|t| t.index()))
            .collect();
        for (i, v) in g.values.iter().enumerate().filter(|(i, _)| used.contains(i)) {
            match &v.source {
                Source::Input(name) => {
                    inputs.insert(
                        name.clone(),
                        gpu.create_buffer(&name.to_string(), 4 * v.shape.len() as u64)?,
                    );
                }
                Source::Const(c) => {
                    let data: Vec<f32> = c.iter().map(|&x| x as f32).collect();
                    constants.insert(i, gpu.create_buffer_with("constant", &data)?);
                }
                _ => {}
            }
        }
        let find = |t: Tensor| -> (Buffer, usize) {
            let v = &g.values[t.index()];
            let b = match &v.source {
                Source::Node(..) => buffers[plan.buffer_of[&t.index()]].clone(),
                Source::Const(_) => constants[&t.index()].clone(),
                Source::Input(n) => inputs[n].clone(),
                Source::State(n) => {
                    let (b, len) = state.values.get(n).unwrap_or_else(|| panic!("no state named {n}"));
                    assert_eq!(*len, v.shape.len(), "state {n}");
                    b.clone()
                }
            };
            (b, v.shape.len())
        };
        let region = |(b, n): (Buffer, usize)| -> Region { b.region(0, 4 * n as u64) };
        let mut kernels: Vec<(Kernel, Vec<Region>)> = vec![];
        let mut origins = vec![];
        let mut host: Vec<HostNode> = vec![];
        let mut stages: Vec<Stage> = vec![];
        let mut launched = 0;
        let wait_before = plan.waits(g);
        let mut host_at: HashMap<usize, usize> = HashMap::new();
        let none = vec![];
        for (place, (n, l)) in launches.into_iter().enumerate() {
            let node = &g.nodes[n];
            let waits = wait_before.get(&place).unwrap_or(&none);
            let work = node.op.host();
            if (!waits.is_empty() || work.is_some()) && launched < kernels.len() {
                stages.push(Stage::Launch(launched..kernels.len()));
                launched = kernels.len();
            }
            stages.extend(waits.iter().map(|n| Stage::Wait(host_at[n])));
            if let Some(work) = work {
                stages.push(Stage::Begin(host.len()));
                host_at.insert(n, host.len());
                host.push(HostNode {
                    work: work.clone(),
                    inputs: node.inputs.iter().map(|t| find(*t)).collect(),
                    outputs: node.outputs.iter().map(|t| find(*t)).collect(),
                });
            }
            for k in l.kernels {
                let regions = k
                    .bindings
                    .iter()
                    .map(|b| match *b {
                        Bind::In(i) => region(find(node.inputs[i])),
                        Bind::Out(o) => region(find(node.outputs[o])),
                        Bind::Scratch(s) => region((buffers[plan.scratch[&n][s]].clone(), l.scratch[s])),
                    })
                    .collect();
                kernels.push((k, regions));
                origins.push((node.op.name(), node.scope.clone(), node.role));
            }
        }
        stages.push(Stage::Launch(launched..kernels.len()));
        let last = wait_before.get(&plan.order.len()).unwrap_or(&none);
        stages.extend(last.iter().map(|n| Stage::Wait(host_at[n])));
        let list: Vec<Launch<'_>> =
            kernels.iter().map(|(kernel, regions)| Launch { kernel, regions: regions.clone() }).collect();
        let commands = CommandList::new(gpu, label, &list)?;
        let readable = keep.iter().map(|t| (t.index(), find(*t))).collect();
        Ok(GpuProgram { gpu: gpu.clone(), plan, commands, origins, inputs, readable, host, stages })
    }

    /// The memory plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Number of dispatches in a run.
    pub fn dispatches(&self) -> usize {
        self.commands.len()
    }

    /// Whether the graph reads this input.
    pub fn has_input(&self, id: impl Into<InputId>) -> bool {
        self.inputs.contains_key(&id.into())
    }

    /// Uploads an input (floats or ids, both 32 bits wide).
    pub fn set<T: bytemuck::NoUninit>(&mut self, id: impl Into<InputId>, data: &[T]) -> Result<(), GpuError> {
        let id = id.into();
        let b = self.inputs.get(&id).unwrap_or_else(|| panic!("no input named {id}"));
        self.gpu.write(b, 0, data)
    }

    /// Submits one run; waits for nothing but the host's work, where the graph has some.
    pub fn run(&mut self) -> Result<(), GpuError> {
        if self.host.is_empty() {
            return self.commands.run();
        }
        self.run_segments()
    }

    /// A browser has no other ranks.
    #[cfg(target_arch = "wasm32")]
    fn run_segments(&mut self) -> Result<(), GpuError> {
        Err(GpuError::Host("work of the host needs threads".into()))
    }

    /// The list in segments. The copies that the host's work needs are queued where its inputs exist; the device goes on
    /// with the next segments while the copies are waited for, one after the other, and the work is done.
    #[cfg(not(target_arch = "wasm32"))]
    fn run_segments(&mut self) -> Result<(), GpuError> {
        let mut reading: VecDeque<(usize, ReadBack)> = VecDeque::new();
        let mut pending: HashMap<usize, Box<dyn Pending>> = HashMap::new();
        for stage in &self.stages {
            match stage {
                Stage::Launch(range) => self.commands.run_range(range.clone())?,
                Stage::Begin(i) => {
                    let reads: Vec<_> = self.host[*i].inputs.iter().map(|(b, n)| (b, *n)).collect();
                    reading.push_back((*i, self.gpu.begin_read(&reads)?));
                }
                Stage::Wait(i) => {
                    while let Some((i, read)) = reading.pop_front() {
                        pending.insert(i, self.host[i].work.start(read.finish()?));
                    }
                    let values = pending.remove(i).expect("begun before").wait().map_err(GpuError::Host)?;
                    for ((b, _), v) in self.host[*i].outputs.iter().zip(&values) {
                        self.gpu.write(b, 0, v)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// One run with the time of each dispatch.
    pub async fn run_profiled(&mut self) -> Result<Profile, GpuError> {
        self.commands.run_profiled_async().await
    }

    /// One run with the time of each dispatch, by the node that it belongs to.
    pub async fn node_times(&mut self) -> Result<Vec<NodeTime>, GpuError> {
        let profile = self.run_profiled().await?;
        let times = profile.times.iter().zip(&self.origins);
        Ok(times
            .map(|((_, micros), (op, scope, role))| NodeTime {
                op: (*op).into(),
                scope: scope.to_string(),
                role: *role,
                micros: *micros,
            })
            .collect())
    }

    /// Copies kept values to the host, waiting for the runs submitted so far.
    pub async fn read(&self, tensors: &[Tensor]) -> Result<Vec<Vec<f32>>, GpuError> {
        let reads: Vec<_> = tensors
            .iter()
            .map(|t| {
                let (b, n) = self.readable.get(&t.index()).expect("only kept values can be read");
                (b, 0..*n as u64)
            })
            .collect();
        self.gpu.read_many_async(&reads).await
    }
}
