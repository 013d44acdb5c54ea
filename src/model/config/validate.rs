//! The checks that need no data: ranges, divisibility, options that exclude each other.

use std::fmt::Display;

use super::*;

/// Largest number of slots, and of any hidden width.
pub(super) const MAX_SIZE: usize = 1 << 16;
const MAX_LAYERS: usize = 1024;
const MAX_MODULES: usize = 64;
pub(super) const MAX_BATCH: usize = 1 << 22;
// Fits a 32-bit address space: the browser build reads the same configurations.
pub(super) const MAX_COUNT: usize = 1 << 31;

pub(super) fn range<T: PartialOrd + Display>(
    key: &str,
    value: T,
    low: T,
    high: T,
) -> Result<(), ConfigError> {
    if value >= low && value <= high {
        return Ok(());
    }
    Err(ConfigError::at(key, format!("{key} = {value} is out of range; it goes from {low} to {high}")))
}

pub(super) fn number(key: &str, value: f64, fits: bool, rule: &str) -> Result<(), ConfigError> {
    if fits && value.is_finite() {
        return Ok(());
    }
    Err(ConfigError::at(key, format!("{key} = {value:?} is out of range; it must be {rule}")))
}

fn hidden(key: &str, widths: &[usize], least: usize) -> Result<(), ConfigError> {
    if widths.len() < least || widths.len() > 16 {
        let message = format!("{key} has {} hidden widths; it takes {least} to 16", widths.len());
        return Err(ConfigError::at(key, message));
    }
    widths.iter().enumerate().try_for_each(|(i, &w)| range(&format!("{key}[{i}]"), w, 1, MAX_SIZE))
}

pub(super) fn config(c: &Config) -> Result<(), ConfigError> {
    model(&c.model)?;
    data(&c.data)?;
    train::validate(&c.train)
}

/// One byte of ASCII, or nothing.
fn byte(key: &str, text: &str) -> Result<(), ConfigError> {
    if text.is_empty() || (text.len() == 1 && text.is_ascii() && text != "\n" && text != "\r") {
        return Ok(());
    }
    Err(ConfigError::at(
        key,
        format!("{key} = {text:?} is not one ASCII character, such as \",\" or \"\\t\""),
    ))
}

fn data(d: &DataConfig) -> Result<(), ConfigError> {
    byte("data.delimiter", &d.delimiter)?;
    if d.quote != "auto" {
        byte("data.quote", &d.quote)?;
    }
    if matches!(d.encoding.as_str(), "vocabulary" | "hash") {
        let message =
            format!("data.encoding = {:?} is no character set; data.ids is the key of ids", d.encoding);
        return Err(ConfigError::at("data.encoding", message));
    }
    range("data.min_count", d.min_count, 1, MAX_COUNT)?;
    range("data.max_size", d.max_size, 0, 1 << 31)?;
    range("data.buckets", d.buckets, 1, 1 << 31)?;
    range("data.shuffle_rows", d.shuffle_rows, 1, MAX_COUNT)?;
    let mut labels = 0;
    for (i, c) in d.columns.iter().enumerate() {
        let path = |key: &str| format!("data.columns[{i}].{key}");
        if let Some(v) = c.vocabulary {
            range(&path("vocabulary.min_count"), v.min_count, 1, MAX_COUNT)?;
            range(&path("vocabulary.max_size"), v.max_size, 0, 1 << 31)?;
            if c.hash.is_some() {
                let message = format!("data.columns[{i}] has a vocabulary and a hash; keep one");
                return Err(ConfigError::at(&path("hash"), message));
            }
        }
        let transform = c.transform.unwrap_or(d.numeric);
        if c.standardize.is_some() && transform != Numeric::Log {
            let key = path("standardize");
            let message =
                format!("{key} is for the transform \"log\", this column's is \"{transform}\"; leave it out");
            return Err(ConfigError::at(&key, message));
        }
        if let Some(h) = c.hash {
            range(&path("hash.buckets"), h.buckets, 1, 1 << 31)?;
        }
        if let Some(w) = c.width {
            range(&path("width"), w, 1, 8192)?;
        }
        if let Some(n) = c.max_length {
            range(&path("max_length"), n, 0, 1 << 16)?;
        }
        if let Some(s) = &c.separator
            && s.chars().count() != 1
        {
            let message = format!("{} = {s:?} is not one character", path("separator"));
            return Err(ConfigError::at(&path("separator"), message));
        }
        if let Some(rule) = &c.positive
            && let Err(e) = crate::data::label::LabelRule::parse(rule)
        {
            return Err(ConfigError::at(&path("positive"), format!("{}: {e}", path("positive"))));
        }
        labels += usize::from(c.kind == ColumnKind::Label);
        let one = |kind| d.columns[..i].iter().any(|o| o.kind == kind);
        if matches!(c.kind, ColumnKind::Label | ColumnKind::Weight | ColumnKind::Group) && one(c.kind) {
            let message =
                format!("{} is the second column of kind {}; there is one at most", path("kind"), c.kind);
            return Err(ConfigError::at(&path("kind"), message));
        }
    }
    if !d.columns.is_empty() && labels == 0 {
        return Err(ConfigError::at("data.columns", "data.columns has no column of kind \"label\""));
    }
    Ok(())
}

