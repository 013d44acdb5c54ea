//! Forward only: logits of batches, and the metrics of a file.

use crate::data::batch::{Batch, GroupLayout, NO_ROW, SparseIds};
use crate::data::metrics::{Detail, MetricsAccumulator};
use crate::data::schema::{Encoding, Schema, Transform};
use crate::data::{DataError, FittedEncoder};
use crate::gpu::GpuError;
use crate::graph::exec::{Device, Program, State};
use crate::model::build::{
    BuildOptions, DROPOUT, EmbeddingSpec, FeatureSpec, Model, model_with, table_inputs,
};
use crate::model::config::{self, Config, ConfigError};
use crate::model::params::{Kind, Param};
use crate::ops::dropout;
use crate::train::checkpoint::{self, Checkpoint, CheckpointError, TensorRef, TensorSpec};
use crate::train::events::{Interrupted, Report};
use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

/// The schema that a configuration asks for.
pub fn schema(d: &config::DataConfig) -> Schema {
    let transform = match d.numeric {
        config::Numeric::Log => Transform::Log,
        config::Numeric::Standardize => Transform::STANDARDIZE,
        config::Numeric::None => Transform::None,
    };
    let encoding = match d.encoding {
        config::Encoding::Vocabulary => Encoding::Vocabulary {
            min_count: d.min_count as _,
            max_size: (d.max_size > 0).then_some(d.max_size as _),
        },
        config::Encoding::Hash => Encoding::Hash { buckets: d.buckets as _ },
    };
    Schema::criteo(transform, d.indicators, encoding)
}

/// Largest table that one device buffer holds, in bytes; the CPU has no limit.
fn table_limit(device: &Device) -> usize {
    match device {
        Device::Cpu => usize::MAX,
        Device::Gpu(g, _) => {
            let l = g.limits();
            l.max_storage_buffer_binding_size.min(l.max_buffer_size) as usize
        }
    }
}

/// Packs neighbouring categorical columns into tables that fit the device's buffers.
pub fn pack_tables(
    encoder: &FittedEncoder,
    width: usize,
    device: &Device,
) -> Result<(Vec<GroupLayout>, FeatureSpec), DataError> {
    let rows = encoder.table_rows();
    let limit = table_limit(device);
    let mut groups: Vec<Vec<usize>> = vec![];
    let mut held = 0usize;
    for (c, &r) in rows.iter().enumerate() {
        let bytes = r as usize * width * 4;
        match groups.last_mut() {
            Some(g) if held + bytes <= limit => {
                g.push(c);
                held += bytes;
            }
            _ => {
                groups.push(vec![c]);
                held = bytes;
            }
        }
    }
    let tables = groups
        .iter()
        .map(|g| EmbeddingSpec {
            columns: g
                .iter()
                .map(|&c| (encoder.schema.categorical[c].name.clone(), rows[c] as usize))
                .collect(),
            pooled: None,
        })
        .collect();
    let layouts = groups.into_iter().map(|g| GroupLayout::pack(g, &rows)).collect::<Result<_, _>>()?;
    Ok((layouts, FeatureSpec { numeric: encoder.schema.features(), tables }))
}

/// What a model is built from besides the configuration.
#[derive(Clone)]
pub struct Inputs {
    /// Fitted vocabularies and statistics.
    pub encoder: Arc<FittedEncoder>,
    /// Packed tables.
    pub groups: Arc<[GroupLayout]>,
    /// The same for the model.
    pub features: FeatureSpec,
}

impl Inputs {
    /// Packs the encoder's tables for a device.
    pub fn new(encoder: Arc<FittedEncoder>, cfg: &Config, device: &Device) -> Result<Self, DataError> {
        let (groups, features) = pack_tables(&encoder, cfg.model.width, device)?;
        Ok(Inputs { encoder, groups: groups.into(), features })
    }

    /// The forward graph; with `train` as it is trained ([`BuildOptions::new`]).
    pub fn model(&self, cfg: &Config, batch: usize, train: bool) -> Result<Model, ConfigError> {
        let p = self.encoder.click_rate();
        let options = BuildOptions::new(&cfg.train, train, (p / (1.0 - p)).ln());
        model_with(&cfg.model, &self.features, batch, &options)
    }
}

/// Names and shapes of a model's tensors in a checkpoint: packed tables are stored column by column, as
/// `embeddings.C1`.
pub fn tensor_specs(params: &[Param]) -> Vec<TensorSpec> {
    let mut specs = vec![];
    for p in params {
        match &p.kind {
            Kind::Embedding(columns) => specs.extend(columns.iter().map(|(name, rows)| TensorSpec {
                name: format!("embeddings.{name}"),
                shape: vec![*rows, p.shape().last()],
            })),
            _ => specs.push(TensorSpec { name: p.name.clone(), shape: p.shape().dims() }),
        }
    }
    specs
}

