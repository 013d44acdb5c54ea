//! Forward only: logits of batches, and the metrics of a file.

use crate::data::batch::{Batch, GroupLayout, NO_ROW, SparseIds};
use crate::data::metrics::{Detail, MetricsAccumulator};
use crate::data::{DataError, FittedEncoder};
use crate::gpu::GpuError;
use crate::graph::InputId;
use crate::graph::exec::{Device, Program, State};
use crate::model::build::{BuildOptions, DROPOUT, FeatureSpec, Model, model_with, table_inputs};
use crate::model::config::{self, Config, ConfigError};
use crate::model::params::{Kind, Param};
use crate::ops::dropout;
use crate::train::checkpoint::{self, Checkpoint, CheckpointError, TensorRef, TensorSpec};
use crate::train::events::{Interrupted, Report};
use crate::train::ranks::{Asking, Exchange, Ranks};
use crate::train::tables::pack_tables;
use crate::train::{memory, trained_as};
use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

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

    /// The same with room for as many ids a batch as its rows times those of an example at most: N is a multiple of the
    /// batch, as an exported graph needs it.
    pub fn in_multiples(mut self) -> Self {
        let mut groups = self.groups.to_vec();
        groups.iter_mut().filter_map(|g| g.pooled.as_mut()).for_each(|p| p.lengths.clear());
        self.groups = groups.into();
        self
    }

    /// The forward graph; with `train` as it is trained ([`BuildOptions::new`]).
    pub fn model(&self, cfg: &Config, batch: usize, train: bool) -> Result<Model, ConfigError> {
        let p = self.encoder.click_rate();
        let features = self.features.for_batch(batch, &self.groups);
        let options = BuildOptions::new(&cfg.train, train, (p / (1.0 - p)).ln());
        model_with(&cfg.model, &features, batch, &options)
    }
}

impl Inputs {
    /// The forward graph as it is trained, without index inputs.
    pub(super) fn model_without_index(&self, cfg: &Config, batch: usize) -> Result<Model, ConfigError> {
        let p = self.encoder.click_rate();
        let features = self.features.for_batch(batch, &self.groups);
        let options = BuildOptions::new(&cfg.train, true, (p / (1.0 - p)).ln());
        model_with(&cfg.model, &features, batch, &BuildOptions { index: false, ..options })
    }
}

/// Names and shapes of a model's tensors in a checkpoint: packed tables are stored column by column, as
/// `embeddings.C1`.
pub fn tensor_specs(params: &[Param]) -> Vec<TensorSpec> {
    let mut specs = vec![];
    for p in params {
        match &p.kind {
            Kind::Embedding(columns) => specs.extend(columns.iter().map(|(name, rows)| {
                TensorSpec::f32(format!("embeddings.{name}"), [*rows, p.shape().last()])
            })),
            _ => specs.push(TensorSpec::f32(&p.name, p.shape().dims())),
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
            out.push(s.with(data));
        }
    }
    out
}

/// A value of its parts.
pub(super) fn joined(mut parts: impl Iterator<Item = Vec<f32>>) -> Vec<f32> {
    let mut whole = parts.next().unwrap_or_default();
    parts.for_each(|p| whole.extend(p));
    whole
}

/// Puts checkpoint tensors (in the order of [`tensor_specs`]) back into parameters on the device.
pub fn from_tensors(params: &[Param], tensors: Vec<Vec<f32>>, state: &mut State) -> anyhow::Result<()> {
    let mut tensors = tensors.into_iter();
    for p in params {
        let n = if let Kind::Embedding(c) = &p.kind { c.len() } else { 1 };
        state.set(&p.name, &joined(tensors.by_ref().take(n)))?;
    }
    Ok(())
}

/// Uploads a batch into a program's inputs.
pub fn upload(program: &mut Program, batch: &Batch) -> anyhow::Result<()> {
    upload_examples(program, batch, None, None)?;
    upload_indices(program, batch.groups.iter())
}

