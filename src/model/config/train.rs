//! `[train]`: how a model is trained.

use super::read::Reader;
use super::validate::{MAX_BATCH, MAX_COUNT, number, range};
use super::*;

/// `[train]`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TrainConfig {
    /// Rows a step. Default 512.
    pub batch: usize,
    /// Rows a step of evaluation. Default 4096.
    pub eval_batch: usize,
    /// Passes over the training file. Default 1.
    pub epochs: usize,
    /// Seed of initialisation and row order. Default 1.
    pub seed: u64,
    /// Steps between evaluations; 0 = at the end of each epoch only. Default 0.
    pub eval_every: usize,
    /// Steps between checkpoints, beside the one at each evaluation; 0 = none. Default 0.
    pub checkpoint_every: usize,
    /// Minutes between checkpoints, beside those; 0 = none. Default 10.
    pub checkpoint_minutes: f64,
    /// Checkpoints that are kept, the newest. Default 3.
    pub keep: usize,
    /// Steps between logged lines; 0 = none. Default 20.
    pub log_every: usize,
    /// Steps between diagnoses of the residual stream; 0 = none. Default 20.
    pub diagnose_every: usize,
    /// Validation rows, the first of the file, that a diagnosis runs on. Default 64.
    pub diagnose_rows: usize,
    /// Evaluations without a better normalized entropy before the run stops; 0 = never. Default 3.
    pub patience: usize,
    /// Peak learning rate of AdamW. Default 5e-3.
    pub lr: f64,
    /// Default "cosine".
    pub schedule: Schedule,
    /// Steps of linear warm-up. Default 20.
    pub warmup: usize,
    /// AdamW's decay of the first moment. Default 0.9.
    pub beta1: f64,
    /// AdamW's decay of the second moment. Default 0.95.
    pub beta2: f64,
    /// AdamW's ε, outside the root. Default 1e-8.
    pub eps: f64,
    /// Decoupled weight decay, not on biases, norms, α and embeddings. Default 0.01.
    pub weight_decay: f64,
    /// Largest global gradient norm; 0 = no clipping. Default 1.
    pub clip: f64,
    /// Default "adagrad".
    pub embedding: EmbeddingOptimizer,
    /// Peak learning rate of the embedding rows. Default 0.05.
    pub embedding_lr: f64,
    /// ε of the embedding optimiser. Default 1e-8.
    pub embedding_eps: f64,
    /// Standard deviation of the embeddings at the start. Default 0.05.
    pub embedding_init: f64,
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            batch: 512,
            eval_batch: 4096,
            epochs: 1,
            seed: 1,
            eval_every: 0,
            checkpoint_every: 0,
            checkpoint_minutes: 10.0,
            keep: 3,
            log_every: 20,
            diagnose_every: 20,
            diagnose_rows: 64,
            patience: 3,
            lr: 5e-3,
            schedule: Schedule::Cosine,
            warmup: 20,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.01,
            clip: 1.0,
            embedding: EmbeddingOptimizer::Adagrad,
            embedding_lr: 0.05,
            embedding_eps: 1e-8,
            embedding_init: 0.05,
        }
    }
}

/// Reads the table over the defaults in `c`.
pub(super) fn read(r: &mut Reader<'_>, c: &mut TrainConfig) -> Result<(), ConfigError> {
    r.read("batch", &mut c.batch)?;
    r.read("eval_batch", &mut c.eval_batch)?;
    r.read("epochs", &mut c.epochs)?;
    r.read("seed", &mut c.seed)?;
    r.read("eval_every", &mut c.eval_every)?;
    r.read("checkpoint_every", &mut c.checkpoint_every)?;
    r.read("checkpoint_minutes", &mut c.checkpoint_minutes)?;
    r.read("keep", &mut c.keep)?;
    r.read("log_every", &mut c.log_every)?;
    r.read("diagnose_every", &mut c.diagnose_every)?;
    r.read("diagnose_rows", &mut c.diagnose_rows)?;
    r.read("patience", &mut c.patience)?;
    r.read("lr", &mut c.lr)?;
    r.read("schedule", &mut c.schedule)?;
    r.read("warmup", &mut c.warmup)?;
    r.read("beta1", &mut c.beta1)?;
    r.read("beta2", &mut c.beta2)?;
    r.read("eps", &mut c.eps)?;
    r.read("weight_decay", &mut c.weight_decay)?;
    r.read("clip", &mut c.clip)?;
    r.read("embedding", &mut c.embedding)?;
    r.read("embedding_lr", &mut c.embedding_lr)?;
    r.read("embedding_eps", &mut c.embedding_eps)?;
    r.read("embedding_init", &mut c.embedding_init)
}

/// Checks ranges.
pub(super) fn validate(t: &TrainConfig) -> Result<(), ConfigError> {
    range("train.batch", t.batch, 1, MAX_BATCH)?;
    range("train.eval_batch", t.eval_batch, 1, MAX_BATCH)?;
    range("train.epochs", t.epochs, 1, 1_000_000)?;
    // TOML's integers are signed.
    range("train.seed", t.seed, 0, i64::MAX as u64)?;
    range("train.eval_every", t.eval_every, 0, MAX_COUNT)?;
    range("train.checkpoint_every", t.checkpoint_every, 0, MAX_COUNT)?;
    number(
        "train.checkpoint_minutes",
        t.checkpoint_minutes,
        (0.0..=1e6).contains(&t.checkpoint_minutes),
        "0 to 1000000 (0 = none)",
    )?;
    range("train.keep", t.keep, 1, 1000)?;
    range("train.log_every", t.log_every, 0, MAX_COUNT)?;
    range("train.diagnose_every", t.diagnose_every, 0, MAX_COUNT)?;
    range("train.diagnose_rows", t.diagnose_rows, 1, 65_536usize)?;
    range("train.patience", t.patience, 0, MAX_COUNT)?;
    range("train.warmup", t.warmup, 0, MAX_COUNT)?;
    for (key, rate) in [("train.lr", t.lr), ("train.embedding_lr", t.embedding_lr)] {
        number(key, rate, rate > 0.0 && rate <= 1000.0, "above 0 and at most 1000")?;
    }
    for (key, beta) in [("train.beta1", t.beta1), ("train.beta2", t.beta2)] {
        number(key, beta, (0.0..1.0).contains(&beta), "at least 0 and below 1")?;
    }
    for (key, eps) in [("train.eps", t.eps), ("train.embedding_eps", t.embedding_eps)] {
        number(key, eps, eps > 0.0 && eps <= 1.0, "above 0 and at most 1")?;
    }
    number("train.weight_decay", t.weight_decay, (0.0..=100.0).contains(&t.weight_decay), "0 to 100")?;
    number("train.clip", t.clip, t.clip >= 0.0, "at least 0 (0 = no clipping)")?;
    number("train.embedding_init", t.embedding_init, (0.0..=10.0).contains(&t.embedding_init), "0 to 10")
}