/// Splits parameter values into checkpoint tensors, in the order of [`tensor_specs`].
pub fn to_tensors<'a>(
    specs: &'a [TensorSpec],
    params: &[Param],
    values: &'a [Cow<'_, [f32]>],
) -> Vec<TensorRef<'a>> {
    let mut specs = specs.iter();
    let mut out = vec![];
    for (p, v) in params.iter().zip(values) {
        let parts = match &p.kind {
            Kind::Embedding(columns) => columns.iter().map(|(_, rows)| rows * p.shape().last()).collect(),
            _ => vec![v.len()],
        };
        let mut rest: &[f32] = v;
        for len in parts {
            let (data, tail) = rest.split_at(len);
            rest = tail;
            let s = specs.next().expect("one spec a tensor");
            out.push(TensorRef { name: &s.name, shape: &s.shape, data });
        }
    }
    out
}

/// Puts a value's parts on the device.
pub(super) fn upload_state(
    state: &mut State,
    name: &str,
    parts: impl Iterator<Item = Vec<f32>>,
) -> anyhow::Result<()> {
    let mut parts = parts;
    let mut whole = parts.next().unwrap_or_default();
    parts.for_each(|p| whole.extend(p));
    Ok(state.set(name, &whole)?)
}

/// Puts checkpoint tensors (in the order of [`tensor_specs`]) back into parameters on the device.
pub fn from_tensors(params: &[Param], tensors: Vec<Vec<f32>>, state: &mut State) -> anyhow::Result<()> {
    let mut tensors = tensors.into_iter();
    for p in params {
        let n = if let Kind::Embedding(c) = &p.kind { c.len() } else { 1 };
        upload_state(state, &p.name, tensors.by_ref().take(n))?;
    }
    Ok(())
}

/// The name of an input of one of several batches of an update.
pub(super) fn part_name(name: &str, part: usize) -> String {
    format!("{name}@{part}")
}

/// Uploads a batch into a program's inputs.
pub fn upload(program: &mut Program, batch: &Batch) -> anyhow::Result<()> {
    upload_examples(program, batch, &|name| name.into())?;
    upload_indices(program, batch.groups.iter())
}

/// What a batch's examples are made of.
fn upload_examples(
    program: &mut Program,
    batch: &Batch,
    rename: &dyn Fn(&str) -> String,
) -> anyhow::Result<()> {
    let mut floats = |name: &str, values: &[f32]| match program.has_input(&rename(name)) {
        true => program.set(&rename(name), values),
        false => Ok(()),
    };
    floats("numeric", &batch.numeric)?;
    floats("label", &batch.labels)?;
    floats("weight", &batch.weights)?;
    for (i, s) in batch.groups.iter().enumerate() {
        program.set_ids(&rename(&table_inputs(i).ids), &s.ids)?;
    }
    Ok(())
}

/// The order of each table's ids, where a program has gradients.
fn upload_indices<'a>(
    program: &mut Program,
    groups: impl Iterator<Item = &'a SparseIds>,
) -> anyhow::Result<()> {
    for (i, s) in groups.enumerate() {
        let names = table_inputs(i);
        if program.has_input(&names.order) {
            program.set_ids(&names.order, &s.order)?;
            program.set_ids(&names.segments, &s.segments)?;
            program.set_ids(&names.unique, &s.unique)?;
        }
    }
    Ok(())
}

/// Uploads the batches of a training step, and the keys of its dropouts. The last update of an epoch may have fewer than
/// `accumulate` batches: the rest is padding.
pub fn upload_step(
    program: &mut Program,
    batches: &[Batch],
    cfg: &config::TrainConfig,
    step: u64,
) -> anyhow::Result<()> {
    let k = cfg.accumulate;
    let mut keys = |name: &str, part: usize| match program.has_input(name) {
        true => program.set_ids(name, &dropout::key(cfg.seed, step, part as u64)),
        false => Ok(()),
    };
    if k == 1 {
        keys(DROPOUT, 0)?;
        return upload(program, &batches[0]);
    }
    let padding = batches[0].padding();
    for part in 0..k {
        keys(&part_name(DROPOUT, part), part)?;
    }
    for part in 0..k {
        let batch = batches.get(part).unwrap_or(&padding);
        upload_examples(program, batch, &|name| part_name(name, part))?;
    }
    let merged: Vec<SparseIds> = (0..padding.groups.len())
        .map(|i| merge(&batches.iter().map(|b| &b.groups[i]).collect::<Vec<_>>(), k))
        .collect();
    upload_indices(program, merged.iter())
}

/// The index of the ids of up to `k` batches as of one: occurrences are counted through all of them.
fn merge(parts: &[&SparseIds], k: usize) -> SparseIds {
    let n = parts[0].order.len();
    let mut keys: Vec<u64> = vec![];
    for (part, s) in parts.iter().enumerate() {
        for (row, run) in s.unique[..s.n_unique].iter().zip(s.segments.windows(2)) {
            let places = &s.order[run[0] as usize..run[1] as usize];
            let key = |p: &u32| u64::from(*row) << 32 | ((part * n) as u64 + u64::from(*p));
            keys.extend(places.iter().map(key));
        }
    }
    keys.sort_unstable();
    let mut out = SparseIds::default();
    for (i, key) in keys.iter().enumerate() {
        let row = (key >> 32) as u32;
        if out.unique.last() != Some(&row) {
            out.unique.push(row);
            out.segments.push(i as u32);
        }
        out.order.push(*key as u32);
    }
    out.n_unique = out.unique.len();
    out.order.resize(k * n, 0);
    out.segments.resize(k * n + 1, keys.len() as u32);
    out.unique.resize(k * n, NO_ROW);
    out
}

