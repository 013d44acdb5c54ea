//! Trained models for others to run: weights as safetensors, whole models as ONNX.
//!
//! An ONNX file is the forward graph, translated operation by operation into ONNX's own operators ([`translate`]),
//! with the weights under their names. It takes any batch size. What a server must do itself is to turn rows
//! into numbers and ids, as `vocab.json` describes; the file's metadata name the columns in order.

mod dims;
mod emit;
pub mod proto;
mod translate;

pub use translate::{Input, TranslateError};

use crate::data::FittedEncoder;
use crate::graph::exec::Device;
use crate::model::build::Model;
use crate::model::config::Config;
use crate::train::checkpoint::{self, Checkpoint, CheckpointMeta, TensorRef, TensorSpec};
use crate::train::infer::{Inputs, tensor_specs};
use crate::train::resume::STATE;
use crate::train::run::{RunFolder, shard_step, write_atomic};
use crate::train::{sharded, trained_as};
use anyhow::{Context, bail};
use prost::Message;
use proto::{
    FLOAT, GraphProto, INT64, ModelProto, OperatorSetIdProto, StringStringEntryProto, TensorProto, value_info,
};
use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// ONNX's operator set: the first with layer normalization.
const OPSET: i64 = 17;
/// The file format's version that goes with it.
const IR_VERSION: i64 = 8;

/// Weights of more bytes than this go to a file beside the model: protobuf ends at 2 GiB.
const LARGEST: usize = 1_900_000_000;

/// A tensor with its name and shape.
#[derive(Clone, Debug, PartialEq)]
pub struct Weight {
    /// Name and shape.
    pub spec: TensorSpec,
    /// Elements.
    pub data: Vec<f32>,
}

/// A model as ONNX, its weights not yet written.
#[derive(Clone, Debug)]
pub struct OnnxModel {
    /// Everything but the weights.
    proto: ModelProto,
    weights: Vec<Weight>,
    inputs: Vec<Input>,
}

impl OnnxModel {
    /// Translates a model. `build` makes its forward graph for a batch size; `weights` are its tensors as a
    /// checkpoint holds them, embeddings column by column; `metadata` are kept in the file.
    pub fn new<E>(
        build: impl Fn(usize) -> Result<Model, E>,
        weights: Vec<Weight>,
        metadata: &BTreeMap<String, String>,
    ) -> anyhow::Result<Self>
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        let [a, b] = dims::BATCHES;
        let models = [build(a)?, build(b)?];
        let t = translate::translate([&models[0], &models[1]])?;
        let mut by_name: HashMap<String, Weight> =
            weights.into_iter().map(|w| (w.spec.name.clone(), w)).collect();
        let weights = t.weights.iter().map(|name| {
            by_name.remove(name).with_context(|| format!("no weights named {name} for the ONNX file"))
        });
        let weights = weights.collect::<anyhow::Result<Vec<_>>>()?;
        let batch = Err("batch");
        let output = |name, doc| value_info(name, FLOAT, &[batch], doc);
        let graph = GraphProto {
            node: t.emitter.nodes,
            name: "birkhoff".into(),
            initializer: t.emitter.constants,
            input: t.inputs.iter().flat_map(input_info).collect(),
            output: vec![
                output("logit", "log-odds of the label 1"),
                output("score", "probability of the label 1"),
            ],
        };
        let version = env!("CARGO_PKG_VERSION");
        let entry = |(k, v): (&str, &str)| StringStringEntryProto { key: k.into(), value: v.into() };
        let own = std::iter::once(("birkhoff", version));
        let given = metadata.iter().map(|(k, v)| (k.as_str(), v.as_str()));
        let proto = ModelProto {
            ir_version: IR_VERSION,
            producer_name: "birkhoff".into(),
            producer_version: version.into(),
            doc_string:
                "Feed rows that are encoded as the run's vocab.json says; the metadata name the columns."
                    .into(),
            graph: Some(graph),
            opset_import: vec![OperatorSetIdProto { domain: String::new(), version: OPSET }],
            metadata_props: own.chain(given).map(entry).collect(),
        };
        Ok(OnnxModel { proto, weights, inputs: t.inputs })
    }

    /// What the model is to be fed.
    pub fn inputs(&self) -> &[Input] {
        &self.inputs
    }

    /// Number of nodes.
    pub fn nodes(&self) -> usize {
        self.proto.graph.as_ref().map_or(0, |g| g.node.len())
    }

    /// The bytes of a file that holds everything.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut proto = self.proto.clone();
        let graph = proto.graph.get_or_insert_default();
        for w in &self.weights {
            let mut raw = Vec::with_capacity(4 * w.data.len());
            raw.extend(w.data.iter().flat_map(|x| x.to_le_bytes()));
            graph.initializer.push(TensorProto { raw_data: Some(raw), ..tensor(&w.spec) });
        }
        proto.encode_to_vec()
    }

    /// Writes the model; returns the file of its weights, where they are too large to be in the same one.
    pub fn save(&self, path: &Path) -> anyhow::Result<Option<PathBuf>> {
        let total: usize = self.weights.iter().map(|w| 4 * w.data.len()).sum();
        if total <= LARGEST {
            let bytes = self.to_bytes();
            write_atomic(path, |w| w.write_all(&bytes))?;
            return Ok(None);
        }
        self.save_apart(path).map(Some)
    }

    /// Writes the model with its weights beside it, in `FILE.data`; returns that path.
    pub fn save_apart(&self, path: &Path) -> anyhow::Result<PathBuf> {
        let Some(name) = path.file_name() else { bail!("{}: not a file name", path.display()) };
        let location = format!("{}.data", name.to_string_lossy());
        let beside = path.with_file_name(&location);
        let mut proto = self.proto.clone();
        let graph = proto.graph.get_or_insert_default();
        let mut offset = 0;
        for w in &self.weights {
            let length = 4 * w.data.len();
            let entry = |k: &str, v: String| StringStringEntryProto { key: k.into(), value: v };
            graph.initializer.push(TensorProto {
                data_location: Some(1),
                external_data: vec![
                    entry("location", location.clone()),
                    entry("offset", offset.to_string()),
                    entry("length", length.to_string()),
                ],
                ..tensor(&w.spec)
            });
            offset += length;
        }
        write_atomic(&beside, |out| {
            for w in &self.weights {
                for chunk in w.data.chunks(1 << 16) {
                    out.write_all(&chunk.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())?;
                }
            }
            Ok(())
        })?;
        let bytes = proto.encode_to_vec();
        write_atomic(path, |w| w.write_all(&bytes))?;
        Ok(beside)
    }
}

