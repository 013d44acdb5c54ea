//! How long each kernel of a list takes: timestamps around every dispatch, or the host's clock without.

use std::borrow::Cow;
use std::fmt::Write;

use super::commands::{CommandList, Dispatch};
use super::device::{Doing, Gpu};
use super::error::GpuError;
use super::report::table;

/// Where a profile's times come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// Timestamps written by the device.
    Device,
    /// The host's clock around a submission and a wait for each dispatch, which adds their cost to each.
    Host,
}

/// Times of one run of a [`CommandList`].
#[derive(Clone, Debug)]
pub struct Profile {
    /// Where the times come from.
    pub clock: Clock,
    /// Kernel label and microseconds of each dispatch, in order.
    pub times: Vec<(Cow<'static, str>, f64)>,
}

/// The times of all dispatches of one kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTotal {
    /// Kernel label.
    pub kernel: String,
    /// Dispatches.
    pub calls: usize,
    /// Sum of their times in microseconds.
    pub micros: f64,
    /// Share of the whole list, 0 to 1.
    pub share: f64,
}

impl Profile {
    /// Sums by kernel, the slowest first.
    pub fn totals(&self) -> Vec<KernelTotal> {
        let all: f64 = self.times.iter().map(|t| t.1).sum();
        let mut totals: Vec<KernelTotal> = Vec::new();
        for (label, micros) in &self.times {
            match totals.iter_mut().find(|t| t.kernel == *label) {
                Some(t) => {
                    t.calls += 1;
                    t.micros += micros;
                }
                None => totals.push(KernelTotal {
                    kernel: label.to_string(),
                    calls: 1,
                    micros: *micros,
                    share: 0.0,
                }),
            }
        }
        for t in &mut totals {
            t.share = if all > 0.0 { t.micros / all } else { 0.0 };
        }
        totals.sort_by(|a, b| b.micros.total_cmp(&a.micros));
        totals
    }

    /// Adds another run's times, so that a table can cover several steps.
    pub fn extend(&mut self, other: Profile) {
        if other.clock == Clock::Host {
            self.clock = Clock::Host;
        }
        self.times.extend(other.times);
    }

    /// The table that `--profile` prints.
    pub fn table(&self) -> String {
        let mut rows = vec![["kernel", "calls", "total ms", "share"].map(str::to_string)];
        let totals = self.totals();
        for t in &totals {
            rows.push([
                t.kernel.clone(),
                format!("{:>5}", t.calls),
                format!("{:>8.3}", t.micros / 1e3),
                format!("{:>5.1}%", t.share * 100.0),
            ]);
        }
        let calls: usize = totals.iter().map(|t| t.calls).sum();
        let micros: f64 = totals.iter().map(|t| t.micros).sum();
        rows.push([
            "total".to_string(),
            format!("{calls:>5}"),
            format!("{:>8.3}", micros / 1e3),
            String::new(),
        ]);
        let mut out = table(&rows);
        if self.clock == Clock::Host {
            let _ = writeln!(out, "(no timestamps here: times include a submission and a wait each)");
        }
        out
    }
}

/// Timestamps are resolved to buffers of whole 8-byte words.
const QUERY_BYTES: u64 = wgpu::QUERY_SIZE as u64;

impl CommandList {
    /// Runs the list once and times each dispatch. Much slower than [`CommandList::run`] in itself, as
    /// nothing overlaps; the times of the kernels are what it is for.
    pub async fn run_profiled_async(&self) -> Result<Profile, GpuError> {
        if self.gpu.features().contains(wgpu::Features::TIMESTAMP_QUERY) {
            let mut times = Vec::with_capacity(self.len());
            // Two queries a dispatch.
            for batch in self.dispatches.chunks(wgpu::QUERY_SET_MAX_QUERIES as usize / 2) {
                self.run_timestamped(batch, &mut times).await?;
            }
            return Ok(Profile { clock: Clock::Device, times });
        }
        self.run_host_timed()
    }

