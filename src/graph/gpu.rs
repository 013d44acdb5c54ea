//! The device executor: the same graph as one prepared list of dispatches.
//!
//! Everything is decided when the program is made: shaders, sizes, buffers, bind groups. A step uploads
//! its inputs, submits, and returns; nothing is read back unless asked for.

use super::exec::NodeTime;
use super::plan::{Plan, plan};
use super::{Array, DType, Graph, InputId, Role, Source, StateId, Tensor};
#[cfg(not(target_arch = "wasm32"))]
use crate::gpu::buffer::ReadBack;
use crate::gpu::kernel::{Bind, Kernel};
use crate::gpu::{Buffer, CommandList, Gpu, GpuError, Launch, Profile, Region};
use crate::ops::host::HostWork;
#[cfg(not(target_arch = "wasm32"))]
use crate::ops::host::Pending;
use crate::ops::{GpuCaps, GpuLaunch, GpuRequest, Op};
use std::borrow::Cow;
use std::collections::HashMap;
#[cfg(not(target_arch = "wasm32"))]
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Persistent values on the device.
#[derive(Debug)]
pub struct GpuState {
    gpu: Gpu,
    values: HashMap<StateId, Place>,
}

/// Where the elements of a value are.
#[derive(Clone, Debug)]
struct Place {
    buffer: Buffer,
    dtype: DType,
    len: usize,
}

impl Place {
    fn words(&self) -> usize {
        self.dtype.bytes(self.len) / 4
    }

    /// As a kernel binds it.
    fn region(&self) -> Region {
        self.buffer.region(0, self.dtype.bytes(self.len) as u64)
    }

    /// From the words that were read of it.
    fn array(&self, words: Vec<u32>) -> Array {
        Array::from_words(self.dtype, self.len, words)
    }
}

/// The words of floats that are stored as `dtype`; nothing is copied where that is f32.
fn stored(dtype: DType, data: &[f32]) -> Cow<'_, [u32]> {
    match dtype {
        DType::F32 => Cow::Borrowed(bytemuck::cast_slice(data)),
        half => Cow::Owned(Array::<f32>::of(half, data.iter().copied()).words().into_owned()),
    }
}

/// Copies values to the host.
async fn read(gpu: &Gpu, places: &[&Place]) -> Result<Vec<Vec<f32>>, GpuError> {
    let reads: Vec<_> = places.iter().map(|p| (&p.buffer, 0..p.words() as u64)).collect();
    let words = gpu.read_many_async::<u32>(&reads).await?;
    Ok(places.iter().zip(words).map(|(p, w)| p.array(w).into_floats()).collect())
}

impl GpuState {
    /// No values yet.
    pub fn new(gpu: &Gpu) -> Self {
        GpuState { gpu: gpu.clone(), values: HashMap::new() }
    }

    /// Creates or overwrites a value.
    pub fn set(&mut self, id: &StateId, dtype: DType, data: &[f32]) -> Result<(), GpuError> {
        let words = stored(dtype, data);
        match self.values.get(id) {
            Some(p) if p.len == data.len() && p.dtype == dtype => self.gpu.write(&p.buffer, 0, &words),
            _ => {
                let buffer = self.gpu.create_buffer_with(&id.to_string(), &words)?;
                self.values.insert(id.clone(), Place { buffer, dtype, len: data.len() });
                Ok(())
            }
        }
    }

    /// Copies values to the host.
    pub async fn get(&self, ids: &[StateId]) -> Result<Vec<Vec<f32>>, GpuError> {
        let place = |id: &StateId| self.values.get(id).unwrap_or_else(|| panic!("no state named {id}"));
        read(&self.gpu, &ids.iter().map(place).collect::<Vec<_>>()).await
    }

    /// The storage type of a value that exists.
    pub fn dtype(&self, id: &StateId) -> Option<DType> {
        self.values.get(id).map(|p| p.dtype)
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
    inputs: HashMap<InputId, Place>,
    /// Kept values and inputs: where to read them.
    readable: HashMap<usize, Place>,
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
    inputs: Vec<Place>,
    outputs: Vec<Place>,
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
            .map(|(&n, name)| gpu.create_buffer(name, n as u64))
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
                Source::Input(id) => {
                    let bytes = v.dtype.bytes(v.shape.len()) as u64;
                    let buffer = gpu.create_buffer(&id.to_string(), bytes)?;
                    inputs.insert(id.clone(), Place { buffer, dtype: v.dtype, len: v.shape.len() });
                }
                Source::Const(c) => {
                    let data: Vec<f32> = c.iter().map(|&x| x as f32).collect();
                    constants.insert(i, gpu.create_buffer_with("constant", &data)?);
                }
                _ => {}
            }
        }
        let find = |t: Tensor| -> Place {
            let v = &g.values[t.index()];
            let b = match &v.source {
                Source::Node(..) => buffers[plan.buffer_of[&t.index()]].clone(),
                Source::Const(_) => constants[&t.index()].clone(),
                Source::Input(n) => return inputs[n].clone(),
                Source::State(n) => {
                    let p = state.values.get(n).unwrap_or_else(|| panic!("no state named {n}"));
                    assert_eq!((p.len, p.dtype), (v.shape.len(), v.dtype), "state {n}");
                    return p.clone();
                }
            };
            Place { buffer: b, dtype: v.dtype, len: v.shape.len() }
        };
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
                        Bind::In(i) => find(node.inputs[i]).region(),
                        Bind::Out(o) => find(node.outputs[o]).region(),
                        Bind::Scratch(s) => {
                            let bytes = DType::F32.bytes(l.scratch[s]) as u64;
                            buffers[plan.scratch[&n][s]].region(0, bytes)
                        }
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

    /// Uploads floats; an input of 16 bits gets the nearest.
    pub fn set(&mut self, id: impl Into<InputId>, data: &[f32]) -> Result<(), GpuError> {
        let p = self.input(&id.into());
        self.gpu.write(&p.buffer, 0, &stored(p.dtype, data))
    }

    /// Uploads ids.
    pub fn set_ids(&mut self, id: impl Into<InputId>, data: &[u32]) -> Result<(), GpuError> {
        self.gpu.write(&self.input(&id.into()).buffer, 0, data)
    }

    fn input(&self, id: &InputId) -> &Place {
        self.inputs.get(id).unwrap_or_else(|| panic!("no input named {id}"))
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
                    let inputs = &self.host[*i].inputs;
                    let reads: Vec<_> = inputs.iter().map(|p| (&p.buffer, p.words())).collect();
                    reading.push_back((*i, self.gpu.begin_read(&reads)?));
                }
                Stage::Wait(i) => {
                    while let Some((i, read)) = reading.pop_front() {
                        let HostNode { work, inputs, .. } = &self.host[i];
                        let arrays = inputs.iter().zip(read.finish()?).map(|(p, words)| p.array(words));
                        pending.insert(i, work.start(arrays.collect()));
                    }
                    let values = pending.remove(i).expect("begun before").wait().map_err(GpuError::Host)?;
                    for (p, v) in self.host[*i].outputs.iter().zip(&values) {
                        assert_eq!((v.dtype(), v.len()), (p.dtype, p.len), "the host's work");
                        self.gpu.write(&p.buffer, 0, &v.words())?;
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
        let place = |t: &Tensor| self.readable.get(&t.index()).expect("only kept values can be read");
        read(&self.gpu, &tensors.iter().map(place).collect::<Vec<_>>()).await
    }
}
