//! What is in a file's columns, and a schema that fits them: `birkhoff schema`.

use std::fmt::Write;

use serde::Serialize;

use super::delimited::sample;
use super::error::DataError;
use super::format::{Format, resolve};
use super::guess::{guess_label, looks_like_header};
use super::plan::{parse_number, spaced_number};
use super::reader::{Labels, ReadOptions, RowPolicy, Source};
use super::schema::{CategoricalColumn, Encoding, ListOptions, Pooling, Schema};
use super::split::time_of;
use super::vocab::Interner;

/// Distinct values that are counted one by one.
const MOST_DISTINCT: usize = 1 << 20;
/// Values from which a column is hashed rather than given a vocabulary.
const HASHED_FROM: usize = 1 << 19;

/// What was seen in one column.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ColumnSurvey {
    /// Its name.
    pub name: String,
    /// What it is guessed to be.
    pub kind: &'static str,
    /// Rows.
    pub rows: u64,
    /// Rows without a value.
    pub missing: u64,
    /// Distinct values, up to a million.
    pub distinct: usize,
    /// Rows with a decimal number.
    pub numbers: u64,
    /// Rows with a whole number.
    pub whole: u64,
    /// Rows with a date.
    pub dates: u64,
    /// Least and greatest number.
    pub range: Option<[f64; 2]>,
    /// Rows with a separator that lists have.
    pub separated: u64,
    /// That separator.
    pub separator: Option<char>,
    /// The first few values.
    pub examples: Vec<String>,
    /// What a person should look at.
    pub warnings: Vec<String>,
    /// Whether its cells are lists.
    pub lists: bool,
    #[serde(skip)]
    pub(super) values: Interner,
    /// Rows of each of them.
    #[serde(skip)]
    pub(super) counts: Vec<u32>,
    #[serde(skip)]
    pub(super) longest: usize,
    #[serde(skip)]
    pub(super) shortest: usize,
}

/// What was seen in files.
#[derive(Clone, Debug, Serialize)]
pub struct Survey {
    /// The format.
    pub format: String,
    /// Whether the first file has a header.
    pub header: bool,
    /// Rows that were looked at.
    pub rows: u64,
    /// Rows that could not be read.
    pub skipped: u64,
    /// The first few of these.
    pub problems: Vec<String>,
    /// Whether these are all rows.
    pub complete: bool,
    /// Share of positive rows, where the label is 0 and 1.
    pub label_rate: Option<f64>,
    /// The columns, in file order.
    pub columns: Vec<ColumnSurvey>,
    #[serde(skip)]
    shape: Format,
}