/// One run of a program, with pauses between its operations where `report` wants them.
pub async fn run_with_pauses(
    program: &mut Program,
    state: &mut State,
    report: &mut dyn Report,
) -> Result<(), GpuError> {
    let mut at = 0;
    while let Some(next) = program.run_some(state, at, &mut || report.pause_due())? {
        at = next;
        if let Some(wait) = report.pause() {
            wait.await;
        }
    }
    Ok(())
}

/// A model ready to score batches of a fixed size.
pub struct Scorer {
    program: Program,
    /// Rows a batch.
    pub batch: usize,
}

impl Scorer {
    /// Compiles the forward graph for weights that are in `state`.
    pub fn new(cfg: &Config, inputs: &Inputs, device: &Device, state: &State) -> anyhow::Result<Self> {
        let batch = cfg.train.eval_batch;
        let m = inputs.model(cfg, batch, false)?;
        let program = Program::compile(device, state, &m.graph, &[m.logits], "evaluation")?;
        Ok(Scorer { program, batch })
    }

    /// Logits of the batch's real rows.
    pub async fn logits(&mut self, state: &mut State, batch: &Batch) -> anyhow::Result<Vec<f32>> {
        self.logits_with_pauses(state, batch, &mut ()).await
    }

    /// As [`Scorer::logits`], with pauses between operations where `report` wants them.
    pub async fn logits_with_pauses(
        &mut self,
        state: &mut State,
        batch: &Batch,
        report: &mut dyn Report,
    ) -> anyhow::Result<Vec<f32>> {
        upload(&mut self.program, batch)?;
        run_with_pauses(&mut self.program, state, report).await?;
        let mut v = self.program.read(&[0]).await?.pop().unwrap_or_default();
        v.truncate(batch.rows);
        Ok(v)
    }

    /// Metrics over all batches; `report` may pause between them, or end it with [`Interrupted`].
    pub async fn evaluate(
        &mut self,
        state: &mut State,
        loader: &mut crate::data::loader::Loader,
        mut progress: impl FnMut(usize),
        report: &mut dyn Report,
    ) -> anyhow::Result<Detail> {
        let mut acc = MetricsAccumulator::new();
        while let Some(batch) = loader.next() {
            let batch = batch?;
            let s = self.logits_with_pauses(state, &batch, report).await?;
            acc.push_batch(&s, &batch);
            progress(batch.rows);
            loader.recycle(batch);
            if report.interrupt() {
                return Err(Interrupted { step: 0 }.into());
            }
            if let Some(wait) = report.pause() {
                wait.await;
            }
        }
        Ok(acc.finish_detail())
    }
}

/// A finished run, loaded for scoring.
pub struct LoadedRun {
    /// The run's configuration.
    pub config: Config,
    /// Vocabularies and tables.
    pub inputs: Inputs,
    /// Weights on the device.
    pub state: State,
    /// The compiled forward graph.
    pub scorer: Scorer,
}

impl LoadedRun {
    /// Reads configuration, vocabularies and weights of a run folder.
    pub fn open(path: &Path, device: &Device) -> anyhow::Result<Self> {
        let run = crate::train::run::RunFolder::open(path)?;
        let encoder = FittedEncoder::load(&run.vocab_path())?;
        let weights = run.weights_path();
        Self::new(run.read_config()?, encoder, device, |specs| checkpoint::load(&weights, specs))
    }

    /// As [`LoadedRun::open`], from the contents of the run's files, for batches of `batch` rows.
    pub fn from_bytes(
        config: &str,
        vocab: &[u8],
        weights: &[u8],
        batch: usize,
        device: &Device,
    ) -> anyhow::Result<Self> {
        use crate::train::run::{CONFIG, VOCAB, WEIGHTS};
        let config = Config::from_text(CONFIG, config, &[format!("train.eval_batch={batch}")])?;
        let encoder = FittedEncoder::read_from(Path::new(VOCAB), vocab)?;
        Self::new(config, encoder, device, |specs| checkpoint::from_bytes(WEIGHTS, weights, specs))
    }

    fn new(
        config: Config,
        encoder: FittedEncoder,
        device: &Device,
        weights: impl FnOnce(&[TensorSpec]) -> Result<Checkpoint, CheckpointError>,
    ) -> anyhow::Result<Self> {
        let inputs = Inputs::new(Arc::new(encoder), &config, device)?;
        let m = inputs.model(&config, config.train.eval_batch, false)?;
        let ck = weights(&tensor_specs(&m.params))?;
        let mut state = State::new(device);
        from_tensors(&m.params, ck.tensors, &mut state)?;
        let scorer = Scorer::new(&config, &inputs, device, &state)?;
        Ok(LoadedRun { config, inputs, state, scorer })
    }
}
