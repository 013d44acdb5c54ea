//! One face for both executors: a device, the persistent state on it, and programs compiled for it.

use super::cpu::{CpuProgram, CpuState};
use super::fuse::fuse;
use super::gpu::{GpuProgram, GpuState};
use super::plan::Plan;
use super::{Array, DType, Graph, InputId, Role, StateId, Tensor};
use crate::gpu::{Gpu, GpuError};
use crate::ops::{GpuCaps, MatmulChoice};
use std::borrow::Cow;
use std::sync::Arc;

/// Where graphs run.
#[derive(Clone, Debug)]
pub enum Device {
    /// The CPU executor in f32.
    Cpu,
    /// A wgpu device, with what launches need to know of it.
    Gpu(Gpu, GpuCaps),
}

impl Device {
    /// A wgpu device with the matrix product's variants chosen by `matmul`.
    pub fn gpu(gpu: Gpu, matmul: Arc<dyn MatmulChoice>) -> Self {
        let caps = GpuCaps { is_cpu: gpu.is_software(), matmul };
        Device::Gpu(gpu, caps)
    }

    /// A browser cannot wait for a measurement: the default variants of the device's type.
    #[cfg(target_arch = "wasm32")]
    pub fn tuned(gpu: Gpu) -> Self {
        let is_cpu = gpu.is_software();
        Device::gpu(gpu, Arc::new(crate::ops::matmul::ByDevice { is_cpu }))
    }

    /// Waits for the answers that a browser gives late about buffers and shaders made so far; see
    /// [`Gpu::settle`].
    pub async fn settle(&self, doing: &str) -> Result<(), GpuError> {
        match self {
            Device::Cpu => Ok(()),
            Device::Gpu(g, _) => g.settle(doing).await,
        }
    }

    /// Whether this is the CPU executor.
    pub fn is_cpu(&self) -> bool {
        matches!(self, Device::Cpu)
    }

    /// Whether kernels are timed by the device's own clock.
    pub fn has_timestamps(&self) -> bool {
        matches!(self, Device::Gpu(g, _) if g.features().contains(wgpu::Features::TIMESTAMP_QUERY))
    }

    /// Name for reports.
    pub fn name(&self) -> String {
        match self {
            Device::Cpu => "cpu".into(),
            Device::Gpu(g, _) => g.info().name.clone(),
        }
    }
}

/// The time of one node in a run, or of one of its kernels.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeTime {
    /// The operation.
    pub op: String,
    /// Its scope.
    pub scope: String,
    /// What it is for.
    pub role: Role,
    /// Microseconds.
    pub micros: f64,
}

/// Persistent values (parameters, optimiser state) on a device.
#[derive(Debug)]
pub enum State {
    /// On the host.
    Cpu(CpuState<f32>),
    /// In device buffers.
    Gpu(GpuState),
}

impl State {
    /// Empty, on `device`.
    pub fn new(device: &Device) -> Self {
        match device {
            Device::Cpu => State::Cpu(CpuState::default()),
            Device::Gpu(g, _) => State::Gpu(GpuState::new(g)),
        }
    }

    /// Creates a value in f32, or overwrites one, which keeps its storage type.
    pub fn set(&mut self, id: impl Into<StateId>, data: &[f32]) -> Result<(), GpuError> {
        let id = id.into();
        let dtype = match self {
            State::Cpu(s) => s.values.get(&id).map(Array::dtype),
            State::Gpu(s) => s.dtype(&id),
        };
        self.set_stored(id, dtype.unwrap_or_default(), data)
    }

    /// Creates or overwrites a value that is stored as `dtype`: 16 bits are the nearest.
    pub fn set_stored(&mut self, id: impl Into<StateId>, dtype: DType, data: &[f32]) -> Result<(), GpuError> {
        let id = id.into();
        match self {
            State::Cpu(s) => {
                s.values.insert(id, Array::of(dtype, data.iter().copied()));
                Ok(())
            }
            State::Gpu(s) => s.set(&id, dtype, data),
        }
    }

