//! What the commands tell of drift: rows that are not like the training rows.

use super::output;
use crate::data::FittedEncoder;
use crate::data::drift::{ColumnDrift, Seen, compare, percent};
use crate::data::error::quoted;
use crate::data::reader::Source;
use crate::data::schema::Schema;
use serde::Serialize;

/// Validation rows that are looked at before training; they are thousands of times what chance needs.
pub const LOOKED_AT: u64 = 200_000;

/// Texts of a label that an error shows.
const TEXTS: usize = 5;

/// Some rows beside the training rows.
#[derive(Serialize)]
pub struct Drift {
    /// Always "drift".
    r#type: &'static str,
    /// Rows that were counted.
    pub rows: u64,
    /// All columns.
    pub columns: Vec<ColumnDrift>,
}

impl Drift {
    /// `None` where nothing was counted, or the run is of an older version and has nothing to compare with.
    pub fn new(encoder: &FittedEncoder, seen: Option<&Seen>) -> Option<Drift> {
        let seen = seen?;
        Some(Drift { r#type: "drift", rows: seen.rows(), columns: compare(encoder, seen)? })
    }

    /// Says on stderr which columns are far from the training rows.
    pub fn warn(&self, file: &str) {
        for text in self.columns.iter().filter_map(ColumnDrift::warning) {
            eprintln!("warning: {}: {text}", file.escape_debug());
        }
    }

    /// The columns as a table on stdout.
    pub fn print(&self) -> anyhow::Result<()> {
        let width = self.columns.iter().map(|c| c.column.chars().count()).max().unwrap_or(0).clamp(6, 40);
        output::line("against the training rows (shares: of training, here):")?;
        output::line(&format!(
            "  {:width$}  {:>17}  {:>17}  {:>9}",
            "column", "missing", "unseen", "outside"
        ))?;
        for c in &self.columns {
            let pair = |a: f64, b: f64| format!("{:>8} {:>8}", percent(a), percent(b));
            let name: String = c.column.escape_debug().take(40).collect();
            output::line(&format!(
                "{} {name:width$}  {:>17}  {:>17}  {:>9}",
                if c.far { "!" } else { " " },
                pair(c.missing.train, c.missing.here),
                c.unseen.map_or_else(String::new, |u| pair(u.expected, u.here)),
                c.outside.map_or_else(String::new, percent),
            ))?;
        }
        output::line(
            "unseen: of values without an id of their own (of training: what further rows of it would have); \
             outside: of numbers beyond 98 % of training's; !: far from it",
        )
    }
}

/// Why a label's rule found one class only: the rule, and the first texts that it was given. `None` if the column has no
/// rule, or the texts cannot be had.
pub fn why_one_class(source: &Source, schema: &Schema, positive: bool) -> Option<String> {
    let rule = schema.label.positive.as_ref()?;
    let source = Source { passed: vec![schema.label.name.clone()], ..source.clone() };
    let mut reader = source.open(schema).ok()?;
    let mut texts: Vec<String> = vec![];
    while texts.len() < TEXTS {
        let next = reader.next_chunks(|rows| {
            let mut some: Vec<String> = vec![];
            for &range in &rows.passed {
                let text = quoted(rows.slice(range));
                if some.len() < TEXTS && !some.contains(&text) {
                    some.push(text);
                }
            }
            some
        });
        let Ok(Some(found)) = next else { break };
        for text in found.into_iter().flatten() {
            if texts.len() < TEXTS && !texts.contains(&text) {
                texts.push(text);
            }
        }
    }
    if texts.is_empty() {
        return None;
    }
    Some(said(rule.text(), &schema.label.name, &texts, positive))
}

fn said(rule: &str, column: &str, texts: &[String], positive: bool) -> String {
    format!(
        ": the rule {rule:?} of column {column} is true of {} value, and the column has {}; correct the rule (positive = …)",
        if positive { "every" } else { "no" },
        texts.join(", ")
    )
}
