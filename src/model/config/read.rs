//! The tree as a [`Config`]: types checked, unknown keys refused with the nearest known one.

use super::tree::{self, Node, Value};
use super::*;

/// A type that a TOML value can hold.
pub(super) trait FromNode: Sized {
    fn from_node(node: &Node, path: &str) -> Result<Self, ConfigError>;
}

fn wrong(node: &Node, path: &str, expected: &str) -> ConfigError {
    let message = format!("{path} expects {expected}, found {}", node.value.describe());
    ConfigError::at(path, message).placed(node.origin.place())
}

impl FromNode for bool {
    fn from_node(node: &Node, path: &str) -> Result<Self, ConfigError> {
        match node.value {
            Value::Bool(v) => Ok(v),
            _ => Err(wrong(node, path, "true or false")),
        }
    }
}

impl FromNode for u64 {
    fn from_node(node: &Node, path: &str) -> Result<Self, ConfigError> {
        match node.value {
            Value::Int(v) if v >= 0 => Ok(v.unsigned_abs()),
            _ => Err(wrong(node, path, "a whole number of at least 0")),
        }
    }
}

impl FromNode for usize {
    fn from_node(node: &Node, path: &str) -> Result<Self, ConfigError> {
        usize::try_from(u64::from_node(node, path)?)
            .map_err(|_| wrong(node, path, "a number that this machine can address"))
    }
}

impl FromNode for f64 {
    fn from_node(node: &Node, path: &str) -> Result<Self, ConfigError> {
        match node.value {
            Value::Int(v) => Ok(v as f64),
            Value::Float(v) if v.is_finite() => Ok(v),
            _ => Err(wrong(node, path, "a finite number")),
        }
    }
}

impl FromNode for String {
    fn from_node(node: &Node, path: &str) -> Result<Self, ConfigError> {
        match &node.value {
            Value::Text(v) => Ok(v.clone()),
            _ => Err(wrong(node, path, "a text in quotes")),
        }
    }
}

impl<T: FromNode> FromNode for Vec<T> {
    fn from_node(node: &Node, path: &str) -> Result<Self, ConfigError> {
        let Value::List(items) = &node.value else { return Err(wrong(node, path, "a list")) };
        items.iter().enumerate().map(|(i, n)| T::from_node(n, &format!("{path}[{i}]"))).collect()
    }
}

impl FromNode for [usize; 2] {
    fn from_node(node: &Node, path: &str) -> Result<Self, ConfigError> {
        match &node.value {
            Value::List(items) if items.len() == 2 => Ok([
                usize::from_node(&items[0], &format!("{path}[0]"))?,
                usize::from_node(&items[1], &format!("{path}[1]"))?,
            ]),
            _ => Err(wrong(node, path, "a list of two whole numbers, such as [3, 3]")),
        }
    }
}

/// "auto", "yes" or "no", or a boolean.
struct HeaderWord(Header);

impl FromNode for HeaderWord {
    fn from_node(node: &Node, path: &str) -> Result<Self, ConfigError> {
        Ok(HeaderWord(match node.value {
            Value::Bool(true) => Header::Yes,
            Value::Bool(false) => Header::No,
            _ => named(node, path)?,
        }))
    }
}

/// A list of texts, or one.
struct Texts(Vec<String>);

impl FromNode for Texts {
    fn from_node(node: &Node, path: &str) -> Result<Self, ConfigError> {
        Ok(Texts(match &node.value {
            Value::Text(one) => vec![one.clone()],
            _ => Vec::from_node(node, path)?,
        }))
    }
}

/// An error if a `--set` has no effect, since every column that it is for says its own.
pub(super) fn check_sets(c: &Config, sets: &[String]) -> Result<(), ConfigError> {
    let columns = &c.data.columns;
    let ids = || columns.iter().filter(|c| matches!(c.kind, ColumnKind::Categorical | ColumnKind::List));
    let numeric = || columns.iter().filter(|c| c.kind == ColumnKind::Numeric);
    let own_ids = ids().all(|c| c.vocabulary.is_some() || c.hash.is_some());
    for set in sets {
        let key = set.split_once('=').map_or(set.as_str(), |s| s.0).trim();
        let (any, own, by) = match key {
            "data.min_count" | "data.max_size" => (ids().count(), own_ids, "vocabulary"),
            "data.buckets" => (ids().count(), own_ids, "hash"),
            "data.ids" => (ids().count(), own_ids, "vocabulary or hash"),
            "data.numeric" => (numeric().count(), numeric().all(|c| c.transform.is_some()), "transform"),
            "data.indicators" => (numeric().count(), numeric().all(|c| c.indicator.is_some()), "indicator"),
            _ => continue,
        };
        if any > 0 && own {
            let message = format!(
                "--set {set} would change nothing: every column says its own `{by}`; set data.columns[N].{by}, or take \
                 `{by}` out of the schema"
            );
            return Err(ConfigError::at(key, message));
        }
    }
    Ok(())
}

