//! `[train]`: how a model is trained.

use super::read::Reader;
use super::validate::{MAX_BATCH, MAX_COUNT, number, range};
use super::*;

/// `[train]`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TrainConfig {
    /// Rows a batch. Default 512.
    pub batch: usize,
    /// Batches an update: their gradients are added up, as of one batch of all their rows. Default 1.
    pub accumulate: usize,
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
    /// The scalars of `metrics.jsonl` for TensorBoard as well. Default true.
    pub tensorboard: bool,
    /// Steps between diagnoses of the residual stream; 0 = none. Default 20.
    pub diagnose_every: usize,
    /// Validation rows, the first of the file, that a diagnosis runs on. Default 64.
    pub diagnose_rows: usize,
    /// What an evaluation is judged by. Default "ne".
    pub monitor: Monitor,
    /// Evaluations without a better one before the run stops; 0 = never. Default 3.
    pub patience: usize,
    /// Peak learning rate of AdamW. Default 5e-3.
    pub lr: f64,
    /// Default "cosine".
    pub schedule: Schedule,
    /// Steps of linear warm-up. Default 20.
    pub warmup: usize,
    /// Where "cosine" and "linear" end, as a factor of the peak rate. Default 0.
    pub schedule_floor: f64,
    /// Borders of "step", as fractions of the run. Default [0.8, 0.9].
    pub step_at: Vec<f64>,
    /// What the rate is multiplied with at each border of "step". Default 0.316.
    pub step_factor: f64,
    /// What "plateau" multiplies the rate with. Default 0.5.
    pub plateau_factor: f64,
    /// Evaluations without a better one before it does. Default 1.
    pub plateau_patience: usize,
    /// The smallest factor of the peak rate that it comes to. Default 0.01.
    pub plateau_min: f64,
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
    /// λ of an L2 penalty on the embedding rows that occur in a batch. Default 0.
    pub embedding_l2: f64,
    /// Whether that penalty is weighed by each row's share of the batch. Default false.
    pub embedding_l2_frequency: bool,
    /// Share of the embeddings' elements that each step leaves out. Default 0.
    pub embedding_dropout: f64,
    /// Share of the hidden units of MLPs that each step leaves out. Default 0.
    pub mlp_dropout: f64,
    /// Labels are drawn towards 1/2 by this share. Default 0.
    pub label_smoothing: f64,
    /// What rows with label 1 weigh, times their own weight. Default 1.
    pub positive_weight: f64,
    /// Parameters with a decay or a rate of their own; the first that matches counts. Default none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub overrides: Vec<Override>,
}

/// `[[train.overrides]]`: what is different for some of the dense parameters.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Override {
    /// Names of parameters; `*` stands for any characters: `layers.*.attention.*`.
    #[serde(rename = "match")]
    pub pattern: String,
    /// Weight decay in place of `weight_decay`, also for what has none by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay: Option<f64>,
    /// Factor of the learning rate. Default 1.
    pub lr_scale: f64,
}

impl Override {
    /// Whether a parameter's name fits.
    pub fn matches(&self, name: &str) -> bool {
        let mut parts = self.pattern.split('*');
        let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else { return false };
        let parts: Vec<&str> = parts.collect();
        let Some((last, middle)) = parts.split_last() else { return rest.is_empty() };
        for part in middle {
            let Some(at) = rest.find(part) else { return false };
            rest = &rest[at + part.len()..];
        }
        rest.ends_with(last)
    }
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            batch: 512,
            accumulate: 1,
            eval_batch: 4096,
            epochs: 1,
            seed: 1,
            eval_every: 0,
            checkpoint_every: 0,
            checkpoint_minutes: 10.0,
            keep: 3,
            log_every: 20,
            tensorboard: true,
            diagnose_every: 20,
            diagnose_rows: 64,
            monitor: Monitor::Ne,
            patience: 3,
            lr: 5e-3,
            schedule: Schedule::Cosine,
            warmup: 20,
            schedule_floor: 0.0,
            step_at: vec![0.8, 0.9],
            step_factor: 0.316,
            plateau_factor: 0.5,
            plateau_patience: 1,
            plateau_min: 0.01,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.01,
            clip: 1.0,
            embedding: EmbeddingOptimizer::Adagrad,
            embedding_lr: 0.05,
            embedding_eps: 1e-8,
            embedding_init: 0.05,
            embedding_l2: 0.0,
            embedding_l2_frequency: false,
            embedding_dropout: 0.0,
            mlp_dropout: 0.0,
            label_smoothing: 0.0,
            positive_weight: 1.0,
            overrides: vec![],
        }
    }
}