/// Looks at up to `most` rows (0 = all) of a source; `label` is the column to predict, if it is known.
pub fn survey(source: &Source, most: u64, label: Option<&str>) -> Result<Survey, DataError> {
    let path = source.places[0].name();
    let (head, _) = source.places[0].open(&source.format)?;
    let fail = |problem: String| DataError::Format { path: path.clone(), problem };
    if head.iter().all(u8::is_ascii_whitespace) {
        return Err(DataError::Empty { path, expected: "rows of data".into() });
    }
    let shape = resolve(&head, &source.format).map_err(fail)?;
    let mut source = source.clone();
    source.read = ReadOptions { policy: RowPolicy::Skip, labels: Labels::Optional };
    // lists: which columns hold them, in a columnar file
    let (names, header, lists) = match &shape {
        Format::Delimited(d) if d.criteo => {
            // as any other text, so that each column is looked at
            (source.format.format, source.format.header) = (super::format::FormatName::Tsv, Some(false));
            (Schema::criteo(super::schema::Transform::Log, true, ENCODING).file, false, vec![])
        }
        Format::Delimited(d) => {
            let comment = source.format.comment.clone().into_bytes();
            let records = sample(&head, d, &comment, 100);
            let Some(first) = records.first() else {
                return Err(DataError::Empty { path, expected: "rows of data".into() });
            };
            let header = d.header.unwrap_or_else(|| {
                let rest: Vec<&[Vec<u8>]> = records[1..].iter().map(|r| &r.values[..]).collect();
                looks_like_header(&first.values, &rest)
            });
            source.format.header = Some(header);
            let name = |(i, v): (usize, &Vec<u8>)| {
                if header { String::from_utf8_lossy(v).into_owned() } else { format!("c{}", i + 1) }
            };
            (first.values.iter().enumerate().map(name).collect(), header, vec![])
        }
        Format::Sparse { .. } => {
            return Err(fail(format!(
                "is {}; its schema is written by hand: columns are named by index, field or position (docs/data.md, libsvm)",
                shape.describe()
            )));
        }
        #[cfg(all(feature = "formats", not(target_arch = "wasm32")))]
        Format::Parquet => {
            let file = super::columnar::Columnar::parquet(&source.places[0], |_| true)?;
            (file.names, true, file.lists)
        }
        #[cfg(all(feature = "formats", not(target_arch = "wasm32")))]
        Format::Arrow { stream } => {
            let file = super::columnar::Columnar::arrow(&source.places[0], *stream)?;
            (file.names, true, file.lists)
        }
        #[cfg(not(all(feature = "formats", not(target_arch = "wasm32"))))]
        _ => return Err(fail("is columnar, which this build does not read".into())),
    };
    let mut columns: Vec<ColumnSurvey> = names
        .iter()
        .map(|n| ColumnSurvey { name: n.clone(), shortest: usize::MAX, ..Default::default() })
        .collect();
    let mut seen = std::collections::HashSet::new();
    if let Some(twice) = names.iter().find(|n| !seen.insert(*n)) {
        return Err(fail(format!("column {twice:?} stands twice in the header; rename one")));
    }
    if let Some(empty) = names.iter().position(String::is_empty) {
        return Err(fail(format!("column {} has no name in the header; give it one", empty + 1)));
    }
    let schema = all_text(&names, &lists);
    for (column, list) in columns.iter_mut().zip(&lists) {
        column.lists = *list;
    }
    let mut reader = source.open(&schema)?;
    let most = if most == 0 { u64::MAX } else { most };
    let (mut rows, mut complete) = (0, false);
    let width = names.len();
    while rows < most {
        let Some(chunks) = reader.next_chunks(|rows| rows)? else {
            complete = true;
            break;
        };
        for raw in &chunks {
            let taken = (raw.len() as u64).min(most - rows);
            rows += taken;
            for (j, column) in columns.iter_mut().enumerate() {
                for cell in (0..taken as usize).map(|r| r * width + j) {
                    if column.lists {
                        column.push_list(raw.list(cell));
                    } else {
                        column.push(raw.field(cell));
                    }
                }
            }
        }
    }
    let skipped = reader.skipped().clone();
    let label = match label {
        Some(name) if !names.iter().any(|n| n == name) => {
            return Err(fail(format!("has no column {name:?}; it has {}", super::plan::listed(&names))));
        }
        Some(name) => Some(name.to_string()),
        None => guess_label(&columns),
    };
    // Criteo's columns have names, though not in the file
    let named = header || matches!(&shape, Format::Delimited(d) if d.criteo);
    columns.iter_mut().for_each(|c| c.guess(named));
    let mut survey = Survey {
        format: shape.describe(),
        header,
        rows,
        skipped: skipped.skipped,
        problems: skipped.first,
        complete,
        label_rate: None,
        columns,
        shape,
    };
    if let Some(label) = label {
        survey.compare_with_label(&source, &schema, &label, rows)?;
    }
    Ok(survey)
}

const ENCODING: Encoding = Encoding::Vocabulary { min_count: 1, max_size: None };