fn tensor(spec: &TensorSpec) -> TensorProto {
    TensorProto {
        dims: spec.shape.iter().map(|&d| d as i64).collect(),
        data_type: FLOAT,
        name: spec.name.clone(),
        ..TensorProto::default()
    }
}

fn input_info(input: &Input) -> Vec<proto::ValueInfoProto> {
    let batch = Err("batch");
    match input {
        Input::Numeric(n) => {
            let doc = "transformed numeric columns, then missing indicators";
            vec![value_info("numeric", FLOAT, &[batch, Ok(*n)], doc)]
        }
        Input::Ids(n) => {
            let doc = "ids of the categorical columns, each from 0 within its column";
            vec![value_info("ids", INT64, &[batch, Ok(*n)], doc)]
        }
        Input::Bag { name, bags } => {
            let items = format!("{name}.items");
            let ends = if *bags == 1 { "batch + 1".into() } else { format!("{bags} * batch + 1") };
            vec![
                value_info(
                    &format!("{name}.ids"),
                    INT64,
                    &[Err(&items)],
                    "ids of all rows, one after the other",
                ),
                value_info(
                    &format!("{name}.offsets"),
                    INT64,
                    &[Err(&ends)],
                    "where the ids of each row (of each of its bags) begin; then their number",
                ),
            ]
        }
    }
}

/// A run, with the weights of one of its steps, on the host.
pub struct TrainedRun {
    /// Its configuration.
    pub config: Config,
    /// Vocabularies and the layout of the tables.
    pub inputs: Inputs,
    /// What the weights' file says of itself.
    pub meta: CheckpointMeta,
    /// The weights, as a checkpoint holds them.
    pub weights: Vec<Weight>,
    /// `vocab.json`.
    pub vocab: PathBuf,
}

impl TrainedRun {
    /// Opens a run folder: its best weights, or those of a step.
    pub fn open(path: &Path, step: Option<u64>) -> anyhow::Result<Self> {
        let run = if step.is_none() { RunFolder::open(path)? } else { RunFolder::look(path)? };
        let config = run.read_config()?;
        let encoder = Arc::new(FittedEncoder::load(&run.vocab_path())?);
        let file = match step {
            None => run.weights_path(),
            Some(step) => weights_of_step(path, step)?,
        };
        trained_as::check(&run.config_path(), &config, &checkpoint::read_header(&file)?.meta)?;
        let inputs = Inputs::new(encoder, &config, &Device::Cpu)?.in_multiples();
        let m = inputs.model(&config, dims::BATCHES[0], false)?;
        let specs = tensor_specs(&m.params);
        let ck = load(&file, &specs)?;
        let weights = specs.into_iter().zip(ck.tensors).map(|(spec, data)| Weight { spec, data }).collect();
        Ok(TrainedRun { config, inputs, meta: ck.meta, weights, vocab: run.vocab_path() })
    }

    /// Writes the weights alone, as safetensors.
    pub fn save_weights(&self, path: &Path) -> anyhow::Result<()> {
        let tensors: Vec<TensorRef<'_>> = self.weights.iter().map(|w| w.spec.with(&w.data)).collect();
        checkpoint::save(path, &tensors, &self.meta)?;
        Ok(())
    }

    /// The whole model.
    pub fn onnx(self) -> anyhow::Result<OnnxModel> {
        let metadata = self.metadata();
        let (config, inputs) = (self.config, self.inputs);
        OnnxModel::new(|batch| inputs.model(&config, batch, false), self.weights, &metadata)
    }

