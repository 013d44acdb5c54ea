//! TOML as a tree in which every value remembers where it was written, and `--set` edits of it.

use std::sync::Arc;

use toml::de::{DeTable, DeValue};

use super::{Config, ConfigError};

/// Where a value was written.
#[derive(Debug, Clone)]
pub(super) enum Origin {
    /// Nowhere: a default, or text without a name.
    None,
    /// A line of a file, from 1.
    File(Arc<str>, usize),
    /// A `--set` argument.
    Set(Arc<str>),
}

impl Origin {
    /// As it stands before an error.
    pub(super) fn place(&self) -> Option<String> {
        match self {
            Self::None => None,
            Self::File(name, line) => Some(format!("{name}:{line}")),
            Self::Set(text) => Some(format!("--set {}", shorten(text))),
        }
    }
}

/// A TOML value with the place of its key.
#[derive(Debug, Clone)]
pub(super) struct Node {
    pub value: Value,
    pub origin: Origin,
}

#[derive(Debug, Clone)]
pub(super) enum Value {
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    Date(String),
    List(Vec<Node>),
    Table(Vec<(String, Node)>),
}

impl Value {
    /// What an error says was found.
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Bool(v) => format!("{v}"),
            Self::Int(v) => format!("{v}"),
            Self::Float(v) => format!("{v:?}"),
            Self::Text(v) => format!("the text {:?}", shorten(v)),
            Self::Date(v) => format!("the date {v}"),
            Self::List(_) => "a list".into(),
            Self::Table(_) => "a table".into(),
        }
    }
}

/// At most 60 characters of a text.
pub(super) fn shorten(text: &str) -> String {
    if text.chars().count() <= 60 {
        text.to_owned()
    } else {
        text.chars().take(57).chain("...".chars()).collect()
    }
}

/// `parent.key`, the key quoted where TOML would quote it.
pub(super) fn join(parent: &str, key: &str) -> String {
    let bare = !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
    let key = if bare { key.to_owned() } else { format!("{:?}", shorten(key)) };
    if parent.is_empty() { key } else { format!("{parent}.{key}") }
}

/// Where each value of a text comes from.
enum Source<'a> {
    File { name: Arc<str>, line_starts: Vec<usize> },
    Fixed(&'a Origin),
}

impl Source<'_> {
    fn file(name: &str, text: &str) -> Self {
        let starts = std::iter::once(0).chain(text.match_indices('\n').map(|(i, _)| i + 1));
        Self::File { name: name.into(), line_starts: starts.collect() }
    }

    fn at(&self, offset: usize) -> Origin {
        match self {
            Self::File { name, .. } if name.is_empty() => Origin::None,
            Self::File { name, line_starts } => {
                Origin::File(name.clone(), line_starts.partition_point(|&s| s <= offset).max(1))
            }
            Self::Fixed(origin) => (*origin).clone(),
        }
    }
}

/// Parses a document.
pub(super) fn parse(name: &str, text: &str) -> Result<Node, ConfigError> {
    let source = Source::file(name, text);
    let table = DeTable::parse(text).map_err(|e| {
        let origin = source.at(e.span().map_or(0, |s| s.start));
        ConfigError::general(format!("not valid TOML: {}", e.message())).placed(origin.place())
    })?;
    let value = Value::Table(convert_table(table.get_ref(), "", &source)?);
    Ok(Node { value, origin: source.at(0) })
}

fn convert_table(
    table: &DeTable<'_>,
    path: &str,
    source: &Source<'_>,
) -> Result<Vec<(String, Node)>, ConfigError> {
    let entry = |(key, value): (&toml::Spanned<_>, &toml::Spanned<DeValue<'_>>)| {
        let name: &std::borrow::Cow<'_, str> = key.get_ref();
        let origin = source.at(key.span().start);
        Ok((name.to_string(), convert(value, origin, &join(path, name), source)?))
    };
    table.iter().map(entry).collect()
}

fn convert(
    value: &toml::Spanned<DeValue<'_>>,
    origin: Origin,
    path: &str,
    source: &Source<'_>,
) -> Result<Node, ConfigError> {
    let value = match value.get_ref() {
        DeValue::String(s) => Value::Text(s.to_string()),
        DeValue::Integer(i) => Value::Int(i64::from_str_radix(i.as_str(), i.radix()).map_err(|_| {
            ConfigError::at(path, format!("{path} = {} does not fit in 64 bits", shorten(i.as_str())))
                .placed(origin.place())
        })?),
        DeValue::Float(x) => Value::Float(x.as_str().parse().unwrap_or(f64::NAN)),
        DeValue::Boolean(b) => Value::Bool(*b),
        DeValue::Datetime(d) => Value::Date(d.to_string()),
        DeValue::Array(items) => {
            let item = |(i, v): (usize, &toml::Spanned<DeValue<'_>>)| {
                convert(v, source.at(v.span().start), &format!("{path}[{i}]"), source)
            };
            Value::List(items.iter().enumerate().map(item).collect::<Result<_, _>>()?)
        }
        DeValue::Table(t) => Value::Table(convert_table(t, path, source)?),
    };
    Ok(Node { value, origin })
}

