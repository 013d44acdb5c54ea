//! Storage buffers: creation checked against the limits, upload, and batched read-back.
//!
//! Read-back goes through a small pool of mappable buffers that are kept between calls, so that reading
//! the loss every few steps allocates nothing.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::task::Waker;

use super::device::{Doing, Gpu};
use super::error::GpuError;
use crate::sync::lock;

/// A storage buffer with the name of the tensor in it. Clones share the memory.
#[derive(Clone, Debug)]
pub struct Buffer {
    raw: wgpu::Buffer,
    label: Arc<str>,
    bytes: u64,
}

/// A part of a [`Buffer`], as a kernel binds it.
#[derive(Clone, Debug)]
pub struct Region {
    /// The buffer.
    pub buffer: Buffer,
    /// First byte; a multiple of the device's `min_storage_buffer_offset_alignment` (256 always fits).
    pub offset: u64,
    /// Bytes; a multiple of 4.
    pub size: u64,
}

impl Buffer {
    /// Bytes that were asked for. The allocation is rounded up to a multiple of 16.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Name for error messages.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// wgpu's buffer.
    pub fn raw(&self) -> &wgpu::Buffer {
        &self.raw
    }

    /// All of it, as a binding. Its size is the allocation's, a multiple of 16, so that a shader may read
    /// the last elements as a vec4; kernels take their lengths from parameters, not from `arrayLength`.
    pub fn whole(&self) -> Region {
        Region { buffer: self.clone(), offset: 0, size: self.raw.size() }
    }

    /// `size` bytes from `offset`, as a binding. Checked where it is used.
    pub fn region(&self, offset: u64, size: u64) -> Region {
        Region { buffer: self.clone(), offset, size }
    }

    fn fail(&self, message: String) -> GpuError {
        GpuError::Transfer { what: format!("buffer {}", self.label), message }
    }
}

/// Read-backs are cut in pieces of this size, so that reading a table of gigabytes needs no second copy of
/// it in mappable memory.
const CHUNK: u64 = 32 << 20;

/// Mappable buffers that are kept for the next read.
const POOL_BUFFERS: usize = 4;

/// Reusable mappable buffers.
#[derive(Debug, Default)]
pub(crate) struct StagingPool {
    free: Mutex<Vec<wgpu::Buffer>>,
}

impl StagingPool {
    fn take(&self, gpu: &Gpu, bytes: u64) -> Result<wgpu::Buffer, GpuError> {
        {
            let mut free = lock(&self.free);
            let fitting = free.iter().enumerate().filter(|(_, b)| b.size() >= bytes);
            if let Some((i, _)) = fitting.min_by_key(|(_, b)| b.size()) {
                return Ok(free.swap_remove(i));
            }
        }
        // Powers of two, so that reads of similar sizes share a buffer.
        let size = bytes.next_power_of_two().max(4096).min(gpu.limits().max_buffer_size & !3);
        let doing = Doing::Allocate("read-back staging".to_string(), size);
        gpu.scoped(doing, || {
            gpu.device().create_buffer(&wgpu::BufferDescriptor {
                label: Some("read-back staging"),
                size,
                usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            })
        })
    }

    fn give_back(&self, buffer: wgpu::Buffer) {
        let mut free = lock(&self.free);
        free.push(buffer);
        if free.len() > POOL_BUFFERS {
            // The smallest is the cheapest to make again.
            if let Some((i, _)) = free.iter().enumerate().min_by_key(|(_, b)| b.size()) {
                free.swap_remove(i);
            }
        }
    }
}

/// One piece of a read-back: bytes `from` of `reads[read]`'s buffer go to `to..` of its result.
struct Piece {
    read: usize,
    from: u64,
    len: u64,
}

impl Gpu {
    /// Allocates a zeroed storage buffer of `bytes` for the tensor `label`, which a kernel can bind whole.
    pub fn create_buffer(&self, label: &str, bytes: u64) -> Result<Buffer, GpuError> {
        let limit = self.limits().max_storage_buffer_binding_size;
        fits(label, bytes, limit, "maxStorageBufferBindingSize")?;
        self.create_arena(label, bytes)
    }

