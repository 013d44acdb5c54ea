//! An open device: wgpu's handles, its limits, and what it has complained about.
//!
//! wgpu reports errors out of band and panics on those that nobody handles. Here every error is either
//! caught by a scope around the call that made it, so that it can name a tensor, or recorded by the handler
//! and returned by the next [`Gpu::check`].

use crate::sync::lock;
use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use super::buffer::StagingPool;
use super::error::{GpuError, error_chain, one_line};
use super::pipeline::Pipeline;

/// Which limits a device is opened with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LimitsMode {
    /// All that the adapter can do.
    #[default]
    Adapter,
    /// Exactly WebGPU's defaults and no feature beyond timestamps, as a browser would give.
    Default,
}

/// How a device is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuOptions {
    /// Limits to ask for.
    pub limits: LimitsMode,
    /// Bounds checks and bounded loops in shaders: slower by 2 to 40 %, and a wrong index cannot touch
    /// another buffer. Always on in a browser.
    pub checked: bool,
}

impl GpuOptions {
    /// Adds what the environment asks for: `BIRKHOFF_DEFAULT_LIMITS=1`, `BIRKHOFF_CHECKED=1`.
    pub fn or_env(mut self) -> Self {
        let on = |name| std::env::var(name).is_ok_and(|v| v == "1");
        if on("BIRKHOFF_DEFAULT_LIMITS") {
            self.limits = LimitsMode::Default;
        }
        self.checked |= on("BIRKHOFF_CHECKED") || cfg!(target_arch = "wasm32");
        self
    }
}

/// An open device. Clones share it.
#[derive(Clone, Debug)]
pub struct Gpu {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    info: wgpu::AdapterInfo,
    device: wgpu::Device,
    queue: wgpu::Queue,
    limits: wgpu::Limits,
    features: wgpu::Features,
    checked: bool,
    faults: Arc<Faults>,
    in_flight: Mutex<VecDeque<wgpu::SubmissionIndex>>,
    pub(crate) pipelines: Mutex<HashMap<u128, Arc<Pipeline>>>,
    pub(crate) staging: StagingPool,
    /// Answers of error scopes that a browser has not given yet.
    #[cfg(target_arch = "wasm32")]
    pending: LateAnswers,
}

#[cfg(target_arch = "wasm32")]
type ScopeAnswer = std::pin::Pin<Box<dyn Future<Output = Option<wgpu::Error>>>>;

#[cfg(target_arch = "wasm32")]
#[derive(Default)]
struct LateAnswers(std::cell::RefCell<Vec<(Doing, ScopeAnswer)>>);

#[cfg(target_arch = "wasm32")]
impl std::fmt::Debug for LateAnswers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} late answers", self.0.borrow().len())
    }
}

/// What the device reported outside any scope.
#[derive(Debug, Default)]
struct Faults {
    lost: Mutex<Option<String>>,
    /// The first error since the last check: later ones are mostly its consequences.
    first: Mutex<Option<Fault>>,
}

#[derive(Clone, Debug)]
enum Fault {
    OutOfMemory,
    Other(String),
}

/// What a scoped call is about, for the error's text.
#[derive(Clone, Debug)]
pub(crate) enum Doing {
    /// Allocating `what` of so many bytes.
    Allocate(String, u64),
    /// Compiling the shader of a kernel.
    Compile(String),
    /// Anything else.
    Step(String),
}

/// How many submissions may wait in the queue before the host waits for the oldest. Enough to hide the
/// host's work; without a bound a fast host piles up command buffers and staging memory.
const MAX_IN_FLIGHT: usize = 16;

impl Gpu {
    /// Opens `adapter`.
    pub async fn open(adapter: &wgpu::Adapter, options: &GpuOptions) -> Result<Gpu, GpuError> {
        let options = options.or_env();
        let info = adapter.get_info();
        let no_device = |message: String| GpuError::NoDevice { adapter: info.name.clone(), message };

        let mut wanted = wgpu::Features::TIMESTAMP_QUERY;
        let limits = match options.limits {
            LimitsMode::Default => wgpu::Limits::default(),
            LimitsMode::Adapter => {
                wanted |=
                    wgpu::Features::SUBGROUP | wgpu::Features::SUBGROUP_BARRIER | wgpu::Features::SHADER_F16;
                adapter.limits()
            }
        };
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("birkhoff"),
            required_features: wanted & adapter.features(),
            required_limits: limits,
            ..Default::default()
        };
        let (device, queue) =
            adapter.request_device(&descriptor).await.map_err(|e| no_device(error_chain(&e)))?;