    /// [`CommandList::run_profiled_async`] for hosts that can block.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn run_profiled(&self) -> Result<Profile, GpuError> {
        pollster::block_on(self.run_profiled_async())
    }

    async fn run_timestamped(
        &self,
        batch: &[Dispatch],
        times: &mut Vec<(Cow<'static, str>, f64)>,
    ) -> Result<(), GpuError> {
        let gpu: &Gpu = &self.gpu;
        let count = batch.len() as u32 * 2;
        let bytes = u64::from(count) * QUERY_BYTES;
        let stamps = gpu.create_buffer("profiler read-back", bytes)?;
        let doing = format!("profiling {}", self.label);
        let (queries, resolved) = gpu.scoped(Doing::Step(doing.clone()), || {
            let queries = gpu.device().create_query_set(&wgpu::QuerySetDescriptor {
                label: Some("profiler"),
                ty: wgpu::QueryType::Timestamp,
                count,
            });
            // Resolving needs its own usage, which storage buffers do not have.
            let resolved = gpu.device().create_buffer(&wgpu::BufferDescriptor {
                label: Some("profiler"),
                size: bytes,
                usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
                mapped_at_creation: false,
            });
            (queries, resolved)
        })?;
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        for (i, dispatch) in batch.iter().enumerate() {
            let first = i as u32 * 2;
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
                label: Some(&dispatch.label),
                timestamp_writes: Some(wgpu::ComputePassTimestampWrites {
                    query_set: &queries,
                    beginning_of_pass_write_index: Some(first),
                    end_of_pass_write_index: Some(first + 1),
                }),
            });
            pass.set_pipeline(&dispatch.pipeline.raw);
            dispatch.encode(&mut pass);
        }
        encoder.resolve_query_set(&queries, 0..count, &resolved, 0);
        encoder.copy_buffer_to_buffer(&resolved, 0, stamps.raw(), 0, Some(bytes));
        gpu.submit(encoder.finish(), &doing)?;
        let ticks: Vec<u64> = gpu.read_async(&stamps, 0..u64::from(count)).await?;
        let period = f64::from(gpu.queue().get_timestamp_period());
        for (dispatch, pair) in batch.iter().zip(ticks.chunks_exact(2)) {
            // Clocks of some drivers step back when the GPU changes its frequency.
            let nanos = pair[1].saturating_sub(pair[0]) as f64 * period;
            times.push((dispatch.label.clone(), nanos / 1e3));
        }
        Ok(())
    }

    #[cfg(not(target_arch = "wasm32"))]
    fn run_host_timed(&self) -> Result<Profile, GpuError> {
        let mut times = Vec::with_capacity(self.len());
        for (i, dispatch) in self.dispatches.iter().enumerate() {
            self.gpu.wait(&self.label)?;
            let start = std::time::Instant::now();
            self.run_range(i..i + 1)?;
            self.gpu.wait(&self.label)?;
            times.push((dispatch.label.clone(), start.elapsed().as_secs_f64() * 1e6));
        }
        Ok(Profile { clock: Clock::Host, times })
    }

    #[cfg(target_arch = "wasm32")]
    fn run_host_timed(&self) -> Result<Profile, GpuError> {
        Err(GpuError::Transfer {
            what: "profile".to_string(),
            message: "this browser gives no timestamps".to_string(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_and_table() {
        let times = vec![("a".into(), 1000.0), ("b".into(), 5000.0), ("a".into(), 2000.0)];
        let profile = Profile { clock: Clock::Device, times };
        let totals = profile.totals();
        assert_eq!(totals[0].kernel, "b");
        assert_eq!((totals[1].calls, totals[1].micros, totals[1].share), (2, 3000.0, 0.375));
        let text = profile.table();
        assert!(text.contains("37.5%") && text.contains("8.000"), "{text}");
    }
}