/// Reads an enum that is spelt by words.
pub(super) fn named<T: Named>(node: &Node, path: &str) -> Result<T, ConfigError> {
    let one_of = match T::NAMES {
        [only] => format!("{only:?}"),
        _ => format!("one of {}", T::NAMES.join(", ")),
    };
    let Value::Text(word) = &node.value else { return Err(wrong(node, path, &one_of)) };
    T::from_name(word).ok_or_else(|| {
        let mut e = wrong(node, path, &one_of);
        if let Some(near) = tree::nearest(word, T::NAMES.iter().copied()) {
            e.message.push_str(&format!("; did you mean {near:?}?"));
        }
        e
    })
}

/// A table being read; [`Reader::finish`] refuses the keys that nobody asked for.
pub(super) struct Reader<'a> {
    path: String,
    entries: &'a [(String, Node)],
    known: Vec<&'static str>,
}

impl<'a> Reader<'a> {
    fn new(node: &'a Node, path: String) -> Result<Self, ConfigError> {
        match &node.value {
            Value::Table(entries) => Ok(Self { path, entries, known: Vec::new() }),
            _ => Err(wrong(node, &path, "a table")),
        }
    }

    pub(super) fn path(&self, key: &str) -> String {
        tree::join(&self.path, key)
    }

    fn node(&mut self, key: &'static str) -> Option<&'a Node> {
        self.known.push(key);
        self.entries.iter().find(|(k, _)| k == key).map(|(_, n)| n)
    }

    /// The value of a key, if it is there.
    pub(super) fn get<T: FromNode>(&mut self, key: &'static str) -> Result<Option<T>, ConfigError> {
        self.node(key).map(|n| T::from_node(n, &self.path(key))).transpose()
    }

    /// Puts the value of a key, if it is there, into `slot`, which holds the default.
    pub(super) fn read<T: FromNode>(&mut self, key: &'static str, slot: &mut T) -> Result<(), ConfigError> {
        if let Some(value) = self.get(key)? {
            *slot = value;
        }
        Ok(())
    }

    /// Reads a sub-table with `f`, if it is there.
    fn table(
        &mut self,
        key: &'static str,
        f: impl FnOnce(&mut Reader<'a>) -> Result<(), ConfigError>,
    ) -> Result<(), ConfigError> {
        let Some(node) = self.node(key) else { return Ok(()) };
        let mut reader = Reader::new(node, self.path(key))?;
        f(&mut reader)?;
        reader.finish()
    }

    /// Reads a list of tables, one `f` each.
    pub(super) fn tables<T>(
        &mut self,
        key: &'static str,
        f: impl Fn(&mut Reader<'a>, &Node) -> Result<T, ConfigError>,
    ) -> Result<Option<Vec<T>>, ConfigError> {
        let Some(node) = self.node(key) else { return Ok(None) };
        let path = self.path(key);
        let Value::List(items) = &node.value else {
            return Err(wrong(node, &path, &format!("a list of tables, [[{path}]]")));
        };
        let one = |(i, item): (usize, &'a Node)| {
            let mut reader = Reader::new(item, format!("{path}[{i}]"))?;
            let value = f(&mut reader, item)?;
            reader.finish()?;
            Ok(value)
        };
        items.iter().enumerate().map(one).collect::<Result<_, _>>().map(Some)
    }

    fn finish(self) -> Result<(), ConfigError> {
        let Some((key, node)) = self.entries.iter().find(|(k, _)| !self.known.contains(&k.as_str())) else {
            return Ok(());
        };
        let path = self.path(key);
        let hint = match tree::nearest(key, self.known.iter().copied()) {
            Some(near) => format!("did you mean `{}`?", self.path(near)),
            // A module's options depend on its kind: a namesake elsewhere is no help.
            None if self.path.contains('[') => self.hint_here(),
            None => self.hint_elsewhere(key),
        };
        Err(ConfigError::at(&path, format!("unknown key `{path}`; {hint}")).placed(node.origin.place()))
    }

    /// A key of the same or a similar name in another table, else the keys that fit here.
    fn hint_elsewhere(&self, key: &str) -> String {
        let all = tree::known_keys();
        let leaf = |path: &str| path.rsplit('.').next().unwrap_or_default().to_owned();
        let leaves: Vec<String> = all.iter().map(|p| leaf(p)).collect();
        let near = tree::nearest(key, leaves.iter().map(String::as_str));
        match near.and_then(|n| all.iter().find(|p| leaf(p) == n)) {
            Some(path) => format!("did you mean `{path}`?"),
            None => self.hint_here(),
        }
    }

    fn hint_here(&self) -> String {
        let here = if self.path.is_empty() { "the top level" } else { &self.path };
        format!("{here} takes {}", self.known.join(", "))
    }
}

/// Reads the whole tree over the defaults.
pub(super) fn config(root: &Node) -> Result<Config, ConfigError> {
    let mut c = Config::default();
    let mut r = Reader::new(root, String::new())?;
    r.table("model", |r| model(r, &mut c.model))?;
    r.table("data", |r| data(r, &mut c.data))?;
    r.table("train", |r| super::train::read(r, &mut c.train))?;
    r.finish()?;
    Ok(c)
}

fn model(r: &mut Reader<'_>, c: &mut ModelConfig) -> Result<(), ConfigError> {
    let layers = r.get("layers")?;
    r.read("width", &mut c.width)?;
    r.read("slots", &mut c.slots)?;
    r.read("ensemble", &mut c.ensemble)?;
    r.read("norm", &mut c.norm)?;
    if let Some(modules) = r.tables("modules", module)? {
        c.modules = modules;
    }
    if let Some(layer) = r.tables("layer", layer)? {
        c.layer = layer;
    }
    c.layers = layers.unwrap_or(if c.layer.is_empty() { c.layers } else { c.layer.len() });
    r.table("residual", |r| residual(r, &mut c.residual))?;
    r.table("features", |r| {
        r.read("dense_slots", &mut c.features.dense_slots)?;
        r.read("dense_hidden", &mut c.features.dense_hidden)
    })?;
    r.table("head", |r| r.read("hidden", &mut c.head.hidden))
}

fn layer(r: &mut Reader<'_>, _: &Node) -> Result<LayerConfig, ConfigError> {
    Ok(LayerConfig {
        slots: r.get("slots")?,
        ensemble: r.get("ensemble")?,
        modules: r.tables("modules", module)?,
    })
}

fn module(r: &mut Reader<'_>, node: &Node) -> Result<ModuleConfig, ConfigError> {
    let Some(kind) = r.get::<Kind>("kind")? else {
        let path = r.path("kind");
        let message = format!("{path} is missing; it is one of {}", Kind::NAMES.join(", "));
        return Err(ConfigError::at(&path, message).placed(node.origin.place()));
    };
    let mut slots = 0;
    r.read("slots", &mut slots)?;
    let mut kind = ModuleKind::with_defaults(kind);
    match &mut kind {
        ModuleKind::Attention { heads, ffn } => {
            r.read("heads", heads)?;
            r.read("ffn", ffn)?;
        }
        ModuleKind::Cross { form, rank, depth } => {
            r.read("rank", rank)?;
            if *rank > 0 {
                *form = CrossForm::LowRank;
            }
            r.read("form", form)?;
            r.read("depth", depth)?;
        }
        ModuleKind::Dlrm { compressed, hidden } => {
            r.read("compressed", compressed)?;
            r.read("hidden", hidden)?;
        }
        ModuleKind::Conv { channels, kernel } => {
            r.read("channels", channels)?;
            r.read("kernel", kernel)?;
        }
        ModuleKind::Mlp { hidden } => r.read("hidden", hidden)?,
        ModuleKind::Linear | ModuleKind::Gram | ModuleKind::Fm => {}
    }
    Ok(ModuleConfig { kind, slots })
}

fn residual(r: &mut Reader<'_>, c: &mut ResidualConfig) -> Result<(), ConfigError> {
    r.read("mode", &mut c.mode)?;
    r.read("streams", &mut c.streams)?;
    r.read("sinkhorn_iterations", &mut c.sinkhorn_iterations)?;
    r.read("learn", &mut c.learn)?;
    r.read("collapse", &mut c.collapse)?;
    r.read("final_norm", &mut c.final_norm)?;
    r.read("res_off_diagonal", &mut c.res_off_diagonal)?;
    r.read("alpha_init", &mut c.alpha_init)
}

fn data(r: &mut Reader<'_>, c: &mut DataConfig) -> Result<(), ConfigError> {
    r.read("format", &mut c.format)?;
    r.read("delimiter", &mut c.delimiter)?;
    if c.delimiter == "tab" {
        c.delimiter = "\t".into();
    }
    r.read("quote", &mut c.quote)?;
    if let Some(header) = r.get::<HeaderWord>("header")? {
        c.header = header.0;
    }
    r.read("comment", &mut c.comment)?;
    if let Some(texts) = r.get::<Texts>("na")? {
        c.na = texts.0;
    }
    r.read("encoding", &mut c.encoding)?;
    r.read("trim", &mut c.trim)?;
    r.read("ids", &mut c.ids)?;
    r.read("min_count", &mut c.min_count)?;
    r.read("max_size", &mut c.max_size)?;
    r.read("buckets", &mut c.buckets)?;
    r.read("numeric", &mut c.numeric)?;
    r.read("standardize_log", &mut c.standardize_log)?;
    r.read("indicators", &mut c.indicators)?;
    r.read("shuffle_rows", &mut c.shuffle_rows)?;
    let defaults = c.clone();
    if let Some(columns) = r.tables("columns", |r, node| column(r, node, &defaults))? {
        c.columns = columns;
    }
    Ok(())
}

fn column(r: &mut Reader<'_>, node: &Node, defaults: &DataConfig) -> Result<ColumnConfig, ConfigError> {
    let missing = |path: String, what: &str| {
        ConfigError::at(&path, format!("{path} is missing; {what}")).placed(node.origin.place())
    };
    let Some(name) = r.get("name")? else { return Err(missing(r.path("name"), "it is the column's name")) };
    let Some(kind) = r.get::<ColumnKind>("kind")? else {
        return Err(missing(r.path("kind"), &format!("it is one of {}", ColumnKind::NAMES.join(", "))));
    };
    let mut c = ColumnConfig {
        name,
        from: r.get("from")?,
        kind,
        na: vec![],
        positive: None,
        transform: None,
        standardize: None,
        indicator: None,
        vocabulary: None,
        hash: None,
        share: None,
        width: None,
        separator: None,
        pooling: None,
        max_length: None,
    };
    match kind {
        ColumnKind::Label => c.positive = r.get("positive")?,
        ColumnKind::Numeric => {
            c.na = r.get::<Texts>("na")?.map_or(vec![], |t| t.0);
            c.transform = r.get("transform")?;
            c.standardize = r.get("standardize")?;
            c.indicator = r.get("indicator")?;
        }
        ColumnKind::Categorical | ColumnKind::List => {
            c.na = r.get::<Texts>("na")?.map_or(vec![], |t| t.0);
            r.table("vocabulary", |r| {
                let mut v = VocabularyConfig { min_count: defaults.min_count, max_size: defaults.max_size };
                r.read("min_count", &mut v.min_count)?;
                r.read("max_size", &mut v.max_size)?;
                c.vocabulary = Some(v);
                Ok(())
            })?;
            r.table("hash", |r| {
                let mut h = HashConfig { buckets: defaults.buckets };
                r.read("buckets", &mut h.buckets)?;
                c.hash = Some(h);
                Ok(())
            })?;
            c.share = r.get("share")?;
            c.width = r.get("width")?;
            if kind == ColumnKind::List {
                c.separator = r.get("separator")?;
                c.pooling = r.get("pooling")?;
                c.max_length = r.get("max_length")?;
            }
        }
        ColumnKind::Weight | ColumnKind::Group | ColumnKind::Ignore => {}
    }
    Ok(c)
}
