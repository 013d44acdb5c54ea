//! NVIDIA's library between the devices of one or many hosts (Linux, cargo feature `nccl`).
//!
//! The ranks meet over TCP, which stays: it brings NCCL's unique id to all, carries what is small or has no sum in it, and
//! tells who is alive. Sums of f32 that travel as they are go by `ncclAllReduce`, through buffers on the device that are
//! filled by a [`Staging`]. A rank that is lost ends NCCL's operation on the others, with its name.

mod library;
mod staging;
#[cfg(test)]
mod tests;

pub use library::{Api, PATH};
pub use staging::{Pinned, Staging};

use super::element::Reduction;
use super::error::{Cause, CollectiveError, Failure, Result};
use super::schedule::{Cut, Schedule};
use super::tcp::Tcp;
use super::transport::{Operation, Transport};
use super::work::{InPlace, Work};
use cudarc::driver::{CudaContext, CudaStream, DriverError};
use library::{Group, UniqueId};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Smaller sums are sooner done over TCP than copied to a device and back.
const SMALL: usize = 64 << 10;
/// Elements on the device at once.
const ROOM: usize = 16 << 20;

/// One rank of a group of devices.
pub struct Nccl {
    /// The connection that stays beside NCCL.
    tcp: Tcp,
    context: Arc<CudaContext>,
    device: Mutex<Device>,
}

struct Device {
    // dropped in this order
    group: Group,
    staging: Box<dyn Staging>,
    stream: Arc<CudaStream>,
}

fn unavailable(why: String) -> CollectiveError {
    let instead =
        "install NVIDIA's driver on a machine with its devices, one a rank, or use --collective tcp";
    CollectiveError::Unavailable { transport: "nccl", why, instead: instead.into() }
}

/// Whether NCCL, a driver and at least `ranks` devices are there: the devices.
///
/// # Errors
/// Names what is missing, and what to use instead.
pub fn devices(ranks: usize) -> Result<usize> {
    Api::get()?;
    // SAFETY: only tries to load the library.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return Err(unavailable("there is no driver of NVIDIA's (libcuda.so.1)".into()));
    }
    let count = cudarc::driver::result::init().and_then(|()| CudaContext::device_count());
    match count {
        Ok(n) if n > 0 && n as usize >= ranks => Ok(n as usize),
        Ok(n) => Err(unavailable(format!("{ranks} ranks were started on this host, which has {n} devices"))),
        Err(e) => Err(unavailable(format!("the driver reports {e}"))),
    }
}

impl Nccl {
    /// Joins the ranks of a group over TCP by NCCL; `device` is this rank's among its host's.
    ///
    /// # Errors
    /// On every rank, if one has no device or NCCL fails.
    pub fn join(tcp: Tcp, device: usize) -> Result<Self> {
        devices(device + 1)?;
        let opened = CudaContext::new(device);
        let opened = opened.map_err(|e| unavailable(format!("device {device} cannot be used: {e}")));
        Self::over(tcp, opened)
    }

    fn over(tcp: Tcp, opened: Result<Arc<CudaContext>>) -> Result<Self> {
        let (rank, world) = (tcp.rank(), tcp.world());
        let api = Api::get()?;
        let prepared = opened.and_then(|context| {
            let made = Self::prepare(&context).map_err(|e| unavailable(e.to_string()))?;
            let id = if rank == 0 { api.unique_id().map_err(unavailable)? } else { UniqueId([0; 128]) };
            Ok((context, made, id))
        });
        // nobody may wait for one that will not come
        let mut failed = vec![0u8; world];
        failed[rank] = u8::from(prepared.is_err());
        let op = |kind| Operation { kind, number: 0, bytes: world };
        let cut = Cut { chunk: 64 << 10, lanes: 1 };
        if world > 1 {
            let schedule = Schedule::doubling_all_reduce(rank, world, world, cut);
            tcp.run(&op("all_reduce"), &schedule, &mut InPlace { data: &mut failed, how: Reduction::Max })?;
        }
        let (context, (stream, staging), mut id) = prepared?;
        if let Some(other) = failed.iter().position(|f| *f != 0) {
            return Err(unavailable(format!("rank {other} has no NCCL or no device")));
        }
        let schedule = Schedule::broadcast(rank, world, 0, id.0.len(), cut);
        tcp.run(&op("broadcast"), &schedule, &mut InPlace { data: &mut id.0[..], how: Reduction::Max })?;
        let group = context
            .bind_to_thread()
            .map_err(|e| e.to_string())
            .and_then(|()| Group::join(api, id, rank, world))
            .map_err(|e| {
                tcp.abort(&e, true);
                unavailable(e)
            })?;
        let device = Device { group, staging: Box::new(staging), stream };
        Ok(Nccl { tcp, context, device: Mutex::new(device) })
    }