/// A schema in which every column is text and none the label.
fn all_text(names: &[String], lists: &[bool]) -> Schema {
    let list = |i: usize| {
        let options = ListOptions { separator: '|', pooling: Pooling::Mean, max_length: 0 };
        lists.get(i).copied().unwrap_or(false).then_some(options)
    };
    let column = |(i, n)| CategoricalColumn { list: list(i), ..CategoricalColumn::single(n, ENCODING) };
    Schema {
        categorical: names.iter().enumerate().map(column).collect(),
        label: super::schema::LabelColumn { name: "(no label)".into(), positive: None },
        file: names.to_vec(),
        ..Schema::default()
    }
}

impl ColumnSurvey {
    fn push_list<'a>(&mut self, items: impl ExactSizeIterator<Item = &'a [u8]>) {
        let (rows, missing) = (self.rows + 1, self.missing + u64::from(items.len() == 0));
        items.for_each(|item| self.push(item));
        (self.rows, self.missing) = (rows, missing);
    }

    fn push(&mut self, value: &[u8]) {
        self.rows += 1;
        if value.is_empty() {
            self.missing += 1;
            return;
        }
        self.longest = self.longest.max(value.len());
        self.shortest = self.shortest.min(value.len());
        let number = parse_number(value).or_else(|| spaced_number(value));
        if let Some(v) = number {
            self.numbers += 1;
            self.whole += u64::from(v.fract() == 0.0 && !value.contains(&b'.'));
            let range = self.range.get_or_insert([v, v]);
            *range = [range[0].min(v), range[1].max(v)];
        } else if time_of(value).is_some() {
            self.dates += 1;
        }
        let separators = ['|', ';', ','];
        if number.is_none()
            && let Some(s) = separators.into_iter().find(|s| value.contains(&(*s as u8)))
        {
            self.separated += u64::from(self.separator.is_none_or(|known| known == s));
            self.separator.get_or_insert(s);
        }
        if let Some(i) = self.values.get(value) {
            self.counts[i as usize] = self.counts[i as usize].saturating_add(1);
        } else if self.values.len() < MOST_DISTINCT {
            self.values.intern(value);
            self.counts.push(1);
            self.distinct = self.values.len();
            if self.examples.len() < 4 {
                self.examples.push(super::error::quoted(value).trim_matches('"').to_string());
            }
        }
    }
}

impl Survey {
    /// Reads again to compare every column with the label.
    fn compare_with_label(
        &mut self,
        source: &Source,
        schema: &Schema,
        label: &str,
        most: u64,
    ) -> Result<(), DataError> {
        let Some(at) = self.columns.iter().position(|c| c.name == label) else { return Ok(()) };
        let width = self.columns.len();
        let mut equal = vec![true; width];
        let (mut rows, mut positives) = (0u64, 0u64);
        let mut reader = source.open(schema)?;
        while rows < most
            && let Some(chunks) = reader.next_chunks(|rows| rows)?
        {
            for raw in &chunks {
                for r in 0..raw.len() {
                    let y = raw.field(r * width + at);
                    positives += u64::from(y == b"1");
                    for (j, e) in equal.iter_mut().enumerate() {
                        *e = *e && !self.columns[j].lists && raw.field(r * width + j) == y;
                    }
                }
                rows += raw.len() as u64;
            }
        }
        for (j, column) in self.columns.iter_mut().enumerate() {
            if j != at && equal[j] {
                column.warnings.push("equals the label in every row: it would be the answer".into());
                column.kind = "ignore";
            }
        }
        let column = &mut self.columns[at];
        column.kind = "label";
        column.warnings.clear();
        let binary = column.missing == 0
            && (0..column.values.len()).all(|i| matches!(column.values.value(i), b"0" | b"1"));
        if binary {
            self.label_rate = Some(positives as f64 / rows.max(1) as f64);
        } else {
            column.warnings.push("not 0 and 1: say which values are positive".into());
        }
        Ok(())
    }

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
            }
            Format::Parquet => _ = writeln!(t, "format = \"parquet\""),
            Format::Arrow { .. } => _ = writeln!(t, "format = \"arrow\""),
            Format::Sparse { .. } => {}
        }
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
            match c.kind {
                "label" if !c.warnings.is_empty() => {
                    let rule = match c.range {
                        Some([low, high]) if c.numbers == c.rows => format!(">= {}", (low + high) / 2.0),
                        _ => format!("= {}", c.examples.first().map_or("yes", String::as_str)),
                    };
                    let _ = writeln!(t, "positive = {}", quote(&rule));
                }
                "numeric" => {
                    let log = c.range.is_some_and(|[low, high]| low >= 0.0 && high > 50.0);
                    let _ = writeln!(t, "transform = \"{}\"", if log { "log" } else { "standardize" });
                    let _ = writeln!(t, "indicator = {}", c.missing > 0);
                }
                "list" => {
                    let separator = c.separator.unwrap_or('|').to_string();
                    let _ = writeln!(t, "separator = {}\npooling = \"mean\"", quote(&separator));
                }
                "categorical" if c.distinct >= HASHED_FROM => {
                    let _ = writeln!(t, "hash = {{ buckets = {} }}", (2 * c.distinct).next_power_of_two());
                }
                "categorical" => _ = writeln!(t, "vocabulary = {{ min_count = 2 }}"),
                _ => {}
            }
        }
        t
    }
}