/// Reads the table over the defaults in `c`.
pub(super) fn read(r: &mut Reader<'_>, c: &mut TrainConfig) -> Result<(), ConfigError> {
    r.read("batch", &mut c.batch)?;
    r.read("accumulate", &mut c.accumulate)?;
    r.read("eval_batch", &mut c.eval_batch)?;
    r.read("epochs", &mut c.epochs)?;
    r.read("seed", &mut c.seed)?;
    r.read("eval_every", &mut c.eval_every)?;
    r.read("checkpoint_every", &mut c.checkpoint_every)?;
    r.read("checkpoint_minutes", &mut c.checkpoint_minutes)?;
    r.read("keep", &mut c.keep)?;
    r.read("log_every", &mut c.log_every)?;
    r.read("tensorboard", &mut c.tensorboard)?;
    r.read("diagnose_every", &mut c.diagnose_every)?;
    r.read("diagnose_rows", &mut c.diagnose_rows)?;
    r.read("monitor", &mut c.monitor)?;
    r.read("patience", &mut c.patience)?;
    r.read("lr", &mut c.lr)?;
    r.read("schedule", &mut c.schedule)?;
    r.read("warmup", &mut c.warmup)?;
    r.read("schedule_floor", &mut c.schedule_floor)?;
    r.read("step_at", &mut c.step_at)?;
    r.read("step_factor", &mut c.step_factor)?;
    r.read("plateau_factor", &mut c.plateau_factor)?;
    r.read("plateau_patience", &mut c.plateau_patience)?;
    r.read("plateau_min", &mut c.plateau_min)?;
    r.read("beta1", &mut c.beta1)?;
    r.read("beta2", &mut c.beta2)?;
    r.read("eps", &mut c.eps)?;
    r.read("weight_decay", &mut c.weight_decay)?;
    r.read("clip", &mut c.clip)?;
    r.read("embedding", &mut c.embedding)?;
    r.read("embedding_lr", &mut c.embedding_lr)?;
    r.read("embedding_eps", &mut c.embedding_eps)?;
    r.read("embedding_init", &mut c.embedding_init)?;
    r.read("embedding_l2", &mut c.embedding_l2)?;
    r.read("embedding_l2_frequency", &mut c.embedding_l2_frequency)?;
    r.read("embedding_dropout", &mut c.embedding_dropout)?;
    r.read("mlp_dropout", &mut c.mlp_dropout)?;
    r.read("label_smoothing", &mut c.label_smoothing)?;
    r.read("positive_weight", &mut c.positive_weight)?;
    let overrides = r.tables("overrides", |r, node| {
        let Some(pattern) = r.get("match")? else {
            let path = r.path("match");
            let message = format!("{path} is missing; it names parameters, such as \"layers.*.attention.*\"");
            return Err(ConfigError::at(&path, message).placed(node.origin.place()));
        };
        Ok(Override { pattern, decay: r.get("decay")?, lr_scale: r.get("lr_scale")?.unwrap_or(1.0) })
    })?;
    c.overrides = overrides.unwrap_or_default();
    Ok(())
}