    /// Allocates a zeroed storage buffer that may exceed what one binding can see; kernels bind regions.
    ///
    /// WebGPU tracks use by buffer, not by region: a kernel may not read one region and write another of
    /// the same buffer unless it declares both `read_write`.
    pub fn create_arena(&self, label: &str, bytes: u64) -> Result<Buffer, GpuError> {
        let limits = self.limits();
        fits(label, bytes, limits.max_buffer_size, "maxBufferSize")?;
        // At least one vec4, as a binding may not be empty and a shader may see an array of them.
        let size = bytes.max(1).next_multiple_of(16).min(limits.max_buffer_size);
        let raw = self.scoped(Doing::Allocate(format!("tensor {label}"), bytes), || {
            self.device().create_buffer(&wgpu::BufferDescriptor {
                label: Some(label),
                size,
                usage: wgpu::BufferUsages::STORAGE
                    | wgpu::BufferUsages::COPY_SRC
                    | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            })
        })?;
        Ok(Buffer { raw, label: label.into(), bytes })
    }

    /// Allocates a buffer that holds `data`.
    pub fn create_buffer_with<T: bytemuck::NoUninit>(
        &self,
        label: &str,
        data: &[T],
    ) -> Result<Buffer, GpuError> {
        let buffer = self.create_buffer(label, size_of_val(data) as u64)?;
        self.write(&buffer, 0, data)?;
        Ok(buffer)
    }

    /// Uploads `data` to `offset` bytes into `buffer`, before whatever is submitted next.
    ///
    /// The offset must be a multiple of 4; a length that is not may only end the buffer.
    pub fn write<T: bytemuck::NoUninit>(
        &self,
        buffer: &Buffer,
        offset: u64,
        data: &[T],
    ) -> Result<(), GpuError> {
        let bytes: &[u8] = bytemuck::cast_slice(data);
        let len = bytes.len() as u64;
        if offset.checked_add(len).is_none_or(|end| end > buffer.bytes) {
            return Err(buffer.fail(format!("cannot write {len} bytes at {offset}, it has {}", buffer.bytes)));
        }
        let tail = bytes.len() % 4;
        if !offset.is_multiple_of(4) || (tail != 0 && offset + len != buffer.bytes) {
            return Err(
                buffer.fail(format!("cannot write {len} bytes at {offset}, both must be multiples of 4"))
            );
        }
        let (words, rest) = bytes.split_at(bytes.len() - tail);
        if !words.is_empty() {
            self.queue().write_buffer(&buffer.raw, offset, words);
        }
        if tail != 0 {
            let mut last = [0; 4];
            last[..tail].copy_from_slice(rest);
            self.queue().write_buffer(&buffer.raw, offset + words.len() as u64, &last);
        }
        self.check("uploading data")
    }

    /// Reads elements `range` of `buffer`, after all that was submitted.
    pub async fn read_async<T: bytemuck::Pod>(
        &self,
        buffer: &Buffer,
        range: Range<u64>,
    ) -> Result<Vec<T>, GpuError> {
        let mut all = self.read_many_async(&[(buffer, range)]).await?;
        Ok(all.pop().unwrap_or_default())
    }

    /// Reads several ranges of elements in as few submissions as their size allows, mostly one.
    pub async fn read_many_async<T: bytemuck::Pod>(
        &self,
        reads: &[(&Buffer, Range<u64>)],
    ) -> Result<Vec<Vec<T>>, GpuError> {
        let width = size_of::<T>() as u64;
        let mut results: Vec<Vec<T>> = Vec::with_capacity(reads.len());
        let mut pieces = Vec::new();
        for (read, (buffer, range)) in reads.iter().enumerate() {
            let ends = range.start.checked_mul(width).zip(range.end.checked_mul(width));
            let Some((start, end)) = ends.filter(|(s, e)| s <= e && *e <= buffer.bytes) else {
                return Err(buffer.fail(format!(
                    "cannot read elements {}..{} of {width} bytes, it has {} bytes",
                    range.start, range.end, buffer.bytes
                )));
            };
            results.push(vec![T::zeroed(); (range.end - range.start) as usize]);
            let mut from = start;
            while from < end {
                let len = (end - from).min(CHUNK);
                pieces.push(Piece { read, from, len });
                from += len;
            }
        }
        let mut rest = pieces.as_slice();
        let mut done = vec![0usize; reads.len()];
        while !rest.is_empty() {
            let mut total = 0;
            let mut n = 0;
            while n < rest.len() && (n == 0 || total + span(&rest[n]).1 <= CHUNK) {
                total += span(&rest[n]).1;
                n += 1;
            }
            let (batch, later) = rest.split_at(n);
            rest = later;
            self.read_batch(reads, batch, total, &mut results, &mut done).await?;
        }
        Ok(results)
    }