/// A text without line breaks, for a comment.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::format::FormatOptions;
    use crate::data::input::Place;

    fn of(text: &str) -> Survey {
        let source = Source::new(
            vec![Place::Bytes("x.csv".into(), text.as_bytes().into())],
            FormatOptions::default(),
            ReadOptions::default(),
        );
        survey(&source, 0, None).unwrap()
    }

    #[test]
    fn kinds_are_guessed_with_warnings() {
        let mut text = String::from("row_id,click,age,price,site,genres,same,copy,day,note\n");
        for i in 0..300 {
            let site = ["a", "b", "c"][i % 3];
            let genres = ["x|y", "y", "x|z|y"][i % 3];
            let y = usize::from(i % 4 == 0);
            text += &format!(
                "{},{y},{},{}.5,{site},{genres},7,{y},2024-01-{:02},\"text, no {i}\"\n",
                1000 + i,
                i % 60,
                i,
                i % 28 + 1
            );
        }
        let s = of(&text);
        let kinds: Vec<&str> = s.columns.iter().map(|c| c.kind).collect();
        assert_eq!(
            kinds,
            [
                "ignore",
                "label",
                "numeric",
                "numeric",
                "categorical",
                "list",
                "ignore",
                "ignore",
                "ignore",
                "list"
            ]
        );
        assert!(s.header && s.complete && s.rows == 300 && (s.label_rate.unwrap() - 0.25).abs() < 1e-9);
        assert!(
            s.columns[7].warnings[0].contains("equals the label")
                && s.columns[6].warnings[0].contains("same value")
        );
        let toml = s.to_toml("x.csv");
        let config = crate::model::config::Config::from_text("s.toml", &toml, &[]).unwrap();
        let schema = crate::train::schema::schema(&config.data).unwrap();
        assert_eq!(
            (schema.label.name.as_str(), schema.numeric.len(), schema.categorical.len()),
            ("click", 2, 3)
        );
    }

    #[test]
    fn files_without_a_header_and_odd_labels() {
        let text: String = (0..200)
            .map(|i| format!("{},{},{}\n", i % 5 + 1, i % 17 + 100_000, ["u", "NA", "3"][i % 3]))
            .collect();
        let source = Source::new(
            vec![Place::Bytes("x".into(), text.as_bytes().into())],
            FormatOptions::default(),
            ReadOptions::default(),
        );
        let s = survey(&source, 0, Some("c1")).unwrap();
        assert!(!s.header);
        let toml = s.to_toml("x");
        assert!(toml.contains("positive = \">= 3\"") && toml.contains("look like ids"), "{toml}");
        assert!(survey(&source, 0, Some("nope")).unwrap_err().to_string().contains("has no column \"nope\""));
    }
}
