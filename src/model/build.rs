//! The whole model: features, stack, head (math.md sections 1, 3, 4, 6).

use super::config::{ConfigError, LayerPlan, ModelConfig, ResidualMode, TrainConfig};
use super::layer::shortcut_layer;
use super::params::{AttentionProbe, Builder, Dropouts, Init, Kind, Param};
use super::residual::{Coefficients, collapse, expand, stream_layer};
use crate::data::batch::GroupLayout;
use crate::graph::{Graph, Tensor};
use crate::ops::embedding::{Pool, SparseInputs};
use crate::ops::expr::{Bin, Expr, Un};

/// One packed embedding table: neighbouring categorical columns, in schema order, or a table that is looked up by
/// bags of ids.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EmbeddingSpec {
    /// Column names and their numbers of rows; of a pooled table the column that owns it.
    pub columns: Vec<(String, usize)>,
    /// A table looked up by bags: a multi-valued column, or several columns of one table.
    pub pooled: Option<Pooled>,
    /// Width of its rows where it is not the model's; a learned matrix `[width, d]` brings them to it.
    pub width: Option<usize>,
    /// The categorical slot of each of its outputs; empty: the next ones in order.
    pub slots: Vec<usize>,
}

impl EmbeddingSpec {
    /// Slots that it fills.
    pub fn outputs(&self) -> usize {
        self.pooled.map_or(self.columns.len(), |p| p.bags)
    }
}

/// How a multi-valued column is pooled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pooled {
    /// Ids in a batch, at most.
    pub capacity: usize,
    /// Mean instead of sum.
    pub mean: bool,
    /// Bags of an example: the slots that it fills.
    pub bags: usize,
}

/// What the data offers to the model.
#[derive(Clone, Debug, PartialEq)]
pub struct FeatureSpec {
    /// Numeric columns after transformation, missing indicators included; may be 0.
    pub numeric: usize,
    /// Packed tables; their columns in schema order.
    pub tables: Vec<EmbeddingSpec>,
}

impl FeatureSpec {
    /// The same where the capacities of pooled tables are of one example: for batches of `batch` examples. `groups` are
    /// the tables' layouts.
    pub fn for_batch(&self, batch: usize, groups: &[GroupLayout]) -> FeatureSpec {
        let mut features = self.clone();
        for (table, group) in features.tables.iter_mut().zip(groups) {
            if let Some(pooled) = &mut table.pooled {
                pooled.capacity = group.ids(batch);
            }
        }
        features
    }

    /// Input slots m.
    pub fn slots(&self, cfg: &ModelConfig) -> usize {
        let dense = if self.numeric > 0 { cfg.features.dense_slots } else { 0 };
        dense + self.tables.iter().map(EmbeddingSpec::outputs).sum::<usize>()
    }
}

/// The forward graph with handles on what training, evaluation and diagnosis need.
#[derive(Clone, Debug)]
pub struct Model {
    /// The graph.
    pub graph: Graph,
    /// Parameters, in order of appearance.
    pub params: Vec<Param>,
    /// Logits `[B]`.
    pub logits: Tensor,
    /// Weighted mean cross-entropy `[1]`: `loss_sum / weight_sum`.
    pub loss: Tensor,
    /// Σ w·ce `[1]`.
    pub loss_sum: Tensor,
    /// Σ w `[1]`, kept above zero.
    pub weight_sum: Tensor,
    /// X0 `[B, m, d]`.
    pub x0: Tensor,
    /// Coefficients of each layer (`hc`, `mhc`).
    pub coefficients: Vec<Coefficients>,
    /// What each module of each layer contributes, its weight included.
    pub contributions: Vec<Vec<Tensor>>,
    /// What leaves each layer: `[B, l, d]`, or the streams `[B, l, n, d]`.
    pub states: Vec<Tensor>,
    /// The layers with every number decided.
    pub plans: Vec<LayerPlan>,
    /// Queries and keys of every attention.
    pub attentions: Vec<AttentionProbe>,
    /// Index inputs of each table's gradient; empty where [`BuildOptions::index`] is off.
    pub sparse: Vec<SparseInputs>,
    /// What is gathered from each table.
    pub gathers: Vec<Gathered>,
    /// Batch size.
    pub batch: usize,
}

