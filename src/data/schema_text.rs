//! A schema as text, to be read and edited by a person: what `birkhoff schema` writes.

use std::fmt::Write;

use super::format::Format;
use super::guess::positive_value;
use super::survey::{MOST_DISTINCT, Survey};

/// Values from which a column is hashed rather than given a vocabulary.
const HASHED_FROM: usize = 1 << 19;

impl Survey {
    /// The schema as TOML, with what was seen as comments.
    pub fn to_toml(&self, files: &str) -> String {
        let mut t = String::new();
        let all = if self.complete { "all" } else { "the first" };
        let quote = |s: &str| toml::Value::String(s.to_string()).to_string();
        let _ = writeln!(
            t,
            "# Columns of {}, guessed from {all} {} rows by `birkhoff schema`.",
            one_line(files),
            self.rows
        );
        let _ = writeln!(
            t,
            "# Read it, correct the kinds, and give it as --schema (docs/data.md says what each key means)."
        );
        if self.skipped > 0 {
            let _ = writeln!(
                t,
                "# {} rows could not be read, e.g. {}",
                self.skipped,
                one_line(&self.problems.join("; "))
            );
        }
        match self.label_rate {
            Some(rate) => _ = writeln!(t, "# {:.2} % of the labels are 1.", 100.0 * rate),
            None if !self.columns.iter().any(|c| c.kind == "label") => {
                let _ = writeln!(t, "# No column looks like a label: give one of them kind = \"label\".");
            }
            None => {}
        }
        let _ = writeln!(t, "\n[data]");
        match &self.shape {
            Format::Delimited(d) if d.criteo => _ = writeln!(t, "format = \"tsv\"\nheader = \"no\""),
            Format::Delimited(d) => {
                let _ = writeln!(t, "format = \"{}\"", if d.delimiter == b'\t' { "tsv" } else { "csv" });
                let _ = writeln!(t, "delimiter = {}", quote(&char::from(d.delimiter).to_string()));
                let header = if self.header { "yes" } else { "no" };
                let _ = writeln!(
                    t,
                    "header = \"{header}\"                       # {}",
                    one_line(&self.header_rule)
                );
            }
            Format::Parquet => _ = writeln!(t, "format = \"parquet\""),
            Format::Arrow { .. } => _ = writeln!(t, "format = \"arrow\""),
            Format::Sparse { .. } => {}
        }
        self.write_options(&mut t);
        for c in &self.columns {
            let _ = writeln!(t, "\n[[data.columns]]");
            let percent = 100.0 * c.missing as f64 / c.rows.max(1) as f64;
            let missing = if c.missing > 0 { format!(", {percent:.1} % missing") } else { String::new() };
            let range = match c.range {
                Some([low, high]) if c.numbers + c.missing == c.rows => format!(", {low} to {high}"),
                _ => String::new(),
            };
            let more = if c.distinct >= MOST_DISTINCT { "at least " } else { "" };
            let examples = one_line(&c.examples.join("  "));
            let _ = writeln!(t, "# {more}{} values{range}{missing}: {examples}", c.distinct);
            for w in &c.warnings {
                let _ = writeln!(t, "# note: {}", one_line(w));
            }
            let _ = writeln!(t, "name = {}\nkind = \"{}\"", quote(&c.name), c.kind);
            if !c.na.is_empty() && c.kind == "numeric" {
                let texts: Vec<String> = c.na.iter().map(|n| quote(n)).collect();
                let _ = writeln!(t, "na = [{}]", texts.join(", "));
            }
            match c.kind {
                "label" if !c.warnings.is_empty() => {
                    let rule = match c.range {
                        Some([low, high]) if c.numbers == c.rows => format!(">= {}", (low + high) / 2.0),
                        _ => format!("= {}", positive_value(c).unwrap_or_else(|| "yes".into())),
                    };
                    let _ = writeln!(t, "positive = {}", quote(&rule));
                }
                "numeric" => {
                    let _ = writeln!(t, "transform = \"{}\"", if c.skewed() { "log" } else { "standardize" });
                    let _ = writeln!(t, "indicator = {}", c.missing > 0);
                }
                "list" => {
                    let separator = c.separator.unwrap_or('|').to_string();
                    let _ = writeln!(t, "separator = {}\npooling = \"mean\"", quote(&separator));
                }
                "categorical" if c.distinct >= HASHED_FROM => {
                    let _ = writeln!(t, "hash = {{ buckets = {} }}", (2 * c.distinct).next_power_of_two());
                }
                _ => {}
            }
        }
        t
    }

    /// What was said about the files, or found: so that whoever reads the schema need not say it again.
    fn write_options(&self, t: &mut String) {
        let o = &self.options;
        let quote = |s: &str| toml::Value::String(s.to_string()).to_string();
        if let Some(q) = o.quote {
            let text = q.map_or(String::new(), |b| char::from(b).to_string());
            let _ = writeln!(t, "quote = {}", quote(&text));
        }
        if !o.comment.is_empty() {
            let _ = writeln!(t, "comment = {}", quote(&o.comment));
        }
        if !o.na.is_empty() {
            let texts: Vec<String> = o.na.iter().map(|n| quote(n)).collect();
            let _ = writeln!(t, "na = [{}]", texts.join(", "));
        }
        if !o.encoding.is_empty() {
            let _ = writeln!(t, "encoding = {}", quote(&o.encoding));
        }
        if o.trim {
            let _ = writeln!(t, "trim = true                          # blanks around fields mean nothing");
        }
        if self.columns.iter().any(|c| matches!(c.kind, "categorical" | "list")) {
            let _ = writeln!(
                t,
                "min_count = 2                        # rows in which a value must occur to have an embedding"
            );
        }
    }
}

/// A text without line breaks, for a comment.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}