/// [`upload`], where the tables may lie on several ranks.
pub(super) fn upload_over(
    program: &mut Program,
    batch: &Batch,
    over: Option<&(Ranks, Exchange)>,
) -> anyhow::Result<()> {
    match over {
        None => upload(program, batch),
        Some((ranks, exchange)) => {
            let asking = ranks.ask(exchange, &batch.groups, false);
            ranks.upload(program, exchange, &[batch], (&batch.groups, asking), false)
        }
    }
}

/// What a batch's examples are made of. `part`: of a graph of several batches, which one; `ids`: in place of each table's
/// own.
pub(super) fn upload_examples(
    program: &mut Program,
    batch: &Batch,
    part: Option<usize>,
    ids: Option<&[Vec<u32>]>,
) -> anyhow::Result<()> {
    let id = |name: &str| InputId { part, ..name.into() };
    let mut floats = |name: &str, values: &[f32]| match program.has_input(id(name)) {
        true => program.set(id(name), values),
        false => Ok(()),
    };
    floats("numeric", &batch.numeric)?;
    floats("label", &batch.labels)?;
    floats("weight", &batch.weights)?;
    for (i, s) in batch.groups.iter().enumerate() {
        let names = table_inputs(i);
        program.set_ids(id(&names.ids), ids.map_or(&s.ids, |ids| &ids[i]))?;
        let offsets = id(&names.offsets);
        if program.has_input(&offsets) {
            program.set_ids(offsets, &s.offsets)?;
        }
    }
    Ok(())
}

/// The order of each table's ids, where a program has gradients.
pub(super) fn upload_indices<'a>(
    program: &mut Program,
    groups: impl Iterator<Item = &'a SparseIds>,
) -> anyhow::Result<()> {
    for (i, s) in groups.enumerate() {
        let names = table_inputs(i);
        if program.has_input(&names.order) {
            program.set_ids(&names.order, &s.order)?;
            program.set_ids(&names.segments, &s.segments)?;
        }
        // only an update reads them, which may be another rank's
        if program.has_input(&names.unique) {
            program.set_ids(&names.unique, &s.unique)?;
        }
        if program.has_input(&names.scale) {
            program.set(&names.scale, &s.scale)?;
        }
    }
    Ok(())
}

/// What a training step needs to know of its batches together.
pub struct Together {
    /// The ids of each table, of all batches; empty where there is one, and no other rank.
    merged: Vec<SparseIds>,
    /// What the ranks need of one another.
    asking: Option<Asking>,
}

impl Together {
    /// Of several ranks all begin here to ask for their rows, beside whatever is computed.
    pub fn new(batches: &[Batch], accumulate: usize, over: Option<(&Ranks, &Exchange)>) -> Self {
        let Some(first) = batches.first().filter(|_| accumulate > 1 || over.is_some()) else {
            return Together { merged: vec![], asking: None };
        };
        let of = |i: usize| batches.iter().map(|b| &b.groups[i]).collect::<Vec<_>>();
        let merged: Vec<SparseIds> = (0..first.groups.len()).map(|i| merge(&of(i), accumulate)).collect();
        let asking = over.map(|(ranks, exchange)| ranks.ask(exchange, &merged, true));
        Together { merged, asking }
    }
}

/// Uploads the batches of a training step, and the keys of its dropouts. What is missing of `accumulate` batches is padding.
pub fn upload_step(
    program: &mut Program,
    batches: &[Batch],
    together: Together,
    cfg: &config::TrainConfig,
    step: u64,
    over: Option<(&Ranks, &Exchange)>,
) -> anyhow::Result<()> {
    let k = cfg.accumulate;
    let Together { merged, asking } = together;
    // every batch of a step has its own dropouts, on whichever rank it is
    let first = over.map_or(0, |(r, _)| r.rank() * k);
    let dropouts = InputId::from(DROPOUT);
    let mut keys = |id: InputId, part: usize| match program.has_input(&id) {
        true => program.set_ids(id, &dropout::key(cfg.seed, step, (first + part) as u64)),
        false => Ok(()),
    };
    if k == 1 && over.is_none() {
        keys(dropouts, 0)?;
        return upload(program, &batches[0]);
    }
    let padding = batches[0].padding();
    for part in 0..k {
        keys(dropouts.of_part(part), part)?;
    }
    if let Some((ranks, exchange)) = over {
        let all: Vec<&Batch> = (0..k).map(|part| batches.get(part).unwrap_or(&padding)).collect();
        let asking = asking.expect("asked with the batches");
        return ranks.upload(program, exchange, &all, (&merged, asking), true);
    }
    for part in 0..k {
        let batch = batches.get(part).unwrap_or(&padding);
        upload_examples(program, batch, Some(part), None)?;
    }
    upload_indices(program, merged.iter())
}

