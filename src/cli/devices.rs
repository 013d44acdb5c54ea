//! `birkhoff devices`: what a model can run on here.

use serde::Serialize;

use super::args::DevicesArgs;
use super::output;
use crate::gpu::{AdapterReport, CpuReport, cpu_report, list_adapters, render_devices};

/// What `--json` prints.
#[derive(Serialize)]
struct Report<'a> {
    auto: Auto,
    cpu: &'a CpuReport,
    adapters: &'a [AdapterReport],
}

/// What `--device auto` takes.
#[derive(Serialize)]
struct Auto {
    /// What `--device` takes for the same: `cpu` or an adapter's number.
    device: String,
    name: String,
}

fn auto(adapters: &[AdapterReport]) -> Auto {
    match adapters.iter().find(|a| a.auto) {
        Some(a) => Auto { device: a.index.to_string(), name: a.name.clone() },
        None => Auto { device: "cpu".into(), name: "cpu executor".into() },
    }
}

/// Runs `birkhoff devices`.
pub fn run(args: &DevicesArgs) -> anyhow::Result<()> {
    let (cpu, adapters) = (cpu_report(), list_adapters());
    let auto = auto(&adapters);
    if args.json {
        return output::json(&Report { auto, cpu: &cpu, adapters: &adapters });
    }
    let table = render_devices(&cpu, &adapters);
    output::line(&format!("{}, here {} ({})", table.trim_end(), auto.device, auto.name))
}