    /// Copies `batch` to one staging buffer, maps it, and scatters it over `results`.
    async fn read_batch<T: bytemuck::Pod>(
        &self,
        reads: &[(&Buffer, Range<u64>)],
        batch: &[Piece],
        total: u64,
        results: &mut [Vec<T>],
        done: &mut [usize],
    ) -> Result<(), GpuError> {
        const DOING: &str = "reading results back";
        let staging = self.inner.staging.take(self, total)?;
        let mut encoder = self.device().create_command_encoder(&Default::default());
        let mut at = 0;
        for piece in batch {
            let (start, len) = span(piece);
            encoder.copy_buffer_to_buffer(&reads[piece.read].0.raw, start, &staging, at, Some(len));
            at += len;
        }
        let index = self.submit(encoder.finish(), DOING)?;

        let arrived = Arc::new(Arrival::default());
        let tell = arrived.clone();
        staging.map_async(wgpu::MapMode::Read, ..total, move |r| tell.set(r.map_err(|e| e.to_string())));
        // Nobody else polls natively, so the future below would never wake by itself.
        if cfg!(not(target_arch = "wasm32")) {
            let wait = wgpu::PollType::Wait { submission_index: Some(index), timeout: None };
            self.poll(wait, DOING)?;
        }
        let what = || format!("buffer {}", reads[batch[0].read].0.label);
        let failed = |message| GpuError::Transfer { what: what(), message };
        arrived.wait().await.map_err(|e| match self.check(DOING) {
            Err(better) => better,
            Ok(()) => failed(format!("cannot map the read-back: {e}")),
        })?;
        {
            let view = staging
                .get_mapped_range(..total)
                .map_err(|e| failed(format!("cannot map the read-back: {e}")))?;
            let mut at = 0;
            for piece in batch {
                let (start, len) = span(piece);
                let skip = at + (piece.from - start) as usize;
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut results[piece.read]);
                let to = done[piece.read];
                let n = piece.len as usize;
                bytes[to..to + n].copy_from_slice(&view[skip..skip + n]);
                done[piece.read] += n;
                at += len as usize;
            }
        }
        staging.unmap();
        self.inner.staging.give_back(staging);
        Ok(())
    }

    /// [`Gpu::read_async`] for hosts that can block.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn read<T: bytemuck::Pod>(&self, buffer: &Buffer, range: Range<u64>) -> Result<Vec<T>, GpuError> {
        pollster::block_on(self.read_async(buffer, range))
    }

    /// [`Gpu::read_many_async`] for hosts that can block.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn read_many<T: bytemuck::Pod>(
        &self,
        reads: &[(&Buffer, Range<u64>)],
    ) -> Result<Vec<Vec<T>>, GpuError> {
        pollster::block_on(self.read_many_async(reads))
    }
}

/// A read-back whose copies are queued: what is submitted later does not change what it reads.
#[cfg(not(target_arch = "wasm32"))]
#[derive(Debug)]
pub struct ReadBack {
    gpu: Gpu,
    /// Staging buffer, message of its mapping, bytes; in order.
    parts: Vec<(wgpu::Buffer, Arc<Arrival>, u64)>,
    /// Words of each result.
    lengths: Vec<usize>,
    index: Option<wgpu::SubmissionIndex>,
}