/// One step of a dotted key.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    Key(String),
    Index(usize),
}

/// `model.modules[0].heads` as steps; `None` where it is no such path.
fn steps(path: &str) -> Option<Vec<Step>> {
    let mut out = Vec::new();
    for part in path.split('.') {
        let (name, mut rest) = part.split_at(part.find('[').unwrap_or(part.len()));
        if name.is_empty() {
            return None;
        }
        out.push(Step::Key(name.trim().to_owned()));
        while !rest.is_empty() {
            let (index, after) = rest.strip_prefix('[')?.split_once(']')?;
            out.push(Step::Index(index.parse().ok()?));
            rest = after;
        }
    }
    Some(out)
}

fn find<'a>(root: &'a Node, path: &[Step]) -> Option<&'a Node> {
    path.iter().try_fold(root, |node, step| match (step, &node.value) {
        (Step::Key(key), Value::Table(entries)) => entries.iter().find(|(k, _)| k == key).map(|(_, n)| n),
        (Step::Index(i), Value::List(items)) => items.get(*i),
        _ => None,
    })
}

/// Where the value of a dotted key was written, if it was.
pub(super) fn place_of(root: &Node, key: &str) -> Option<String> {
    find(root, &steps(key)?)?.origin.place()
}

/// The default configuration as a tree.
fn defaults() -> Result<Node, ConfigError> {
    parse("", &Config::default().to_toml()?)
}

/// Dotted names of every key of the default configuration that is not inside a list.
pub(super) fn known_keys() -> Vec<String> {
    fn walk(node: &Node, path: &str, out: &mut Vec<String>) {
        if let Value::Table(entries) = &node.value {
            for (key, child) in entries {
                let path = join(path, key);
                walk(child, &path, out);
                out.push(path);
            }
        }
    }
    let mut out = Vec::new();
    if let Ok(root) = defaults() {
        walk(&root, "", &mut out);
    }
    out
}

/// Applies one `KEY=VALUE`. An index into a list that the file does not hold edits the default list.
pub(super) fn apply_set(root: &mut Node, set: &str) -> Result<(), ConfigError> {
    let origin = Origin::Set(set.into());
    let fail = |message: String| ConfigError::general(message).placed(origin.place());
    let (key, text) = set
        .split_once('=')
        .ok_or_else(|| fail("expected KEY=VALUE, for example --set model.layers=4".into()))?;
    let (key, text) = (key.trim(), text.trim());
    let path = steps(key)
        .ok_or_else(|| fail(format!("{key:?} is not a key such as model.width or model.modules[0].heads")))?;
    let value = Node { value: set_value(key, text, &origin)?, origin: origin.clone() };

    let mut node = root;
    for (depth, step) in path.iter().enumerate() {
        let parent = format_steps(&path[..depth]);
        match step {
            Step::Key(key) => {
                let found = node.value.describe();
                let Value::Table(entries) = &mut node.value else {
                    return Err(fail(format!("{parent} is {found}, not a table: it has no key {key:?}")));
                };
                let at = entries.iter().position(|(k, _)| k == key).unwrap_or_else(|| {
                    // A list that is about to be indexed starts as the default list.
                    let absent = match path.get(depth + 1) {
                        Some(Step::Index(_)) => {
                            defaults().ok().and_then(|d| find(&d, &path[..=depth]).map(|n| n.value.clone()))
                        }
                        _ => None,
                    };
                    let value = absent.unwrap_or(Value::Table(Vec::new()));
                    entries.push((key.clone(), Node { value, origin: origin.clone() }));
                    entries.len() - 1
                });
                node = &mut entries[at].1;
            }
            Step::Index(i) => {
                let found = node.value.describe();
                let Value::List(items) = &mut node.value else {
                    return Err(fail(format!("{parent} is {found}, not a list: it has no element {i}")));
                };
                let len = items.len();
                node = items.get_mut(*i).ok_or_else(|| match len {
                    0 => fail(format!("{parent} is an empty list: it has no element {i}")),
                    _ => fail(format!("{parent} has {len} elements, 0 to {}: no element {i}", len - 1)),
                })?;
            }
        }
    }
    *node = value;
    Ok(())
}

/// A TOML value, or the text itself where it is a bare word.
fn set_value(key: &str, text: &str, origin: &Origin) -> Result<Value, ConfigError> {
    match DeValue::parse(text) {
        Ok(value) => Ok(convert(&value, origin.clone(), key, &Source::Fixed(origin))?.value),
        Err(_) if text.is_empty() => {
            let message = format!("{key} is given no value; write KEY=\"\" for an empty text");
            Err(ConfigError::at(key, message).placed(origin.place()))
        }
        Err(e) if text.starts_with(['[', '{', '"', '\'']) => {
            let message = format!("the value of {key} is not valid TOML: {}", e.message());
            Err(ConfigError::at(key, message).placed(origin.place()))
        }
        Err(_) => Ok(Value::Text(text.to_owned())),
    }
}

fn format_steps(path: &[Step]) -> String {
    path.iter().fold(String::new(), |out, step| match step {
        Step::Key(key) => join(&out, key),
        Step::Index(i) => format!("{out}[{i}]"),
    })
}

pub(super) use crate::text::nearest;
