//! The configuration: what a TOML file and `--set key=value` say, with every default written down.
//!
//! A [`Config`] comes from [`Config::load`], which reports any mistake as one line that names the
//! full dotted key, the line of the file (or the `--set`), and what would be right. The shapes that
//! follow from it for a given number of input slots come from [`ModelConfig::resolve`]. The symbols
//! `m`, `d`, `l`, `n` are those of the DHEN (KDD 2022) and mHC (arXiv 2512.24880) papers.

use std::fmt;
use std::io::Read;
use std::path::Path;

use serde::Serialize;

mod plan;
mod read;
#[cfg(test)]
mod tests;
mod train;
mod tree;
mod validate;
mod words;

pub use plan::{LayerPlan, ModulePlan};
pub use train::{Override, TrainConfig};
pub(crate) use words::Named;
pub use words::{
    Coefficient, Collapse, ColumnKind, CrossForm, EmbeddingOptimizer, Encoding, Ensemble, Format, Header,
    Kind, Monitor, Norm, Numeric, Pooling, ResidualMode, Schedule,
};

/// The largest configuration file that is read, in bytes; anything larger is surely something else.
const MAX_FILE: u64 = 1 << 20;

/// A mistake in a configuration: one line, with the place (`file:line` or the `--set`) where known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    place: Option<String>,
    key: Option<String>,
    message: String,
}

impl ConfigError {
    /// An error about `key`; the message has to name the key itself.
    pub(crate) fn at(key: &str, message: impl Into<String>) -> Self {
        Self { place: None, key: Some(key.to_owned()), message: message.into() }
    }

    /// An error about no key in particular.
    pub(crate) fn general(message: impl Into<String>) -> Self {
        Self { place: None, key: None, message: message.into() }
    }

    fn placed(mut self, place: Option<String>) -> Self {
        self.place = self.place.or(place);
        self
    }

    /// The dotted key at fault, such as `model.modules[0].heads`, where one key is.
    pub fn key(&self) -> Option<&str> {
        self.key.as_deref()
    }

    /// Where it stands: `config.toml:7` or `--set model.width=0`.
    pub fn place(&self) -> Option<&str> {
        self.place.as_deref()
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = String::new();
        if let Some(place) = &self.place {
            line = format!("{place}: ");
        }
        line.push_str(&self.message);
        // Keys and strings of the user may hold line ends; an error stays one line.
        for c in line.chars() {
            if c.is_control() { write!(f, "{}", c.escape_default())? } else { write!(f, "{c}")? }
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}

/// Everything that a run is made of. `Config::default()` is a good model: 4 layers of attention and
/// linear, sum ensemble, mHC with 4 streams.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Config {
    /// The model's shape.
    pub model: ModelConfig,
    /// How rows become numbers.
    pub data: DataConfig,
    /// How it is trained.
    pub train: TrainConfig,
}

/// `[model]`: the DHEN stack.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelConfig {
    /// Number of layers N. Default 4.
    pub layers: usize,
    /// Embedding width d. Default 16.
    pub width: usize,
    /// Slots that every layer outputs; 0 keeps its number of input slots. Default 0.
    pub slots: usize,
    /// Default "sum".
    pub ensemble: Ensemble,
    /// Default "layer".
    pub norm: Norm,
    /// The modules of every layer that does not list its own. Default attention, linear.
    pub modules: Vec<ModuleConfig>,
    /// Layer by layer; empty = the same in each, otherwise `layers` long.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub layer: Vec<LayerConfig>,
    /// The residual mode and its options.
    pub residual: ResidualConfig,
    /// The numeric part of the input.
    pub features: FeaturesConfig,
    /// The MLP from the last layer to the logit.
    pub head: HeadConfig,
}

/// `[[model.layer]]`: what one layer does differently; what is absent comes from `[model]`.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct LayerConfig {
    /// Slots that this layer outputs; 0 keeps its number of input slots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slots: Option<usize>,
    /// The ensemble of this layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ensemble: Option<Ensemble>,
    /// The modules of this layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub modules: Option<Vec<ModuleConfig>>,
}