/// What was looked up in a table.
#[derive(Clone, Copy, Debug)]
pub struct Gathered {
    /// `[B, slots, width]`, before any projection.
    pub tensor: Tensor,
    /// Ids in a batch, at most.
    pub ids: usize,
    /// Whether an id's gradient has a factor (a mean of several).
    pub scaled: bool,
}

/// Names of the graph inputs of table `i`.
#[derive(Clone, Debug)]
pub struct TableInputs {
    /// Packed table rows, `[B, columns]` or `[capacity]`.
    pub ids: String,
    /// Bag bounds of a pooled table, `[B·bags + 1]`.
    pub offsets: String,
    /// See `ops::embedding::SparseInputs`; in training graphs only.
    pub order: String,
    /// As `order`.
    pub segments: String,
    /// As `order`.
    pub unique: String,
    /// As `order`, for pooled tables.
    pub scale: String,
}

/// The input names of table `i`.
pub fn table_inputs(i: usize) -> TableInputs {
    let name = |k: &str| format!("table{i}.{k}");
    TableInputs {
        ids: name("ids"),
        offsets: name("offsets"),
        order: name("order"),
        segments: name("segments"),
        unique: name("unique"),
        scale: name("scale"),
    }
}

/// How a model is built, beside its shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BuildOptions {
    /// Adds the inputs that the gradients of the tables need.
    pub index: bool,
    /// Standard deviation of the embeddings at the start.
    pub embedding_std: f64,
    /// Start of the head's last bias: the log-odds of the training click rate.
    pub log_odds: f64,
    /// Probability of leaving out an element of an embedding.
    pub embedding_dropout: f64,
    /// Probability of leaving out a hidden unit of an MLP.
    pub mlp_dropout: f64,
    /// How far labels are drawn towards 1/2.
    pub label_smoothing: f64,
    /// What rows with label 1 weigh, times their own weight.
    pub positive_weight: f64,
}

impl BuildOptions {
    /// The model as it predicts, or with `train` as it is trained: with dropout, smoothed labels and class weights.
    /// `log_odds` are those of the training click rate; class weights move them.
    pub fn new(t: &TrainConfig, train: bool, log_odds: f64) -> Self {
        let only = |v: f64| if train { v } else { 0.0 };
        BuildOptions {
            index: train && t.accumulate == 1,
            embedding_std: t.embedding_init,
            log_odds: log_odds + t.positive_weight.ln(),
            embedding_dropout: only(t.embedding_dropout),
            mlp_dropout: only(t.mlp_dropout),
            label_smoothing: only(t.label_smoothing),
            positive_weight: if train { t.positive_weight } else { 1.0 },
        }
    }
}

/// Name of the graph input with the key of a step's dropouts.
pub const DROPOUT: &str = "dropout";

/// Builds the model for a static batch size, without dropout and class weights; `train` adds the inputs that gradients
/// need. `log_odds` starts the head's last bias: the log-odds of the training click rate.
pub fn model(
    cfg: &ModelConfig,
    features: &FeatureSpec,
    batch: usize,
    train: bool,
    embedding_std: f64,
    log_odds: f64,
) -> Result<Model, ConfigError> {
    let options = BuildOptions {
        index: train,
        embedding_std,
        log_odds,
        ..BuildOptions::new(&TrainConfig::default(), false, 0.0)
    };
    model_with(cfg, features, batch, &options)
}