        let faults = Arc::new(Faults::default());
        let seen = faults.clone();
        device.set_device_lost_callback(move |reason, message| {
            let text = match reason {
                wgpu::DeviceLostReason::Destroyed => "the device was destroyed".to_string(),
                _ if message.trim().is_empty() => "the driver gave no reason".to_string(),
                _ => one_line(&message),
            };
            lock(&seen.lost).get_or_insert(text);
        });
        let seen = faults.clone();
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            let fault = match &error {
                wgpu::Error::OutOfMemory { .. } => Fault::OutOfMemory,
                other => Fault::Other(one_line(&other.to_string())),
            };
            lock(&seen.first).get_or_insert(fault);
        }));

        Ok(Gpu {
            inner: Arc::new(Inner {
                limits: device.limits(),
                features: device.features(),
                checked: options.checked,
                info,
                device,
                queue,
                faults,
                in_flight: Mutex::new(VecDeque::new()),
                pipelines: Mutex::new(HashMap::new()),
                staging: StagingPool::default(),
                #[cfg(target_arch = "wasm32")]
                pending: Default::default(),
            }),
        })
    }

    /// The adapter's name, type and driver.
    pub fn info(&self) -> &wgpu::AdapterInfo {
        &self.inner.info
    }

    /// The limits that the device was opened with.
    pub fn limits(&self) -> &wgpu::Limits {
        &self.inner.limits
    }

    /// The features that the device was opened with.
    pub fn features(&self) -> wgpu::Features {
        self.inner.features
    }

    /// Whether shaders are compiled with bounds checks.
    pub fn checked(&self) -> bool {
        self.inner.checked
    }

    /// Whether the adapter is a driver that runs on the CPU, where other tile sizes win.
    pub fn is_software(&self) -> bool {
        self.inner.info.device_type == wgpu::DeviceType::Cpu
    }

    /// wgpu's device.
    pub fn device(&self) -> &wgpu::Device {
        &self.inner.device
    }

    /// wgpu's queue.
    pub fn queue(&self) -> &wgpu::Queue {
        &self.inner.queue
    }

    /// Whether two handles are the same device.
    pub fn same_as(&self, other: &Gpu) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Returns what the device has reported since the last check; `doing` says when it was noticed.
    ///
    /// A lost device stays lost: every later check fails as well.
    pub fn check(&self, doing: &str) -> Result<(), GpuError> {
        if let Some(reason) = lock(&self.inner.faults.lost).clone() {
            return Err(GpuError::DeviceLost { reason, doing: doing.to_string() });
        }
        match lock(&self.inner.faults.first).take() {
            None => Ok(()),
            Some(Fault::OutOfMemory) => {
                Err(GpuError::OutOfMemory { what: format!("driver memory while {doing}"), bytes: 0 })
            }
            Some(Fault::Other(message)) => Err(GpuError::Validation { doing: doing.to_string(), message }),
        }
    }

    /// Like [`Gpu::check`], after waiting for the answers that a browser gives late. Call it once after
    /// building buffers, pipelines and lists; natively nothing is ever late.
    pub async fn settle(&self, doing: &str) -> Result<(), GpuError> {
        #[cfg(target_arch = "wasm32")]
        {
            let pending = std::mem::take(&mut *self.inner.pending.0.borrow_mut());
            for (what, answer) in pending {
                if let Some(error) = answer.await {
                    return Err(convert(error, &what));
                }
            }
        }
        self.check(doing)
    }

    /// Runs `make` and turns what wgpu reports about it into an error that names `doing`.
    pub(crate) fn scoped<T>(&self, doing: Doing, make: impl FnOnce() -> T) -> Result<T, GpuError> {
        let device = &self.inner.device;
        // Scopes nest, so the innermost must be popped first.
        let internal = device.push_error_scope(wgpu::ErrorFilter::Internal);
        let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
        let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let made = make();
        let memory = self.answer(&doing, memory.pop());
        let validation = self.answer(&doing, validation.pop());
        let internal = self.answer(&doing, internal.pop());
        if let Some(error) = memory.or(validation).or(internal) {
            return Err(convert(error, &doing));
        }
        // wgpu hands out dead objects without an error once the device is lost.
        if let Some(reason) = lock(&self.inner.faults.lost).clone() {
            return Err(GpuError::DeviceLost { reason, doing: doing.text() });
        }
        Ok(made)
    }

    /// Takes a scope's answer if it is there, which natively it always is.
    fn answer(
        &self,
        doing: &Doing,
        scope: impl Future<Output = Option<wgpu::Error>> + 'static,
    ) -> Option<wgpu::Error> {
        let mut scope = Box::pin(scope);
        match scope.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(error) => error,
            Poll::Pending => {
                #[cfg(target_arch = "wasm32")]
                self.inner.pending.0.borrow_mut().push((doing.clone(), scope));
                #[cfg(not(target_arch = "wasm32"))]
                tracing::debug!("no answer while {}", doing.text());
                None
            }
        }
    }

    /// Submits, lets wgpu recycle memory, and waits for older work when too much is queued.
    pub(crate) fn submit(
        &self,
        commands: wgpu::CommandBuffer,
        doing: &str,
    ) -> Result<wgpu::SubmissionIndex, GpuError> {
        let index = self.inner.queue.submit([commands]);
        // After a failed submission its index was never queued, and waiting for it would be refused.
        self.check(doing)?;
        let oldest = {
            let mut queued = lock(&self.inner.in_flight);
            queued.push_back(index.clone());
            if queued.len() > MAX_IN_FLIGHT { queued.pop_front() } else { None }
        };
        match oldest {
            Some(oldest) => {
                self.poll(wgpu::PollType::Wait { submission_index: Some(oldest), timeout: None }, doing)?
            }
            None => self.poll(wgpu::PollType::Poll, doing)?,
        }
        Ok(index)
    }

    /// Waits until the device has done all that was submitted. In a browser this only checks: there the
    /// event loop must run, so await a read instead.
    pub fn wait(&self, doing: &str) -> Result<(), GpuError> {
        self.poll(wgpu::PollType::wait_indefinitely(), doing)?;
        lock(&self.inner.in_flight).clear();
        Ok(())
    }

    /// Polls the device without letting a lost one bring the process down.
    pub(crate) fn poll(&self, poll: wgpu::PollType, doing: &str) -> Result<(), GpuError> {
        // wgpu 30 panics inside `poll` where the driver reports the device lost while it waits
        // (`handle_error_fatal`); a training run must end with a message and its checkpoint instead.
        // wgpu's own state is dropped with the device, nothing of ours is borrowed across the call.
        let device = std::panic::AssertUnwindSafe(&self.inner.device);
        let polled = std::panic::catch_unwind(|| device.poll(poll));
        self.check(doing)?;
        match polled {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => {
                Err(GpuError::Validation { doing: doing.to_string(), message: one_line(&error.to_string()) })
            }
            Err(panic) => {
                let text = panic
                    .downcast_ref::<String>()
                    .map(String::as_str)
                    .or_else(|| panic.downcast_ref::<&str>().copied())
                    .unwrap_or("wgpu could not poll the device");
                let reason = one_line(text);
                lock(&self.inner.faults.lost).get_or_insert(reason.clone());
                Err(GpuError::DeviceLost { reason, doing: doing.to_string() })
            }
        }
    }
}