    fn prepare(context: &Arc<CudaContext>) -> std::result::Result<(Arc<CudaStream>, Pinned), DriverError> {
        let stream = context.new_stream()?;
        let staging = Pinned::new(context, &stream, ROOM)?;
        Ok((stream, staging))
    }

    fn sum(&self, device: &mut Device, part: &mut [f32]) -> std::result::Result<(), Trouble> {
        let n = part.len();
        let at = device.staging.bring(part)?;
        // SAFETY: the staging's address holds until its next `bring`, which follows `fetch`, which waits for the stream.
        unsafe { device.group.sum(at, n, device.stream.cu_stream().cast()) }.map_err(Trouble::Own)?;
        let done = device.stream.record_event(None)?;
        let mut naps = 0u32;
        while !done.try_is_complete()? {
            device.group.trouble().map_err(Trouble::Own)?;
            if let Some(failure) = self.tcp.down() {
                return Err(Trouble::Group(failure));
            }
            std::thread::sleep(Duration::from_micros(10 << (naps / 32).min(4)));
            naps += 1;
        }
        device.staging.fetch(part)?;
        Ok(())
    }
}

enum Trouble {
    Own(String),
    Group(Failure),
}

impl From<DriverError> for Trouble {
    fn from(e: DriverError) -> Self {
        Trouble::Own(format!("CUDA reports: {e}"))
    }
}

impl Transport for Nccl {
    fn name(&self) -> &'static str {
        "nccl"
    }
    fn rank(&self) -> usize {
        self.tcp.rank()
    }
    fn world(&self) -> usize {
        self.tcp.world()
    }
    fn lanes(&self) -> usize {
        self.tcp.lanes()
    }

    fn run(&self, op: &Operation, schedule: &Schedule, work: &mut dyn Work) -> Result<()> {
        self.tcp.run(op, schedule, work)
    }

    fn native_all_reduce(&self, op: &Operation, data: &mut [f32], how: Reduction) -> Option<Result<()>> {
        if how != Reduction::Sum || size_of_val(data) <= SMALL {
            return None;
        }
        let mut device = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        let room = device.staging.room();
        for part in data.chunks_mut(room) {
            if let Err(trouble) = self.sum(&mut device, part) {
                // the stream must not wait for ranks that are gone
                device.group.abort();
                let failure = match trouble {
                    Trouble::Group(failure) => failure,
                    Trouble::Own(why) => {
                        let own = Failure::new(self.rank(), Cause::Lost, &why);
                        self.tcp.abort(&why, false);
                        self.tcp.down().unwrap_or(own)
                    }
                };
                return Some(Err(failure.during(op)));
            }
        }
        Some(Ok(()))
    }

    fn split(&self, id: u64, members: &[usize], color: u32) -> Result<Box<dyn Transport>> {
        let tcp = self.tcp.some(id, members, color)?;
        Ok(Box::new(Self::over(tcp, Ok(self.context.clone()))?))
    }

    fn abort(&self, why: &str, for_good: bool) {
        self.tcp.abort(why, for_good);
    }

    fn finish(&self) {
        // every sum was waited for: nothing of NCCL's is in progress
        self.tcp.finish();
    }
}