/// Builds the model for a static batch size.
pub fn model_with(
    cfg: &ModelConfig,
    features: &FeatureSpec,
    batch: usize,
    options: &BuildOptions,
) -> Result<Model, ConfigError> {
    let plans = cfg.resolve(features.slots(cfg))?;
    let d = cfg.width;
    let mut g = Graph::new();
    let mut b = Builder::new(&mut g);

    if options.embedding_dropout > 0.0 || options.mlp_dropout > 0.0 {
        let key = b.g.input_ids(DROPOUT, [2]);
        b.dropouts = Some(Dropouts { key, mlp: options.mlp_dropout, sites: 0 });
    }

    let mut sparse = vec![];
    let mut gathers = vec![];
    let x0 = x0(&mut b, cfg, features, batch, options, &mut sparse, &mut gathers);
    let mut coefficients = vec![];
    let mut contributions = vec![];
    let mut states = vec![];
    let res = &cfg.residual;
    let x = b.scoped("layers", |b| match res.mode {
        ResidualMode::Shortcut => {
            let mut x = x0;
            for p in &plans {
                let (y, parts) = b.scoped(p.index.to_string(), |b| shortcut_layer(b, p, x));
                contributions.push(parts);
                states.push(y);
                x = y;
            }
            x
        }
        _ => {
            let mut s = expand(b, x0, res.streams);
            for p in &plans {
                let (y, c, parts) = b.scoped(p.index.to_string(), |b| stream_layer(b, p, res, s));
                coefficients.push(c);
                contributions.push(parts);
                states.push(y);
                s = y;
            }
            collapse(b, s, res.collapse)
        }
    });
    let x =
        if res.mode != ResidualMode::Shortcut && res.final_norm { b.layer_norm("final_norm", x) } else { x };

    let logits = b.scoped("head", |b| {
        let flat = x.reshaped([batch, x.dim(1) * d]);
        let mut widths = cfg.head.hidden.clone();
        widths.push(1);
        let y = b.mlp(flat, &widths, false);
        y.reshaped([batch])
    });
    let last = format!("head.b{}", cfg.head.hidden.len());
    let bias = b.params.iter_mut().find(|p| p.name == last).expect("the head has a last bias");
    bias.init = Init::Const(options.log_odds);

    // Σ w·(softplus(s) − y·s) / Σ w
    let (y, w) = (b.g.input("label", [batch]), b.g.input("weight", [batch]));
    let (loss, loss_sum, weight_sum) = b.scoped("loss", |b| {
        let w = match options.positive_weight {
            1.0 => w,
            // w·(1 + (p − 1)·y)
            p => {
                let mut e = Expr::input(0);
                let y_ = e.arg(1);
                let (one, more) = (e.num(1.0), e.num(p - 1.0));
                let f = e.bin(Bin::Mul, more, y_);
                let f = e.bin(Bin::Add, one, f);
                let f = e.bin(Bin::Mul, 0, f);
                b.g.map(e.finish(f), &[w, y])
            }
        };
        let y = match options.label_smoothing {
            0.0 => y,
            s => b.g.affine(y, 1.0 - s, 0.5 * s),
        };
        let mut e = Expr::input(0);
        let (y_, w_) = (e.arg(1), e.arg(2));
        let sp = e.un(Un::Softplus, 0);
        let ys = e.bin(Bin::Mul, y_, 0);
        let ce = e.bin(Bin::Sub, sp, ys);
        let wce = e.bin(Bin::Mul, w_, ce);
        let ce = b.g.map(e.finish(wce), &[logits, y, w]);
        let (ce, w) = (b.g.sum_all(ce), b.g.sum_all(w));
        // rows that all weigh nothing have no loss, rather than 0/0
        let mut e = Expr::input(0);
        let least = e.num(1e-20);
        let w_ = e.bin(Bin::Max, 0, least);
        let w = b.g.map(e.finish(w_), &[w]);
        (b.g.div(ce, w), ce, w)
    });
    let (params, attentions) = (b.params, b.attentions);
    Ok(Model {
        graph: g,
        params,
        logits,
        loss,
        loss_sum,
        weight_sum,
        x0,
        coefficients,
        contributions,
        states,
        plans,
        attentions,
        sparse,
        gathers,
        batch,
    })
}