/// The index of the ids of up to `k` batches as of one: what was gathered is counted through all of them.
fn merge(parts: &[&SparseIds], k: usize) -> SparseIds {
    let n = parts[0].order.len();
    // rows of what one part gathers: its occurrences, or its bags
    let stride = if parts[0].offsets.is_empty() { n } else { parts[0].offsets.len() - 1 };
    // (table row, what was gathered, factor)
    let mut keys: Vec<(u32, u32, f32)> = vec![];
    for (part, s) in parts.iter().enumerate() {
        for (row, run) in s.unique[..s.n_unique].iter().zip(s.segments.windows(2)) {
            for at in run[0] as usize..run[1] as usize {
                let factor = s.scale.get(at).copied().unwrap_or(1.0);
                keys.push((*row, (part * stride) as u32 + s.order[at], factor));
            }
        }
    }
    // a bag may hold an id twice: equal keys stay in their order
    keys.sort_by_key(|key| (key.0, key.1));
    let mut out = SparseIds::default();
    for (i, &(row, place, factor)) in keys.iter().enumerate() {
        if out.unique.last() != Some(&row) {
            out.unique.push(row);
            out.segments.push(i as u32);
        }
        out.order.push(place);
        out.scale.push(factor);
    }
    out.n_unique = out.unique.len();
    out.order.resize(k * n, 0);
    out.scale.resize(k * n, 0.0);
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

/// A row whose score is no number.
#[derive(Debug, thiserror::Error)]
#[error(
    "row {row}: its score is not finite (logit {logit}); its numbers are far outside those that the run was trained on, or the \
     weights are damaged: look at the row with `birkhoff check`"
)]
pub struct NoScore {
    /// From 1, bad rows that were skipped not counted.
    pub row: u64,
    /// What came of it.
    pub logit: f32,
}

/// An error that names the first of some rows' logits that is not finite; `before` rows came before them.
pub fn check_scores(logits: &[f32], before: u64) -> Result<(), NoScore> {
    let first = logits.iter().position(|s| !s.is_finite());
    first.map_or(Ok(()), |i| Err(NoScore { row: before + i as u64 + 1, logit: logits[i] }))
}

/// A model ready to score batches of a fixed size.
pub struct Scorer {
    program: Program,
    over: Option<(Ranks, Exchange)>,
    /// Rows a batch.
    pub batch: usize,
}

impl Scorer {
    /// Compiles the forward graph for weights that are in `state`.
    pub fn new(cfg: &Config, inputs: &Inputs, device: &Device, state: &State) -> anyhow::Result<Self> {
        Self::over(cfg, inputs, device, state, None)
    }