/// One interaction module: its kind with options, and its output slots.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ModuleConfig {
    /// Kind and options.
    #[serde(flatten)]
    pub kind: ModuleKind,
    /// Output slots l; 0 = what the layer and its ensemble imply. Default 0.
    pub slots: usize,
}

/// An interaction module with its options (math.md section 2).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum ModuleKind {
    /// Transformer encoder layer over the slots, then a slot mix.
    Attention {
        /// Heads h; divides the width. Default 2.
        heads: usize,
        /// Width of the feed-forward part; 0 = 2d. Default 0.
        ffn: usize,
    },
    /// One slot mix.
    Linear,
    /// Cross network.
    Cross {
        /// Default "low-rank" when `rank` is given, otherwise "full".
        form: CrossForm,
        /// Rank r of the low-rank form, 0 in the others. Default 0.
        rank: usize,
        /// Cross layers L. Default 2.
        depth: usize,
    },
    /// Gram matrix of the slots (eq. 7).
    Gram,
    /// Pairwise inner products and compressed slots through an MLP.
    Dlrm {
        /// Compressed slots c. Default 1.
        compressed: usize,
        /// Hidden widths, at least one. Default [64].
        hidden: Vec<usize>,
    },
    /// 2-D convolution, stride 1, "same" padding.
    Conv {
        /// Filters. Default 4.
        channels: usize,
        /// Kernel [slots, width], both odd. Default [3, 3].
        kernel: [usize; 2],
    },
    /// Factorisation machine.
    Fm,
    /// MLP over the flattened input.
    Mlp {
        /// Hidden widths, at least one. Default [64].
        hidden: Vec<usize>,
    },
}

impl ModuleKind {
    /// The kind without its options.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Attention { .. } => Kind::Attention,
            Self::Linear => Kind::Linear,
            Self::Cross { .. } => Kind::Cross,
            Self::Gram => Kind::Gram,
            Self::Dlrm { .. } => Kind::Dlrm,
            Self::Conv { .. } => Kind::Conv,
            Self::Fm => Kind::Fm,
            Self::Mlp { .. } => Kind::Mlp,
        }
    }

    /// This kind with every option at its default.
    pub fn with_defaults(kind: Kind) -> Self {
        match kind {
            Kind::Attention => Self::Attention { heads: 2, ffn: 0 },
            Kind::Linear => Self::Linear,
            Kind::Cross => Self::Cross { form: CrossForm::Full, rank: 0, depth: 2 },
            Kind::Gram => Self::Gram,
            Kind::Dlrm => Self::Dlrm { compressed: 1, hidden: vec![64] },
            Kind::Conv => Self::Conv { channels: 4, kernel: [3, 3] },
            Kind::Fm => Self::Fm,
            Kind::Mlp => Self::Mlp { hidden: vec![64] },
        }
    }
}

/// `[model.residual]`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ResidualConfig {
    /// Default "mhc".
    pub mode: ResidualMode,
    /// Streams n, 1 to 8; unused by "shortcut". Default 4.
    pub streams: usize,
    /// Sinkhorn iterations t_max of "mhc". Default 20.
    pub sinkhorn_iterations: usize,
    /// The coefficients that are learned; the others are fixed at pre = 1/n, post = 1,
    /// res = identity. Default all three.
    pub learn: Vec<Coefficient>,
    /// Default "mean".
    pub collapse: Collapse,
    /// A LayerNorm after the collapse. Default true.
    pub final_norm: bool,
    /// Off-diagonal value −β of mHC's b_res at the start. Default −6.
    pub res_off_diagonal: f64,
    /// Gate α of each coefficient group at the start. Default 0.01.
    pub alpha_init: f64,
}

impl ResidualConfig {
    /// Whether a coefficient group is learned.
    pub fn learns(&self, c: Coefficient) -> bool {
        self.learn.contains(&c)
    }
}

/// `[model.features]`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FeaturesConfig {
    /// Slots that all numeric columns together become, m_dense. Default 1.
    pub dense_slots: usize,
    /// Hidden widths of the numeric MLP; may be empty. Default [64].
    pub dense_hidden: Vec<usize>,
}