/// Numeric MLP and embeddings, concatenated over slots: X0 `[B, m, d]`.
fn x0(
    b: &mut Builder<'_>,
    cfg: &ModelConfig,
    features: &FeatureSpec,
    batch: usize,
    options: &BuildOptions,
    sparse: &mut Vec<SparseInputs>,
    gathers: &mut Vec<Gathered>,
) -> Tensor {
    let d = cfg.width;
    let mut slots = vec![];
    if features.numeric > 0 {
        let x = b.g.input("numeric", [batch, features.numeric]);
        let mut widths = cfg.features.dense_hidden.clone();
        widths.push(cfg.features.dense_slots * d);
        let y = b.scoped("numeric", |b| b.mlp(x, &widths, false));
        slots.push(y.reshaped([batch, cfg.features.dense_slots, d]));
    }
    // (slot, its place among the outputs of a table)
    let mut order: Vec<(usize, Tensor, usize)> = vec![];
    let mut embedded = vec![];
    for (i, t) in features.tables.iter().enumerate() {
        let rows: usize = t.columns.iter().map(|c| c.1).sum();
        let kind = Kind::Embedding(t.columns.clone());
        let width = t.width.unwrap_or(d);
        let init = Init::Normal(options.embedding_std);
        let table = b.param(&format!("embeddings.{i}"), &[rows, width], init, kind);
        let names = table_inputs(i);
        let n = t.pooled.map_or(batch * t.columns.len(), |p| p.capacity);
        let outputs = t.outputs();
        let index = options.index.then(|| {
            let s = SparseInputs::new(b.g, &format!("table{i}"), n, t.pooled.is_some());
            sparse.push(s);
            s
        });
        let mut y = b.scoped("embeddings", |b| match t.pooled {
            None => {
                let ids = b.g.input_ids(&names.ids, [batch, t.columns.len()]);
                b.g.gather(table, ids, index.as_ref())
            }
            Some(p) => {
                let ids = b.g.input_ids(&names.ids, [n]);
                let offsets = b.g.input_ids(&names.offsets, [batch * p.bags + 1]);
                let pool = if p.mean { Pool::Mean } else { Pool::Sum };
                let y = b.g.pooled_gather(table, ids, offsets, None, pool, index.as_ref());
                y.reshaped([batch, outputs, width])
            }
        });
        gathers.push(Gathered { tensor: y, ids: n, scaled: t.pooled.is_some() });
        if t.width.is_some_and(|w| w != d) {
            y = b.scoped("projections", |b| {
                let w = b.weight(&t.columns[0].0, &[width, d], Init::glorot(width, d));
                let flat = b.g.matmul(y.reshaped([batch * outputs, width]), w);
                flat.reshaped([batch, outputs, d])
            });
        }
        for k in 0..outputs {
            order.push((t.slots.get(k).copied().unwrap_or(order.len()), y, k));
        }
        embedded.push(y);
    }
    if !order.is_sorted_by_key(|o| o.0) {
        // Tables that several columns share fill slots that are no neighbours.
        order.sort_by_key(|o| o.0);
        let one = |(_, y, k): (usize, Tensor, usize)| if y.dim(1) == 1 { y } else { b.g.slice(y, 1, k, 1) };
        embedded = order.into_iter().map(one).collect();
    }
    if options.embedding_dropout > 0.0 && !embedded.is_empty() {
        // over all columns at once: how they are packed into tables depends on the device
        let y = b.scoped("embeddings", |b| {
            let all = if embedded.len() == 1 { embedded[0] } else { b.g.concat(&embedded, 1) };
            Dropouts::apply(&mut b.dropouts, b.g, all, options.embedding_dropout)
        });
        embedded = vec![y];
    }
    slots.extend(embedded);
    if slots.len() == 1 { slots[0] } else { b.g.concat(&slots, 1) }
}
