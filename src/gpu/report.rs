//! The text of `birkhoff devices`.

use std::fmt::Write;

use serde::Serialize;

use super::adapter::AdapterReport;
use crate::text::human_bytes;

/// The CPU executor's line of `birkhoff devices`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CpuReport {
    /// Threads that the executor would use.
    pub threads: usize,
    /// Widest vector instructions found.
    pub simd: String,
}

/// Describes the CPU executor on this machine.
pub fn cpu_report() -> CpuReport {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    CpuReport { threads, simd: simd_name().to_string() }
}

fn simd_name() -> &'static str {
    #[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
    {
        if std::arch::is_x86_feature_detected!("avx512f") {
            return "avx512";
        }
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
            return "avx2+fma";
        }
        if std::arch::is_x86_feature_detected!("avx") {
            return "avx";
        }
        "sse2"
    }
    #[cfg(target_arch = "aarch64")]
    {
        "neon"
    }
    #[cfg(target_arch = "wasm32")]
    {
        if cfg!(target_feature = "simd128") { "simd128" } else { "none" }
    }
    #[cfg(not(any(
        target_arch = "x86_64",
        target_arch = "x86",
        target_arch = "aarch64",
        target_arch = "wasm32"
    )))]
    {
        "unknown"
    }
}

/// A table of every device, the CPU executor first, with the one that `auto` picks marked by `*`.
pub fn render_devices(cpu: &CpuReport, adapters: &[AdapterReport]) -> String {
    let auto_is_cpu = !adapters.iter().any(|a| a.auto);
    let threads = if cpu.threads == 1 { "thread" } else { "threads" };
    let mut rows = vec![
        ["", "device", "backend", "type", "driver", "features"].map(str::to_string),
        [
            if auto_is_cpu { "*" } else { "" }.to_string(),
            "cpu".to_string(),
            "cpu executor".to_string(),
            "cpu".to_string(),
            format!("{} {threads}", cpu.threads),
            cpu.simd.clone(),
        ],
    ];
    for a in adapters {
        let features = [(a.timestamp_query, "timestamps"), (a.f16, "f16"), (a.subgroups, "subgroups")];
        let features: Vec<_> = features.iter().filter(|(has, _)| *has).map(|(_, n)| *n).collect();
        rows.push([
            if a.auto { "*" } else { "" }.to_string(),
            format!("{}: {}", a.index, a.name),
            a.backend.clone(),
            a.device_type.clone(),
            format!("{} {}", a.driver, a.driver_info).trim().to_string(),
            features.join(" "),
        ]);
    }
    let mut out = table(&rows);
    for a in adapters {
        let l = &a.limits;
        let _ = writeln!(
            out,
            "{}: binding {}, buffer {}, {} invocations and {} memory a workgroup, {} storage buffers, {} workgroups a dimension",
            a.index,
            human_bytes(l.max_storage_buffer_binding_size),
            human_bytes(l.max_buffer_size),
            l.max_compute_invocations_per_workgroup,
            human_bytes(l.max_compute_workgroup_storage_size.into()),
            l.max_storage_buffers_per_shader_stage,
            l.max_compute_workgroups_per_dimension,
        );
    }
    if adapters.is_empty() {
        out.push_str("no GPU adapter found (a driver for Vulkan, Metal or DirectX 12 is needed)\n");
    }
    out.push_str("* = --device auto\n");
    out
}

/// Pads columns to their widest cell; shared with the profile table.
pub(crate) fn table<const N: usize>(rows: &[[String; N]]) -> String {
    let mut widths = [0; N];
    for row in rows {
        for (w, cell) in widths.iter_mut().zip(row) {
            *w = (*w).max(cell.chars().count());
        }
    }
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, w) in row.iter().zip(widths) {
            let _ = write!(line, "{cell:<w$}  ");
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_alone() {
        let cpu = CpuReport { threads: 2, simd: "avx2+fma".to_string() };
        let text = render_devices(&cpu, &[]);
        assert!(text.contains("* ") && text.contains("2 threads") && text.contains("avx2+fma"));
        assert!(text.contains("no GPU adapter found"));
    }
}