    /// The same where the tables lie on several ranks, which all score at the same time.
    pub fn over(
        cfg: &Config,
        inputs: &Inputs,
        device: &Device,
        state: &State,
        ranks: Option<&Ranks>,
    ) -> anyhow::Result<Self> {
        let batch = cfg.train.eval_batch;
        let m = inputs.model(cfg, batch, false)?;
        let (graph, logits, over) = match ranks {
            None => (m.graph, m.logits, None),
            Some(r) => {
                let capacity = m.gathers.iter().map(|t| t.ids).collect();
                let (graph, at, exchange) = r.forward(&m.graph, &m.params, capacity, "evaluation.");
                (graph, at[m.logits.index()].reshaped(m.logits.shape()), Some((r.clone(), exchange)))
            }
        };
        let program = Program::compile(device, state, &graph, &[logits], "evaluation")?;
        Ok(Scorer { program, over, batch })
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
        upload_over(&mut self.program, batch, self.over.as_ref())?;
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
        let (mut acc, mut rows) = (MetricsAccumulator::new(), 0);
        while let Some(batch) = loader.next() {
            let batch = batch?;
            let s = self.logits_with_pauses(state, &batch, report).await?;
            // of several ranks all go on to where they add up: the sum tells
            if self.over.is_none() {
                check_scores(&s, rows)?;
            }
            rows += s.len() as u64;
            acc.push_batch(&s, &batch);
            progress(batch.rows);
            loader.recycle(batch);
            // ranks decide together, at steps
            if self.over.is_none() && report.interrupt() {
                return Err(Interrupted { step: 0 }.into());
            }
            if let Some(wait) = report.pause() {
                wait.await;
            }
        }
        if let Some((ranks, _)) = &self.over {
            acc = ranks.merge(&acc)?;
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
        let (weights, config) = (run.weights_path(), run.read_config()?);
        // before their shapes are compared, which say less
        trained_as::check(&run.config_path(), &config, &checkpoint::read_header(&weights)?.meta)?;
        Self::new(config, encoder, device, |specs| checkpoint::load(&weights, specs))
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
        let specs = tensor_specs(&m.params);
        if device.is_cpu() {
            memory::check_weights(specs.iter().map(|s| s.shape.iter().product::<usize>()).sum())?;
        }
        let ck = weights(&specs)?;
        trained_as::check(Path::new(crate::train::run::CONFIG), &config, &ck.meta)?;
        let mut state = State::new(device);
        from_tensors(&m.params, ck.tensors, &mut state)?;
        let scorer = Scorer::new(&config, &inputs, device, &state)?;
        Ok(LoadedRun { config, inputs, state, scorer })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::feed::{Feed, Files};
    use crate::data::input::Place;
    use crate::data::loader::{LoaderOptions, Order};
    use crate::data::reader::{ReadOptions, Source};

    /// The head begins with the click rate by weight: rows of weight 0 do not count, and weights of 1 are none.
    #[test]
    fn the_head_begins_at_the_weighted_click_rate() {
        let toml = "
            [data]
            format = 'csv'
            min_count = 1
            [[data.columns]]
            name = 'y'
            kind = 'label'
            [[data.columns]]
            name = 'w'
            kind = 'weight'
            [[data.columns]]
            name = 'c'
            kind = 'categorical'
        ";
        let start = |toml: &str, text: &str| {
            let cfg = Config::from_text("t.toml", toml, &[]).unwrap();
            let schema = crate::train::schema::schema(&cfg.data).unwrap();
            let place = Place::Bytes("t.csv".into(), text.as_bytes().into());
            let format = crate::train::schema::format(&cfg.data);
            let source = Source::new(vec![place], format, ReadOptions::default());
            let encoder = crate::data::reader::fit(&source, &schema).unwrap().0;
            // a run's vocabularies keep it
            let mut bytes = vec![];
            encoder.write_to(&mut bytes).unwrap();
            let encoder = FittedEncoder::read_from(Path::new("v"), &bytes[..]).unwrap();
            let inputs = Inputs::new(Arc::new(encoder), &cfg, &Device::Cpu).unwrap();
            let m = inputs.model(&cfg, 4, true).unwrap();
            m.params.iter().find(|p| p.name == "head.b1").unwrap().initial(1)[0]
        };
        let plain = toml.replace("'weight'", "'ignore'");
        let text = "1,3,a\n0,1,b\n0,4,a\n0,0,b\n";
        let log_odds = |positive: f64, rows: f64| {
            let p = (positive + 0.5) / (rows + 1.0);
            (p / (1.0 - p)).ln() as f32
        };
        assert!((start(&plain, text) - log_odds(1.0, 4.0)).abs() < 1e-6);
        assert!((start(toml, text) - log_odds(4.0 * 3.0 / 8.0, 4.0)).abs() < 1e-6);
        assert_eq!(start(toml, "1,1,a\n0,1,b\n0,1,a\n"), start(&plain, "1,1,a\n0,1,b\n0,1,a\n"));
        // no row counts: as without weights
        assert_eq!(start(toml, "1,0,a\n0,0,b\n0,0,a\n"), start(&plain, "1,0,a\n0,0,b\n0,0,a\n"));
    }

    /// Slots come in schema order, whatever tables they are looked up in: `h` is a list of `c`'s values, `b` has
    /// rows of another width.
    #[test]
    fn shared_tables_lists_and_widths_fill_their_slots() {
        let toml = r#"
            [model]
            width = 4
            [data]
            min_count = 1
            [[data.columns]]
            name = "y"
            kind = "label"
            [[data.columns]]
            name = "a"
            kind = "categorical"
            [[data.columns]]
            name = "h"
            kind = "list"
            share = "c"
            [[data.columns]]
            name = "b"
            kind = "categorical"
            width = 2
            [[data.columns]]
            name = "c"
            kind = "categorical"
        "#;
        let cfg = Config::from_text("t.toml", toml, &[]).unwrap();
        let schema = crate::train::schema::schema(&cfg.data).unwrap();
        let text = b"1,p,x|z|x,u,x\n0,q,,v,z\n";
        let place = Place::Bytes("t.csv".into(), (&text[..]).into());
        let source =
            Source::new(vec![place], crate::train::schema::format(&cfg.data), ReadOptions::default());
        let encoder = Arc::new(crate::data::reader::fit(&source, &schema).unwrap().0);
        let device = Device::Cpu;
        let inputs = Inputs::new(encoder.clone(), &cfg, &device).unwrap();
        // a; h and c; b
        assert_eq!(inputs.features.tables.len(), 3);
        let m = inputs.model(&cfg, 3, false).unwrap();
        let names: Vec<String> = tensor_specs(&m.params).into_iter().map(|s| s.name).collect();
        for name in ["embeddings.a", "embeddings.b", "embeddings.c", "projections.b"] {
            assert!(names.iter().any(|n| n == name), "{name} in {names:?}");
        }
        assert!(!names.iter().any(|n| n == "embeddings.h"), "a shared table is stored once");
        let mut state = State::new(&device);
        let values: Vec<(String, Vec<f32>, usize)> =
            m.params.iter().map(|p| (p.name.clone(), p.initial(3), p.shape().last())).collect();
        values.iter().for_each(|(n, v, _)| state.set(n, v).unwrap());
        let mut program = Program::compile(&device, &state, &m.graph, &[m.x0], "x0").unwrap();
        let files: Feed = Files::new(source, encoder.clone()).into();
        let mut loader =
            files.loader(inputs.groups.clone(), Order::Sequential, LoaderOptions::new(3)).unwrap();
        upload(&mut program, &loader.next().unwrap().unwrap()).unwrap();
        program.run(&mut state).unwrap();
        let x0 = pollster::block_on(program.read(&[0])).unwrap().pop().unwrap();
        let row = |table: usize, id: u32| {
            let (_, v, width) = values.iter().find(|v| v.0 == format!("embeddings.{table}")).unwrap();
            &v[id as usize * width..(id as usize + 1) * width]
        };
        let id = |column: usize, value: &str| encoder.columns[column].id(value.as_bytes());
        // example 0: h = mean of x, z, x
        let h: Vec<f32> =
            (0..4).map(|k| (2.0 * row(1, id(3, "x"))[k] + row(1, id(3, "z"))[k]) / 3.0).collect();
        let (_, p, _) = values.iter().find(|v| v.0 == "projections.b").unwrap();
        let b: Vec<f32> =
            (0..4).map(|k| (0..2).map(|i| row(2, id(2, "u"))[i] * p[i * 4 + k]).sum()).collect();
        let want = [row(0, id(0, "p")), &h, &b, row(1, id(3, "x"))].concat();
        assert!(x0[..16].iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-6), "{:?} / {want:?}", &x0[..16]);
        // example 1: an empty list is zeros
        assert!(x0[20..24].iter().all(|&v| v == 0.0) && x0[28..32] == *row(1, id(3, "z")));
    }
}