/// Checks ranges.
pub(super) fn validate(t: &TrainConfig) -> Result<(), ConfigError> {
    range("train.batch", t.batch, 1, MAX_BATCH)?;
    range("train.accumulate", t.accumulate, 1, 64usize)?;
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
    let init = t.embedding_init;
    number("train.embedding_init", init, (0.0..=10.0).contains(&init), "0 to 10")?;
    for (key, v) in [("train.schedule_floor", t.schedule_floor), ("train.plateau_min", t.plateau_min)] {
        number(key, v, (0.0..=1.0).contains(&v), "0 to 1")?;
    }
    if t.step_at.len() > 100 {
        let message = format!("train.step_at has {} borders; it takes at most 100", t.step_at.len());
        return Err(ConfigError::at("train.step_at", message));
    }
    for (i, &v) in t.step_at.iter().enumerate() {
        number(&format!("train.step_at[{i}]"), v, v > 0.0 && v < 1.0, "above 0 and below 1")?;
    }
    let f = t.step_factor;
    number("train.step_factor", f, f > 0.0 && f <= 1.0, "above 0 and at most 1")?;
    let f = t.plateau_factor;
    number("train.plateau_factor", f, f > 0.0 && f < 1.0, "above 0 and below 1")?;
    range("train.plateau_patience", t.plateau_patience, 1, MAX_COUNT)?;
    number("train.embedding_l2", t.embedding_l2, (0.0..=100.0).contains(&t.embedding_l2), "0 to 100")?;
    for (key, p) in [("train.embedding_dropout", t.embedding_dropout), ("train.mlp_dropout", t.mlp_dropout)] {
        number(key, p, (0.0..1.0).contains(&p), "at least 0 and below 1")?;
    }
    let smoothing = t.label_smoothing;
    number("train.label_smoothing", smoothing, (0.0..1.0).contains(&smoothing), "at least 0 and below 1")?;
    let w = t.positive_weight;
    number("train.positive_weight", w, w > 0.0 && w <= 1e6, "above 0 and at most 1000000")?;
    for (i, o) in t.overrides.iter().enumerate() {
        let key = |k: &str| format!("train.overrides[{i}].{k}");
        let decay = o.decay.unwrap_or(0.0);
        number(&key("decay"), decay, (0.0..=100.0).contains(&decay), "0 to 100")?;
        let scale = o.lr_scale;
        number(&key("lr_scale"), scale, (0.0..=1000.0).contains(&scale), "0 to 1000")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str) -> Result<Config, ConfigError> {
        Config::from_text("config.toml", text, &[])
    }

    #[test]
    fn patterns_match_as_a_shell_does() {
        let fits = |pattern: &str, name: &str| {
            Override { pattern: pattern.into(), decay: None, lr_scale: 1.0 }.matches(name)
        };
        for (pattern, name) in [
            ("head.w0", "head.w0"),
            ("*", "head.w0"),
            ("layers.*.attention.*", "layers.12.attention.ln1.gamma"),
            ("*.b*", "head.b0"),
            ("layers.*", "layers."),
            ("*a*a*", "aa"),
        ] {
            assert!(fits(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [
            ("head.w0", "head.w01"),
            ("head", "head.w0"),
            ("layers.*.attention.wq", "layers.0.attention.wk"),
            ("*a*a*", "ba"),
            ("ab*ba", "aba"),
            ("", "x"),
        ] {
            assert!(!fits(pattern, name), "{pattern} {name}");
        }
    }

    #[test]
    fn every_key_is_read_and_written() {
        let text = r#"
            [train]
            accumulate = 4
            monitor = "auc"
            schedule = "plateau"
            schedule_floor = 0.1
            step_at = [0.5]
            step_factor = 0.2
            plateau_factor = 0.25
            plateau_patience = 2
            plateau_min = 0.001
            embedding_l2 = 1e-3
            embedding_l2_frequency = true
            embedding_dropout = 0.1
            mlp_dropout = 0.2
            label_smoothing = 0.05
            positive_weight = 3
            checkpoint_minutes = 2.5
            keep = 7
            [[train.overrides]]
            match = "layers.*.attention.*"
            decay = 0.0
            [[train.overrides]]
            match = "head.*"
            lr_scale = 0.5
        "#;
        let c = load(text).expect("valid");
        let t = &c.train;
        assert_eq!((t.accumulate, t.monitor, t.schedule), (4, Monitor::Auc, Schedule::Plateau));
        assert_eq!((t.schedule_floor, &t.step_at[..], t.step_factor), (0.1, &[0.5][..], 0.2));
        assert_eq!((t.plateau_factor, t.plateau_patience, t.plateau_min), (0.25, 2, 0.001));
        assert_eq!((t.embedding_l2, t.embedding_l2_frequency), (1e-3, true));
        assert_eq!((t.embedding_dropout, t.mlp_dropout), (0.1, 0.2));
        assert_eq!((t.label_smoothing, t.positive_weight), (0.05, 3.0));
        assert_eq!((t.checkpoint_minutes, t.keep), (2.5, 7));
        assert_eq!((t.overrides[0].decay, t.overrides[0].lr_scale), (Some(0.0), 1.0));
        assert_eq!((t.overrides[1].decay, t.overrides[1].lr_scale), (None, 0.5));
        let written = c.to_toml().expect("toml");
        assert_eq!(load(&written).expect("own output"), c, "{written}");
    }

    #[test]
    fn what_is_out_of_range_is_named() {
        for (line, key) in [
            ("accumulate = 0", "train.accumulate"),
            ("accumulate = 65", "train.accumulate"),
            ("monitor = \"loss\"", "train.monitor"),
            ("schedule_floor = 1.5", "train.schedule_floor"),
            ("step_at = [0.5, 1.0]", "train.step_at[1]"),
            ("step_factor = 0", "train.step_factor"),
            ("plateau_factor = 1", "train.plateau_factor"),
            ("plateau_patience = 0", "train.plateau_patience"),
            ("plateau_min = -1", "train.plateau_min"),
            ("embedding_l2 = -1", "train.embedding_l2"),
            ("embedding_dropout = 1", "train.embedding_dropout"),
            ("mlp_dropout = 1.5", "train.mlp_dropout"),
            ("label_smoothing = 1", "train.label_smoothing"),
            ("positive_weight = 0", "train.positive_weight"),
            ("checkpoint_minutes = -1", "train.checkpoint_minutes"),
            ("keep = 0", "train.keep"),
            ("overrides = [{ decay = 0.1 }]", "train.overrides[0].match"),
            ("overrides = [{ match = \"*\", decay = -1 }]", "train.overrides[0].decay"),
            ("overrides = [{ match = \"*\", lr_scale = -1 }]", "train.overrides[0].lr_scale"),
            ("overrides = [{ match = \"*\", rate = 1 }]", "train.overrides[0].rate"),
        ] {
            let e = load(&format!("[train]\n{line}")).expect_err(line);
            assert_eq!(e.key(), Some(key), "{e}");
            assert!(e.to_string().contains("config.toml:2"), "{e}");
        }
    }
}