fn model(m: &ModelConfig) -> Result<(), ConfigError> {
    range("model.layers", m.layers, 1, MAX_LAYERS)?;
    range("model.width", m.width, 1, 8192)?;
    range("model.slots", m.slots, 0, MAX_SIZE)?;
    if !m.layer.is_empty() && m.layer.len() != m.layers {
        let message = format!(
            "model.layers = {} but there are {} [[model.layer]] tables; leave model.layers out, or write {} tables",
            m.layers,
            m.layer.len(),
            m.layers
        );
        return Err(ConfigError::at("model.layers", message));
    }
    if m.layer.is_empty() || m.layer.iter().any(|l| l.modules.is_none()) {
        modules("model.modules", &m.modules, m.width)?;
    }
    for (i, layer) in m.layer.iter().enumerate() {
        range(&format!("model.layer[{i}].slots"), layer.slots.unwrap_or(0), 0, MAX_SIZE)?;
        if let Some(list) = &layer.modules {
            modules(&format!("model.layer[{i}].modules"), list, m.width)?;
        }
    }
    residual(&m.residual)?;
    range("model.features.dense_slots", m.features.dense_slots, 1, MAX_SIZE)?;
    hidden("model.features.dense_hidden", &m.features.dense_hidden, 0)?;
    hidden("model.head.hidden", &m.head.hidden, 0)?;
    m.check_known_shapes()
}

fn residual(r: &ResidualConfig) -> Result<(), ConfigError> {
    range("model.residual.streams", r.streams, 1, 8)?;
    range("model.residual.sinkhorn_iterations", r.sinkhorn_iterations, 1, 1000)?;
    if let Some(i) = (1..r.learn.len()).find(|&i| r.learn[..i].contains(&r.learn[i])) {
        let key = format!("model.residual.learn[{i}]");
        return Err(ConfigError::at(&key, format!("{key} repeats \"{}\"; name each once", r.learn[i])));
    }
    let (b, a) = (r.res_off_diagonal, r.alpha_init);
    number("model.residual.res_off_diagonal", b, (-80.0..=80.0).contains(&b), "-80 to 80")?;
    number("model.residual.alpha_init", a, (-10.0..=10.0).contains(&a), "-10 to 10")
}

fn modules(key: &str, list: &[ModuleConfig], width: usize) -> Result<(), ConfigError> {
    if list.is_empty() || list.len() > MAX_MODULES {
        let message = format!("{key} has {} modules; a layer takes 1 to {MAX_MODULES}", list.len());
        return Err(ConfigError::at(key, message));
    }
    list.iter().enumerate().try_for_each(|(i, m)| module(&format!("{key}[{i}]"), m, width))
}

fn module(key: &str, m: &ModuleConfig, width: usize) -> Result<(), ConfigError> {
    range(&format!("{key}.slots"), m.slots, 0, MAX_SIZE)?;
    match &m.kind {
        ModuleKind::Linear | ModuleKind::Gram | ModuleKind::Fm => Ok(()),
        ModuleKind::Attention { heads, ffn } => {
            range(&format!("{key}.ffn"), *ffn, 0, MAX_SIZE)?;
            if *heads == 0 || !width.is_multiple_of(*heads) {
                let key = format!("{key}.heads");
                let fits = one_of(&divisors(width));
                let message = format!("{key} = {heads} does not divide model.width = {width}; use {fits}");
                return Err(ConfigError::at(&key, message));
            }
            Ok(())
        }
        ModuleKind::Cross { form, rank, depth } => {
            range(&format!("{key}.depth"), *depth, 1, 64)?;
            range(&format!("{key}.rank"), *rank, 0, MAX_SIZE)?;
            let key = format!("{key}.rank");
            match (form, rank) {
                (CrossForm::LowRank, 0) => Err(ConfigError::at(
                    &key,
                    format!("{key} must be at least 1 with form = \"low-rank\"; try {key} = 16"),
                )),
                (CrossForm::Full | CrossForm::Vector, 1..) => Err(ConfigError::at(
                    &key,
                    format!("{key} = {rank} has no meaning with form = \"{form}\"; use form = \"low-rank\""),
                )),
                _ => Ok(()),
            }
        }
        ModuleKind::Dlrm { compressed, hidden: widths } => {
            range(&format!("{key}.compressed"), *compressed, 1, MAX_SIZE)?;
            hidden(&format!("{key}.hidden"), widths, 1)
        }
        ModuleKind::Conv { channels, kernel } => {
            range(&format!("{key}.channels"), *channels, 1, 4096)?;
            for (i, &k) in kernel.iter().enumerate() {
                let key = format!("{key}.kernel[{i}]");
                range(&key, k, 1, 255)?;
                if k % 2 == 0 {
                    let message = format!("{key} = {k} is even; use {} or {}", k - 1, k + 1);
                    return Err(ConfigError::at(&key, message));
                }
            }
            Ok(())
        }
        ModuleKind::Mlp { hidden: widths } => hidden(&format!("{key}.hidden"), widths, 1),
    }
}

fn divisors(n: usize) -> Vec<usize> {
    (1..=n).filter(|k| n.is_multiple_of(*k)).collect()
}

/// "1", "1 or 3", "1, 2 or 4"; long lists show their first eight.
fn one_of(values: &[usize]) -> String {
    let words: Vec<String> = values.iter().take(8).map(usize::to_string).collect();
    match words.as_slice() {
        [] => String::new(),
        [only] => only.clone(),
        [start @ .., last] => format!("{} or {last}", start.join(", ")),
    }
}