/// `[model.head]`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HeadConfig {
    /// Hidden widths between the flattened last layer and the logit; may be empty. Default [64].
    pub hidden: Vec<usize>,
}

/// `[data]`: what the files are and how their rows become numbers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DataConfig {
    /// Default "auto".
    pub format: Format,
    /// Between the fields of text, one character; empty: told from the content. Default "".
    pub delimiter: String,
    /// Around fields of text, one character; "" = quotes mean nothing, "auto" = `"`, but in tab-separated text
    /// nothing. Default "auto".
    pub quote: String,
    /// Whether files have a header: "auto", "yes", "no". Default "auto": a file whose first row has the columns'
    /// names has one.
    pub header: Header,
    /// Lines that start with it are left out; "" = none. Default "".
    pub comment: String,
    /// Texts that mean "missing", besides the empty field. Default none.
    pub na: Vec<String>,
    /// Character set of text files, such as "latin1". Default "utf-8".
    pub encoding: String,
    /// Whether blanks around the fields of text are left out, where these are not in quotes. Default false.
    pub trim: bool,
    /// How categorical columns that say nothing else become ids. Default "vocabulary".
    pub ids: Encoding,
    /// Rows in which a value must occur to enter the vocabulary. Default 2.
    pub min_count: usize,
    /// Most values that a column's vocabulary keeps, the most frequent first; 0 = no limit. Default 0.
    pub max_size: usize,
    /// Buckets of each column for "hash". Default 100000.
    pub buckets: usize,
    /// Transform of numeric columns that say nothing else. Default "log".
    pub numeric: Numeric,
    /// Whether columns of the transform "log" are standardised after it, by the training rows. Default true.
    pub standardize_log: bool,
    /// A further 0/1 column for each numeric column that says nothing else: was it missing. Default true.
    pub indicators: bool,
    /// Rows of a file that are shuffled together, as no file is held whole. Default 262144.
    pub shuffle_rows: usize,
    /// The columns, in the order of a file without a header; empty: those of Criteo.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub columns: Vec<ColumnConfig>,
}

/// `[[data.columns]]`: one column; what is absent comes from `[data]`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ColumnConfig {
    /// Its name; that of the file's column, unless `from` says another.
    pub name: String,
    /// Column of the file, for a second use of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// What it is.
    pub kind: ColumnKind,
    /// Numeric, categorical and list: texts that mean "missing" in it, besides those of `data.na`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub na: Vec<String>,
    /// Label: which values are positive, such as ">= 4"; absent: 0 and 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub positive: Option<String>,
    /// Numeric.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transform: Option<Numeric>,
    /// Numeric, of the transform "log": whether it is standardised after it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub standardize: Option<bool>,
    /// Numeric: a further 0/1 column, was it missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub indicator: Option<bool>,
    /// Categorical and list: ids from the training rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vocabulary: Option<VocabularyConfig>,
    /// Categorical and list: hashed ids.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hash: Option<HashConfig>,
    /// Categorical and list: the column whose table it uses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<String>,
    /// Categorical and list: width of its embeddings, projected to the model's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub width: Option<usize>,
    /// List: between its values, one character. Default "|".
    #[serde(skip_serializing_if = "Option::is_none")]
    pub separator: Option<String>,
    /// List. Default "mean".
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pooling: Option<Pooling>,
    /// List: values of a cell that count, the first ones; 0 = as many as the longest training row has. Default 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_length: Option<usize>,
}

/// `vocabulary = {…}` of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct VocabularyConfig {
    /// Rows in which a value must occur.
    pub min_count: usize,
    /// Most values kept; 0 = no limit.
    pub max_size: usize,
}

/// `hash = {…}` of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct HashConfig {
    /// Buckets.
    pub buckets: usize,
}