#[cfg(not(target_arch = "wasm32"))]
impl Gpu {
    /// Queues copies of the first words (four bytes) of buffers, and returns at once.
    pub fn begin_read(&self, reads: &[(&Buffer, usize)]) -> Result<ReadBack, GpuError> {
        const DOING: &str = "reading back";
        let mut encoder = self.device().create_command_encoder(&Default::default());
        let mut parts = vec![];
        for (buffer, n) in reads {
            let (mut from, end) = (0, 4 * *n as u64);
            if end > buffer.bytes {
                return Err(buffer.fail(format!("cannot read {end} bytes, it has {}", buffer.bytes)));
            }
            while from < end {
                let len = (end - from).min(CHUNK);
                let staging = self.inner.staging.take(self, len)?;
                encoder.copy_buffer_to_buffer(&buffer.raw, from, &staging, 0, Some(len));
                parts.push((staging, Arc::new(Arrival::default()), len));
                from += len;
            }
        }
        let index = self.submit(encoder.finish(), DOING)?;
        for (staging, arrival, len) in &parts {
            let tell = arrival.clone();
            staging.map_async(wgpu::MapMode::Read, ..*len, move |r| tell.set(r.map_err(|e| e.to_string())));
        }
        let lengths = reads.iter().map(|r| r.1).collect();
        Ok(ReadBack { gpu: self.clone(), parts, lengths, index: Some(index) })
    }
}

#[cfg(not(target_arch = "wasm32"))]
impl ReadBack {
    /// Waits for the copies.
    pub fn finish(self) -> Result<Vec<Vec<u32>>, GpuError> {
        const DOING: &str = "reading back";
        let wait = wgpu::PollType::Wait { submission_index: self.index, timeout: None };
        self.gpu.poll(wait, DOING)?;
        let failed = |message| GpuError::Transfer { what: "read-back".into(), message };
        let mut results: Vec<Vec<u32>> = self.lengths.iter().map(|n| Vec::with_capacity(*n)).collect();
        let mut at = 0;
        for (staging, arrival, len) in self.parts {
            pollster::block_on(arrival.wait()).map_err(|e| match self.gpu.check(DOING) {
                Err(better) => better,
                Ok(()) => failed(format!("cannot map it: {e}")),
            })?;
            while results[at].len() == self.lengths[at] {
                at += 1;
            }
            {
                let view =
                    staging.get_mapped_range(..len).map_err(|e| failed(format!("cannot map it: {e}")))?;
                results[at].extend_from_slice(bytemuck::cast_slice(&view));
            }
            staging.unmap();
            self.gpu.inner.staging.give_back(staging);
        }
        Ok(results)
    }
}

fn fits(label: &str, bytes: u64, limit: u64, limit_name: &'static str) -> Result<(), GpuError> {
    if bytes <= limit {
        return Ok(());
    }
    Err(GpuError::TooLarge {
        what: format!("tensor {label}"),
        needed: bytes,
        limit,
        limit_name,
        hint: "use a smaller batch, table or width, or --device cpu".to_string(),
    })
}

/// The 4-byte aligned copy that covers a piece: start and length.
fn span(piece: &Piece) -> (u64, u64) {
    let start = piece.from & !3;
    (start, (piece.from + piece.len).next_multiple_of(4) - start)
}

/// A one-shot message from wgpu's map callback to the reader.
#[derive(Debug, Default)]
struct Arrival {
    state: Mutex<ArrivalState>,
}

#[derive(Debug, Default)]
struct ArrivalState {
    result: Option<Result<(), String>>,
    reader: Option<Waker>,
}

impl Arrival {
    fn set(&self, result: Result<(), String>) {
        let waker = {
            let mut state = lock(&self.state);
            state.result = Some(result);
            state.reader.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn wait(&self) -> impl Future<Output = Result<(), String>> + '_ {
        std::future::poll_fn(|context| {
            let mut state = lock(&self.state);
            match state.result.take() {
                Some(result) => std::task::Poll::Ready(result),
                None => {
                    state.reader = Some(context.waker().clone());
                    std::task::Poll::Pending
                }
            }
        })
    }
}