    /// The values for reading: on the CPU as they stand where they are f32, from a device as copies.
    ///
    /// # Panics
    /// If one does not exist.
    pub async fn view<I: Clone + Into<StateId>>(&self, ids: &[I]) -> Result<Vec<Cow<'_, [f32]>>, GpuError> {
        let ids: Vec<StateId> = ids.iter().map(|id| id.clone().into()).collect();
        match self {
            State::Cpu(s) => Ok(ids
                .iter()
                .map(|id| {
                    let v = s.values.get(id).unwrap_or_else(|| panic!("no state named {id}"));
                    v.floats()
                })
                .collect()),
            State::Gpu(s) => Ok(s.get(&ids).await?.into_iter().map(Cow::Owned).collect()),
        }
    }

    /// Copies values to the host.
    ///
    /// # Panics
    /// If one does not exist.
    pub async fn get<I: Clone + Into<StateId>>(&self, ids: &[I]) -> Result<Vec<Vec<f32>>, GpuError> {
        Ok(self.view(ids).await?.into_iter().map(Cow::into_owned).collect())
    }
}

/// A graph compiled for a device.
pub enum Program {
    /// For the CPU.
    Cpu(Box<CpuProgram<f32>>, Vec<Tensor>),
    /// For a wgpu device.
    Gpu(Box<GpuProgram>, Vec<Tensor>),
}

impl Program {
    /// Fuses, plans and compiles. `keep[i]` is what [`Program::read`] calls value `i`. States must exist.
    pub fn compile(
        device: &Device,
        state: &State,
        graph: &Graph,
        keep: &[Tensor],
        label: &str,
    ) -> Result<Program, GpuError> {
        let (g, kept) = fuse(graph, keep);
        Ok(match (device, state) {
            (Device::Cpu, _) => {
                let program = CpuProgram::new_within(g, &kept);
                let needed = |bytes| GpuError::NoMemory { what: label.into(), bytes };
                Program::Cpu(Box::new(program.map_err(needed)?), kept)
            }
            (Device::Gpu(gpu, caps), State::Gpu(s)) => {
                Program::Gpu(Box::new(GpuProgram::new(gpu, caps, &g, &kept, s, label)?), kept)
            }
            (Device::Gpu(..), State::Cpu(_)) => unreachable!("the state was made for this device"),
        })
    }

    /// The memory plan.
    pub fn plan(&self) -> &Plan {
        match self {
            Program::Cpu(p, _) => p.plan(),
            Program::Gpu(p, _) => p.plan(),
        }
    }

    /// Whether the graph reads this input.
    pub fn has_input(&self, id: impl Into<InputId>) -> bool {
        match self {
            Program::Cpu(p, _) => p.has_input(id),
            Program::Gpu(p, _) => p.has_input(id),
        }
    }

    /// Uploads floats; an input of 16 bits gets the nearest.
    pub fn set(&mut self, id: impl Into<InputId>, data: &[f32]) -> Result<(), GpuError> {
        match self {
            Program::Cpu(p, _) => {
                p.set(id, data);
                Ok(())
            }
            Program::Gpu(p, _) => p.set(id, data),
        }
    }

    /// Uploads ids.
    pub fn set_ids(&mut self, id: impl Into<InputId>, data: &[u32]) -> Result<(), GpuError> {
        match self {
            Program::Cpu(p, _) => {
                p.set_ids(id, data);
                Ok(())
            }
            Program::Gpu(p, _) => p.set_ids(id, data),
        }
    }

    /// One run. On a wgpu device it is submitted, not waited for.
    pub fn run(&mut self, state: &mut State) -> Result<(), GpuError> {
        match (self, state) {
            (Program::Cpu(p, _), State::Cpu(s)) => {
                p.run_some(s, 0, &mut || false)?;
                Ok(())
            }
            (Program::Gpu(p, _), _) => p.run(),
            (Program::Cpu(..), State::Gpu(_)) => unreachable!("the state was made for this device"),
        }
    }