impl Default for ModelConfig {
    fn default() -> Self {
        let module = |kind| ModuleConfig { kind: ModuleKind::with_defaults(kind), slots: 0 };
        Self {
            layers: 4,
            width: 16,
            slots: 0,
            ensemble: Ensemble::Sum,
            norm: Norm::Layer,
            modules: vec![module(Kind::Attention), module(Kind::Linear)],
            layer: Vec::new(),
            residual: ResidualConfig::default(),
            features: FeaturesConfig { dense_slots: 1, dense_hidden: vec![64] },
            head: HeadConfig { hidden: vec![64] },
        }
    }
}

impl Default for ResidualConfig {
    fn default() -> Self {
        Self {
            mode: ResidualMode::Mhc,
            streams: 4,
            sinkhorn_iterations: 20,
            learn: vec![Coefficient::Pre, Coefficient::Post, Coefficient::Res],
            collapse: Collapse::Mean,
            final_norm: true,
            res_off_diagonal: -6.0,
            alpha_init: 0.01,
        }
    }
}

impl Default for DataConfig {
    fn default() -> Self {
        Self {
            format: Format::Auto,
            delimiter: String::new(),
            quote: "auto".into(),
            header: Header::Auto,
            comment: String::new(),
            na: Vec::new(),
            encoding: "utf-8".into(),
            trim: false,
            ids: Encoding::Vocabulary,
            min_count: 2,
            max_size: 0,
            buckets: 100_000,
            numeric: Numeric::Log,
            standardize_log: true,
            indicators: true,
            shuffle_rows: crate::data::order::SHUFFLE_ROWS,
            columns: Vec::new(),
        }
    }
}

impl Config {
    /// Reads `path` (no path: the defaults), applies each `KEY=VALUE` of `sets` in order, and
    /// validates. A value is TOML, or a bare word where it is not: `model.residual.mode=hc`,
    /// `model.modules=[{kind="fm"}]`, `model.modules[0].heads=4`. A table given this way replaces
    /// the whole table; keys that it lacks take their defaults.
    pub fn load(path: Option<&Path>, sets: &[String]) -> Result<Self, ConfigError> {
        match path {
            None => Self::from_text("", "", sets),
            Some(path) => Self::from_text(&path.display().to_string(), &read_file(path)?, sets),
        }
    }

    /// The same from text; `name` stands for the file in errors.
    pub fn from_text(name: &str, text: &str, sets: &[String]) -> Result<Self, ConfigError> {
        let mut root = tree::parse(name, text)?;
        for set in sets {
            tree::apply_set(&mut root, set)?;
        }
        let config = read::config(&root)?;
        read::check_sets(&config, sets)?;
        let placed = |e: ConfigError| {
            let place = e.key().and_then(|key| tree::place_of(&root, key));
            e.placed(place.or_else(|| (!name.is_empty()).then(|| name.to_owned())))
        };
        config.validate().map_err(placed)?;
        Ok(config)
    }

    /// The complete configuration as TOML; [`Config::from_text`] gives the same `Config` back.
    pub fn to_toml(&self) -> Result<String, ConfigError> {
        toml::to_string(self).map_err(|e| ConfigError::general(format!("configuration as TOML: {e}")))
    }

    /// Checks every value that can be checked before the data is known. [`Config::load`] calls it;
    /// call it again after changing fields.
    pub fn validate(&self) -> Result<(), ConfigError> {
        validate::config(self)
    }
}

fn read_file(path: &Path) -> Result<String, ConfigError> {
    let name = path.display().to_string();
    let fail = |message: String| ConfigError::general(message).placed(Some(name.clone()));
    if path.is_dir() {
        return Err(fail("is a directory; --config takes a TOML file".into()));
    }
    let file = std::fs::File::open(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => fail("no such configuration file".into()),
        _ => fail(format!("cannot be opened: {e}")),
    })?;
    let mut bytes = Vec::new();
    file.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(|e| fail(format!("cannot be read: {e}")))?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(fail("is larger than 1 MiB; that is no configuration file".into()));
    }
    String::from_utf8(bytes).map_err(|e| {
        let good = e.utf8_error().valid_up_to();
        let line = 1 + e.as_bytes()[..good].iter().filter(|&&b| b == b'\n').count();
        ConfigError::general("is not UTF-8 text; --config takes a TOML file")
            .placed(Some(format!("{}:{line}", path.display())))
    })
}