impl Doing {
    fn text(&self) -> String {
        match self {
            Doing::Allocate(what, _) => format!("allocating {what}"),
            Doing::Compile(kernel) => format!("compiling kernel {kernel}"),
            Doing::Step(text) => text.clone(),
        }
    }
}

fn convert(error: wgpu::Error, doing: &Doing) -> GpuError {
    let message = match &error {
        wgpu::Error::OutOfMemory { .. } => {
            return match doing {
                Doing::Allocate(what, bytes) => GpuError::OutOfMemory { what: what.clone(), bytes: *bytes },
                other => {
                    GpuError::OutOfMemory { what: format!("driver memory while {}", other.text()), bytes: 0 }
                }
            };
        }
        other => one_line(&other.to_string()),
    };
    match doing {
        Doing::Compile(kernel) => GpuError::Shader { kernel: kernel.clone(), message },
        other => GpuError::Validation { doing: other.text(), message },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scoped_errors_name_what_was_made() {
        let source = || Box::new(std::fmt::Error);
        let memory = || wgpu::Error::OutOfMemory { source: source() };
        let invalid = || wgpu::Error::Validation {
            source: source(),
            description: "Validation Error\n\nCaused by:\n  bad\n".to_string(),
        };
        let allocate = Doing::Allocate("tensor layers.2.wq".to_string(), 3 << 30);
        let text = convert(memory(), &allocate).to_string();
        assert!(text.starts_with("out of device memory for tensor layers.2.wq (3 GiB)"), "{text}");
        let compile = Doing::Compile("softmax".to_string());
        assert_eq!(convert(invalid(), &compile).to_string(), "kernel softmax: bad");
        let step = Doing::Step("preparing training step".to_string());
        let text = convert(invalid(), &step).to_string();
        assert_eq!(text, "the device refused an operation while preparing training step: bad");
        let text = convert(memory(), &step).to_string();
        assert!(text.contains("while preparing training step"), "{text}");
    }
}