    /// A run in pieces: operations from the `at`-th on (0 begins a run) until `pause`, asked after each, says
    /// yes; then the place to go on from. `None`: the run is done. A wgpu device takes a run whole.
    pub fn run_some(
        &mut self,
        state: &mut State,
        at: usize,
        pause: &mut dyn FnMut() -> bool,
    ) -> Result<Option<usize>, GpuError> {
        match (self, state) {
            (Program::Cpu(p, _), State::Cpu(s)) => p.run_some(s, at, pause),
            (program, state) => program.run(state).map(|()| None),
        }
    }

    /// Copies kept values to the host: positions in the `keep` that it was compiled with.
    pub async fn read(&self, which: &[usize]) -> Result<Vec<Vec<f32>>, GpuError> {
        match self {
            Program::Cpu(p, keep) => Ok(which.iter().map(|&i| p.read(keep[i])).collect()),
            Program::Gpu(p, keep) => p.read(&which.iter().map(|&i| keep[i]).collect::<Vec<_>>()).await,
        }
    }

    /// Measures from now on.
    pub fn start_profile(&mut self) {
        if let Program::Cpu(p, _) = self {
            p.profile();
        }
    }

    /// Whether [`Program::start_profile`] is in force.
    pub fn is_profiling(&self) -> bool {
        matches!(self, Program::Cpu(p, _) if p.is_profiling())
    }

    /// Seconds spent inside operations since [`Program::start_profile`]; 0 on a device.
    pub fn seconds_in_operations(&self) -> f64 {
        match self {
            Program::Cpu(p, _) => p.times().map(|t| t.1.as_secs_f64()).sum(),
            Program::Gpu(..) => 0.0,
        }
    }

    /// Time of every node: on the CPU of all runs since [`Program::start_profile`], which ends; on a device
    /// of one more run, which changes the state as any run does. Empty on a CPU that was not measuring.
    pub async fn node_times(&mut self) -> Result<Vec<NodeTime>, GpuError> {
        match self {
            Program::Cpu(p, _) => {
                let times = p.times().map(|(node, t)| NodeTime {
                    op: node.op.name().into(),
                    scope: node.scope.to_string(),
                    role: node.role,
                    micros: t.as_secs_f64() * 1e6,
                });
                let times = times.collect();
                p.stop_profile();
                Ok(times)
            }
            Program::Gpu(p, _) => p.node_times().await,
        }
    }

    /// Where the time goes: on the CPU over all runs since [`Program::start_profile`], on a device in one
    /// more run whose results are not used.
    pub async fn profile_table(&mut self) -> Result<String, GpuError> {
        match self {
            Program::Gpu(p, _) => Ok(p.run_profiled().await?.table()),
            Program::Cpu(p, _) => {
                let mut by_op: Vec<(String, usize, f64)> = vec![];
                for (node, t) in p.times() {
                    let back = if node.role == Role::Backward { " (backward)" } else { "" };
                    let name = format!("{}{back}", node.op.name());
                    match by_op.iter_mut().find(|x| x.0 == name) {
                        Some(x) => {
                            x.1 += 1;
                            x.2 += t.as_secs_f64();
                        }
                        None => by_op.push((name, 1, t.as_secs_f64())),
                    }
                }
                by_op.sort_by(|a, b| b.2.total_cmp(&a.2));
                let total: f64 = by_op.iter().map(|x| x.2).sum();
                let mut s = format!("{:<32} {:>6} {:>12} {:>7}\n", "operation", "nodes", "total ms", "share");
                for (name, n, t) in by_op {
                    s += &format!(
                        "{name:<32} {n:>6} {:>12.2} {:>6.1}%\n",
                        t * 1e3,
                        100.0 * t / total.max(1e-12)
                    );
                }
                Ok(s)
            }
        }
    }
}
