//! `birkhoff inspect`: what a configuration costs, before any data is read.

use super::args::InspectArgs;
use super::output;
use crate::data::schema::Encoding;
use crate::graph::{dot, fuse::fuse, gpu::lower, plan};
use crate::model::build::{BuildOptions, EmbeddingSpec, FeatureSpec, model_with};
use crate::model::config::Config;
use crate::ops::{Cost, GpuCaps, matmul::ByDevice};
use crate::text::group;
use crate::text::human_bytes;
use crate::train::run::write_atomic;
use crate::train::step::training_step;
use serde::Serialize;
use std::io::Write;
use std::sync::Arc;

/// Rows assumed for a column whose vocabulary is not known yet.
const ASSUMED_ROWS: usize = 1000;

#[derive(Serialize)]
struct OpCost {
    op: String,
    nodes: usize,
    flops: f64,
    bytes_read: f64,
    bytes_written: f64,
}

#[derive(Serialize)]
struct Inspection {
    batch: usize,
    slots: usize,
    parameters: usize,
    dense_parameters: usize,
    embedding_parameters: usize,
    assumed_rows_per_column: usize,
    flops_per_step: f64,
    flops_per_example: f64,
    bytes_per_step: f64,
    memory_planned_bytes: usize,
    memory_unshared_bytes: usize,
    nodes: usize,
    dispatches: usize,
    operations: Vec<OpCost>,
}

/// Runs the subcommand.
pub fn run(args: &InspectArgs) -> anyhow::Result<()> {
    let cfg = args.resolve_config()?;
    let features = assumed_features(&cfg)?;
    let batch = cfg.train.batch;
    let m = model_with(&cfg.model, &features, batch, &BuildOptions::new(&cfg.train, true, 0.0))?;
    let (mut dense, mut embedding) = (0, 0);
    let mut largest: Vec<(String, usize)> = vec![];
    for p in &m.params {
        let n = p.shape().len();
        if p.is_table() {
            embedding += n
        } else {
            dense += n
        }
        largest.push((format!("{} {}", p.name, p.shape()), n));
    }
    let step = training_step(m, &cfg.train);
    let (g, keep) = fuse(&step.graph, &[step.loss, step.norm2]);
    let order = plan::live_nodes(&g, &keep);
    if let Some(file) = &args.dot {
        output::not_an_input(file, &args.config.iter().map(|c| c.as_path()).collect::<Vec<_>>())?;
        let text = dot::dot(&g, &order);
        write_atomic(file, |w| w.write_all(text.as_bytes()))?;
    }
    let caps = GpuCaps { is_cpu: false, matmul: Arc::new(ByDevice { is_cpu: false }) };
    let (p, launches) = lower(&g, &keep, &caps);

    let mut ops: Vec<OpCost> = vec![];
    let mut total = Cost::default();
    for &n in &order {
        let node = &g.nodes()[n];
        let c = g.cost(node);
        total.flops += c.flops;
        total.read += c.read;
        total.written += c.written;
        let name = node.op.name();
        let at = ops.iter().position(|o| o.op == name).unwrap_or_else(|| {
            ops.push(OpCost { op: name.into(), nodes: 0, flops: 0.0, bytes_read: 0.0, bytes_written: 0.0 });
            ops.len() - 1
        });
        let o = &mut ops[at];
        o.nodes += 1;
        o.flops += c.flops;
        o.bytes_read += c.read;
        o.bytes_written += c.written;
    }
    ops.sort_by(|a, b| b.flops.total_cmp(&a.flops));
    let i = Inspection {
        batch,
        slots: features.slots(&cfg.model),
        parameters: dense + embedding,
        dense_parameters: dense,
        embedding_parameters: embedding,
        assumed_rows_per_column: features.tables.first().map_or(0, |t| t.columns[0].1),
        flops_per_step: total.flops,
        flops_per_example: total.flops / batch as f64,
        bytes_per_step: total.read + total.written,
        memory_planned_bytes: p.peak(),
        memory_unshared_bytes: p.unshared,
        nodes: order.len(),
        dispatches: launches.iter().map(|(_, l)| l.kernels.len()).sum(),
        operations: ops,
    };
    if args.json { output::json(&i) } else { print(&i, &mut largest) }
}

/// The configuration's columns, with the table sizes where it fixes them; a list is taken to hold one value.
fn assumed_features(cfg: &Config) -> anyhow::Result<FeatureSpec> {
    let schema = crate::train::schema::schema(&cfg.data)?;
    let rows = |encoding: &Encoding| match *encoding {
        Encoding::Hash { buckets } => 2 + buckets as usize,
        Encoding::Vocabulary { max_size: Some(n), .. } => 2 + n as usize,
        Encoding::Vocabulary { .. } => ASSUMED_ROWS,
    };
    let columns: Vec<_> = schema.categorical.iter().map(|c| (c.name.clone(), rows(&c.encoding))).collect();
    let tables =
        if columns.is_empty() { vec![] } else { vec![EmbeddingSpec { columns, ..Default::default() }] };
    Ok(FeatureSpec { numeric: schema.features(), tables })
}

fn print(i: &Inspection, largest: &mut [(String, usize)]) -> anyhow::Result<()> {
    let line = |k: &str, v: String| output::line(&format!("{k:<26} {v}"));
    line("batch, slots", format!("{}, {}", i.batch, i.slots))?;
    line(
        "parameters",
        format!(
            "{} ({} dense, {} in embeddings of {} rows a column{})",
            group(i.parameters as u64),
            group(i.dense_parameters as u64),
            group(i.embedding_parameters as u64),
            group(i.assumed_rows_per_column as u64),
            if i.assumed_rows_per_column == ASSUMED_ROWS { ", assumed" } else { "" }
        ),
    )?;
    largest.sort_by_key(|x| std::cmp::Reverse(x.1));
    for (name, n) in largest.iter().take(5) {
        output::line(&format!("    {:>12}  {name}", group(*n as u64)))?;
    }
    line(
        "FLOPs a training step",
        format!("{:.3} G ({:.1} k an example)", i.flops_per_step / 1e9, i.flops_per_example / 1e3),
    )?;
    line("bytes moved a step", human_bytes(i.bytes_per_step as u64))?;
    line(
        "memory, planned",
        format!(
            "{} of {} without sharing ({:.0} %)",
            human_bytes(i.memory_planned_bytes as u64),
            human_bytes(i.memory_unshared_bytes as u64),
            100.0 * i.memory_planned_bytes as f64 / i.memory_unshared_bytes as f64
        ),
    )?;
    line("operations, dispatches", format!("{}, {}", i.nodes, i.dispatches))?;
    output::line("")?;
    output::line(&format!(
        "{:<26} {:>6} {:>12} {:>12} {:>12}",
        "operation", "nodes", "MFLOP", "read MB", "written MB"
    ))?;
    for o in &i.operations {
        output::line(&format!(
            "{:<26} {:>6} {:>12.2} {:>12.2} {:>12.2}",
            o.op,
            o.nodes,
            o.flops / 1e6,
            o.bytes_read / 1e6,
            o.bytes_written / 1e6
        ))?;
    }
    Ok(())
}