    /// What a server needs to know besides the graph.
    fn metadata(&self) -> BTreeMap<String, String> {
        let schema = &self.inputs.encoder.schema;
        let mut numeric: Vec<String> = schema.numeric.iter().map(|c| c.name.clone()).collect();
        let indicators = schema.numeric.iter().filter(|c| c.indicator);
        numeric.extend(indicators.map(|c| format!("{} missing", c.name)));
        let rows = self.inputs.encoder.table_rows();
        let categorical: Vec<_> = schema
            .categorical
            .iter()
            .zip(rows)
            .map(|(c, rows)| serde_json::json!({"name": c.name, "rows": rows}))
            .collect();
        let mut m = self.meta.extra.clone();
        m.remove(trained_as::CONFIG);
        let (mut ids, mut bags) = (vec![], serde_json::Map::new());
        for table in &self.inputs.features.tables {
            match table.pooled {
                None => ids.extend(table.columns.iter().map(|c| c.0.clone())),
                Some(_) => {
                    let names: Vec<&str> =
                        table.slots.iter().map(|&j| schema.categorical[j].name.as_str()).collect();
                    bags.insert(table.columns[0].0.clone(), serde_json::json!(names));
                }
            }
        }
        m.insert("ids".into(), serde_json::json!(ids).to_string());
        m.insert("bags".into(), serde_json::Value::Object(bags).to_string());
        m.insert("step".into(), self.meta.step.to_string());
        m.insert("seed".into(), self.meta.seed.to_string());
        m.insert("numeric".into(), serde_json::json!(numeric).to_string());
        m.insert("categorical".into(), serde_json::json!(categorical).to_string());
        m
    }
}

/// Reads the model's tensors from a file that may hold more, such as the optimiser's state.
fn load(file: &Path, specs: &[TensorSpec]) -> anyhow::Result<Checkpoint> {
    let mut from = sharded::Checkpoint::open(file)?;
    let there = from.tensors();
    if there.len() == specs.len() || specs.iter().any(|s| !there.contains(s)) {
        from.check(specs)?;
    }
    from.verify(|_| true)?;
    let mut meta = from.meta().clone();
    // where training stood, for going on with it
    meta.extra.remove(STATE);
    let tensors = specs.iter().map(|s| from.whole(&s.name)).collect::<Result<_, _>>()?;
    Ok(Checkpoint { meta, tensors })
}

/// Writes a checkpoint of a run, the newest or that of a step, as one file, whatever number of ranks wrote it: the whole
/// training state. Returns its step and what is in it.
pub fn save_state(run: &Path, step: Option<u64>, to: &Path) -> anyhow::Result<(u64, Vec<TensorSpec>)> {
    let all = RunFolder::look(run)?.checkpoints();
    let found = all.iter().rev().find(|(s, _)| step.is_none_or(|step| step == *s));
    let Some((step, path)) = found else {
        let steps: Vec<u64> = all.iter().map(|c| c.0).collect();
        bail!(
            "{}: no checkpoint{}; there are those of step {}",
            run.display(),
            step.map_or(String::new(), |s| format!(" of step {s}")),
            listed(&steps)
        )
    };
    let mut from = sharded::Checkpoint::open(path)?;
    from.verify(|_| true)?;
    let (tensors, meta) = (from.tensors(), from.meta().clone());
    from.gather(to, &tensors, &meta)?;
    Ok((*step, tensors))
}

/// Steps as an error lists them.
fn listed(steps: &[u64]) -> String {
    match steps {
        [] => "none".into(),
        _ => steps.iter().map(u64::to_string).collect::<Vec<_>>().join(", "),
    }
}

/// The file of a run's folder, or of a folder in it, that holds the weights after `step` steps.
fn weights_of_step(run: &Path, step: u64) -> anyhow::Result<PathBuf> {
    let mut folders = vec![run.to_owned()];
    let mut files = vec![];
    while let Some(folder) = folders.pop() {
        let entries = std::fs::read_dir(&folder).with_context(|| format!("{}", folder.display()))?;
        for path in entries.flatten().map(|e| e.path()) {
            let hidden = path.file_name().is_some_and(|n| n.to_string_lossy().starts_with('.'));
            let snapshots = path.ends_with(crate::train::run::SNAPSHOTS);
            if path.is_dir() && !hidden && !snapshots && folder == run {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "safetensors") && !hidden {
                files.push(path);
            }
        }
    }
    files.sort();
    let mut steps = vec![];
    for file in files {
        // what is no weights' file is not meant, nor a part of one
        if file.file_name().and_then(shard_step).is_some() {
            continue;
        }
        let Ok(header) = checkpoint::read_header(&file) else { continue };
        if header.meta.step == step {
            return Ok(file);
        }
        steps.push(header.meta.step);
    }
    steps.sort_unstable();
    steps.dedup();
    bail!("{}: no weights of step {step}; there are those of step {}", run.display(), listed(&steps))
}
