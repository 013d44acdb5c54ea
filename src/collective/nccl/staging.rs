//! How data come to where NCCL can reach them.

use cudarc::driver::sys::CU_MEMHOSTALLOC_PORTABLE;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtrMut, DriverError, PinnedHostSlice};
use std::sync::Arc;

/// f32 of the host on the device and back, in the order of a stream.
///
/// Where the data are on the device already, a path without copies can stand in for [`Pinned`]: a Vulkan buffer of wgpu
/// exported by its file descriptor and imported by CUDA has an address there.
pub trait Staging: Send {
    /// Elements that fit at once.
    fn room(&self) -> usize;
    /// Brings at most [`Staging::room`] elements: their address on the device, once the stream gets there.
    ///
    /// # Errors
    /// The driver's.
    fn bring(&mut self, data: &[f32]) -> Result<u64, DriverError>;
    /// Waits for the stream, and fetches what is at that address.
    ///
    /// # Errors
    /// The driver's.
    fn fetch(&mut self, data: &mut [f32]) -> Result<(), DriverError>;
}

/// By way of page-locked memory of the host, from which a device copies by itself.
pub struct Pinned {
    stream: Arc<CudaStream>,
    host: PinnedHostSlice<f32>,
    device: CudaSlice<f32>,
}

impl Pinned {
    /// With room for `n` elements.
    ///
    /// # Errors
    /// If there is no memory for them.
    pub fn new(context: &Arc<CudaContext>, stream: &Arc<CudaStream>, n: usize) -> Result<Self, DriverError> {
        // SAFETY: f32 of any bits are f32; `bring` writes what is read. Not write-combined: the host reads it too.
        let host = unsafe { context.alloc_pinned_with_flags::<f32>(n, CU_MEMHOSTALLOC_PORTABLE)? };
        Ok(Pinned { stream: stream.clone(), host, device: stream.alloc_zeros(n)? })
    }
}

impl Staging for Pinned {
    fn room(&self) -> usize {
        self.host.len()
    }

    fn bring(&mut self, data: &[f32]) -> Result<u64, DriverError> {
        let n = data.len();
        // the stream is idle: `fetch` waited for it
        let host = &mut self.host.as_mut_slice()?[..n];
        host.copy_from_slice(data);
        self.stream.memcpy_htod(&*host, &mut self.device.slice_mut(..n))?;
        Ok(self.device.device_ptr_mut(&self.stream).0)
    }

    fn fetch(&mut self, data: &mut [f32]) -> Result<(), DriverError> {
        let n = data.len();
        let host = &mut self.host.as_mut_slice()?[..n];
        self.stream.memcpy_dtoh(&self.device.slice(..n), host)?;
        self.stream.synchronize()?;
        data.copy_from_slice(host);
        Ok(())
    }
}
